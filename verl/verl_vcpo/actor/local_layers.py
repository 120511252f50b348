"""Megatron's own layers ("local"), with norms separate from linear layers.

They take the place of Transformer Engine's layers, which fuse a norm with the linear layer after the norm, where
Transformer Engine is not installed: on CPUs, and in measurements that need no packages with kernels.
"""

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from verl_vcpo.actor.norms.modules import TappedNorm


class RMSNorm(TappedNorm, torch.nn.RMSNorm):
    """torch's RMSNorm, tapped for per-sequence gradients.

    The weight's mark `sequence_parallel` makes Megatron sum its gradient over tensor-parallel ranks.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def layer_spec(config: TransformerConfig, core_attention: type) -> ModuleSpec:
    """Return the spec of a transformer layer of Megatron's own modules, with `RMSNorm` and `core_attention`."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, normalization="RMSNorm", qk_layernorm=config.qk_layernorm
    )
    spec.submodules.input_layernorm = RMSNorm
    spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = core_attention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def block_spec(layer: ModuleSpec, config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Return the layers of one pipeline (and virtual pipeline) stage, all alike."""
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=RMSNorm)


class OwnNames:
    """Mixin for a bridge of mbridge: tied weights in one model leave the names of later models' weights as they are."""

    _DIRECT_MAPPING: dict[str, str]

    def _adjust_mapping_for_shared_weights(self) -> None:
        # Upstream changes the dictionary of the class, which all later models share: this instance gets a copy.
        self._DIRECT_MAPPING = dict(type(self)._DIRECT_MAPPING)
        super()._adjust_mapping_for_shared_weights()  # type: ignore[misc]


class UnfusedNames(OwnNames):
    """Mixin for a bridge of mbridge: the names of norm weights, which Transformer Engine's layers fuse."""

    _OTHER_MAPPING = {
        ".input_layernorm.weight": ["model.layers.{layer_number}.input_layernorm.weight"],
        ".pre_mlp_layernorm.weight": ["model.layers.{layer_number}.post_attention_layernorm.weight"],
    }
    config: TransformerConfig

    def _weight_name_mapping_mcore_to_hf(self, mcore_weights_name: str) -> list[str]:
        if "pre_mlp_layernorm" in mcore_weights_name:  # upstream treats the name as one of an MLP weight
            return self._weight_name_mapping_other(mcore_weights_name)  # type: ignore[attr-defined]
        return super()._weight_name_mapping_mcore_to_hf(mcore_weights_name)  # type: ignore[misc]
