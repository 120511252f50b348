"""mbridge for layers without Transformer Engine: the layer spec, and the names of weights that it would fuse."""

from mbridge.core import register_model
from mbridge.models.qwen2 import Qwen2Bridge
from mbridge.models.qwen3moe import Qwen3MoEBridge
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from verl_vcpo.cpu.layer_spec import block_spec

_NORMS = {
    ".input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"],
    ".pre_mlp_layernorm.weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"],
}


class _UnfusedLayers:
    """What both bridges need on CPU: the layers of `layer_spec`, whose norms are modules of their own."""

    _DIRECT_MAPPING: dict[str, str]
    _OTHER_MAPPING = _NORMS
    config: TransformerConfig

    def _adjust_mapping_for_shared_weights(self) -> None:
        # Upstream changes the class's dictionary, and so every later model's: give this instance its own.
        self._DIRECT_MAPPING = dict(type(self)._DIRECT_MAPPING)
        super()._adjust_mapping_for_shared_weights()  # type: ignore[misc]

    def _weight_name_mapping_mcore_to_hf(self, mcore_weights_name: str) -> list[str]:
        if "pre_mlp_layernorm" in mcore_weights_name:  # upstream takes it for an MLP weight
            return self._weight_name_mapping_other(mcore_weights_name)  # type: ignore[attr-defined]
        return super()._weight_name_mapping_mcore_to_hf(mcore_weights_name)  # type: ignore[misc]

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        self.has_vp_stage = True
        return block_spec(self.config, vp_stage=vp_stage)


@register_model("qwen2")
class CPUQwen2Bridge(_UnfusedLayers, Qwen2Bridge):
    """Qwen2 (Hugging Face) <-> Megatron with the layers of `layer_spec`. Registering it replaces mbridge's own."""


@register_model("qwen3_moe")
class CPUQwen3MoEBridge(_UnfusedLayers, Qwen3MoEBridge):
    """Qwen3-MoE <-> Megatron with the experts of `layer_spec`."""

    def _build_config(self) -> TransformerConfig:
        self.extra_args = {**self.extra_args, "moe_grouped_gemm": False}
        return super()._build_config()
