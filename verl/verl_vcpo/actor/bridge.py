"""mbridge's models on a GPU with Megatron's own layers: without Transformer Engine, or with `transformer_impl=local`.

`vcpo.norms.how=packed` works on local layers and on those of Transformer Engine, which mbridge builds by default.
`actor_rollout_ref.actor.megatron.override_transformer_config.transformer_impl=local` is for a Transformer Engine of
another version, whose layers cannot be tapped. Attention is Transformer Engine's with both kinds of layers; local
layers use torch's where Transformer Engine is not installed.
"""

from mbridge.core import register_model
from mbridge.models.qwen2 import Qwen2Bridge
from mbridge.models.qwen3 import Qwen3Bridge
from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from verl_vcpo.actor.llama import LlamaBridge
from verl_vcpo.actor.local_layers import UnfusedNames, block_spec, layer_spec
from verl_vcpo.actor.varlen_attention import VarlenAttention

ATTENTION: type = TEDotProductAttention if HAVE_TE else VarlenAttention


class _LocalLayers(UnfusedNames):
    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        if not HAVE_TE:
            self.config.transformer_impl = "local"
        if self.config.transformer_impl != "local":
            return super()._get_transformer_layer_spec(vp_stage)  # type: ignore[misc]
        self.has_vp_stage = True
        return block_spec(layer_spec(self.config, ATTENTION), self.config, vp_stage)


@register_model("qwen2")
class LocalQwen2Bridge(_LocalLayers, Qwen2Bridge):
    """Qwen2 and Qwen2.5. Registering it replaces mbridge's own."""


@register_model("qwen3")
class LocalQwen3Bridge(_LocalLayers, Qwen3Bridge):
    """Qwen3, dense."""


@register_model("llama")
class LocalLlamaBridge(_LocalLayers, LlamaBridge):
    """Llama, SmolLM2."""
