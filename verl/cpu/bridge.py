"""mbridge for layers without Transformer Engine: the layer spec, and the names of norms that are not fused."""

from mbridge.core import register_model
from mbridge.models.qwen2 import Qwen2Bridge
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from verl_vcpo.cpu.layer_spec import block_spec


@register_model("qwen2")
class CPUQwen2Bridge(Qwen2Bridge):
    """Qwen2 (Hugging Face) <-> Megatron with the layers of `layer_spec`. Registering it replaces mbridge's own."""

    _OTHER_MAPPING = {
        ".input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"],
        ".pre_mlp_layernorm.weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"],
    }

    def _adjust_mapping_for_shared_weights(self) -> None:
        # Upstream changes the class's dictionary, and so every later model's: give this instance its own.
        self._DIRECT_MAPPING = dict(type(self)._DIRECT_MAPPING)
        super()._adjust_mapping_for_shared_weights()

    def _weight_name_mapping_mcore_to_hf(self, mcore_weights_name: str) -> list[str]:
        if "pre_mlp_layernorm" in mcore_weights_name:  # upstream takes it for an MLP weight
            return self._weight_name_mapping_other(mcore_weights_name)
        return super()._weight_name_mapping_mcore_to_hf(mcore_weights_name)

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        self.has_vp_stage = True
        return block_spec(self.config, vp_stage=vp_stage)
