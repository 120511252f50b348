"""The CPU stack on Transformer Engine's layers, in processes that import this module before anything else of the stack.

Models are those that mbridge builds on a GPU, with its own layer spec, except that attention, which has no parameters,
is torch's.
"""

from tests.kit import te_on_cpu

te_on_cpu.install()  # before Megatron is imported

from tests.kit import layout_worker  # noqa: E402, I001  # registers the CPU's bridges, which those below replace
from mbridge.core import register_model  # noqa: E402
from mbridge.models.qwen2 import Qwen2Bridge  # noqa: E402
from mbridge.models.qwen3 import Qwen3Bridge  # noqa: E402
from mbridge.models.qwen3moe import Qwen3MoEBridge  # noqa: E402
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules  # noqa: E402

from verl_vcpo.actor.local_layers import OwnNames  # noqa: E402
from verl_vcpo.actor.varlen_attention import VarlenAttention  # noqa: E402

run = layout_worker.run  # a process of `layout_run`


class _TorchAttention(OwnNames):
    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        block = super()._get_transformer_layer_spec(vp_stage)  # type: ignore[misc]
        for layer in block.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = VarlenAttention
        return block


@register_model("qwen2")
class TEQwen2Bridge(_TorchAttention, Qwen2Bridge):
    """Qwen2 and Qwen2.5."""


@register_model("qwen3")
class TEQwen3Bridge(_TorchAttention, Qwen3Bridge):
    """Qwen3, dense."""


@register_model("qwen3_moe")
class TEQwen3MoEBridge(_TorchAttention, Qwen3MoEBridge):
    """Qwen3-MoE, with all experts of a rank in one grouped layer."""


def pytest_configure() -> None:
    """Do nothing: `pytest -p tests.kit.te_stack` imports the module, and tests run on Transformer Engine's layers."""
