"""The CPU stack on Transformer Engine's layers, in processes that import this module before anything else of the stack.

Models are those that Megatron-Bridge builds on a GPU, with its own layer specs, except that attention, which has no
parameters, is torch's.
"""

from tests.kit import te_on_cpu

te_on_cpu.install()  # before Megatron is imported

import inspect  # noqa: E402
from typing import Any  # noqa: E402

import transformer_engine  # noqa: E402

from tests.kit import layout_worker  # noqa: E402
from verl_vcpo.actor.local_layers import LocalLayers  # noqa: E402
from verl_vcpo.actor.varlen_attention import VarlenAttention  # noqa: E402
from verl_vcpo.cpu.megatron_shims import TRANSFORMER_CONFIG  # noqa: E402

TRANSFORMER_CONFIG["moe_grouped_gemm"] = True  # as Megatron-Bridge has it on a GPU
run = layout_worker.run  # a process of `layout_run`
_upstream = LocalLayers._build_tf_config


def _build_tf_config(self: Any) -> None:
    from megatron.bridge.peft import utils

    utils.version = lambda package: transformer_engine.__version__  # no package of that name is installed
    _upstream(self)
    layers = self.provider.transformer_layer_spec

    def with_torch_attention(config: Any, vp_stage: int | None = None) -> Any:
        takes_stage = "vp_stage" in inspect.signature(layers).parameters
        spec = layers(config, vp_stage=vp_stage) if takes_stage else layers(config)
        for layer in getattr(spec, "layer_specs", [spec]):
            layer.submodules.self_attention.submodules.core_attention = VarlenAttention
        return spec

    self.provider.transformer_layer_spec = with_torch_attention


LocalLayers._build_tf_config = _build_tf_config  # type: ignore[method-assign]


def pytest_configure() -> None:
    """Do nothing: `pytest -p tests.kit.te_stack` imports the module, and tests run on Transformer Engine's layers."""
