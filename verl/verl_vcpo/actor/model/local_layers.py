"""Megatron's own layers ("local"), with norms separate from linear layers.

They take the place of Transformer Engine's layers, which fuse a norm with the linear layer after the norm, where
Transformer Engine is not installed: on CPUs, and in measurements that need no packages with kernels.
"""

import importlib.util
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE, TEDotProductAttention
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

from verl_vcpo.actor.model import packed_rotary
from verl_vcpo.actor.model.latent_attention import with_plain_queries
from verl_vcpo.actor.model.megatron_bridge import AutoMapping
from verl_vcpo.actor.model.varlen_attention import VarlenAttention
from verl_vcpo.actor.taps.experts import TappedRouter
from verl_vcpo.actor.taps.modules import TappedNorm

ATTENTION: type = TEDotProductAttention if HAVE_TE else VarlenAttention

AutoMapping.register_module_type(TappedRouter.__name__, "replicated")  # as the router that it takes the place of


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


class LocalLayers(MegatronEngineWithLMHead):
    """Mixin of Megatron engines, before verl's class: local layers where Transformer Engine is not installed.

    `vcpo.norms.how=packed` works on local layers and on those of Transformer Engine, which Megatron-Bridge builds by
    default. `actor_rollout_ref.actor.megatron.override_transformer_config.transformer_impl=local` is for a Transformer
    Engine of another version, whose layers cannot be tapped. Attention is Transformer Engine's with both kinds of
    layers; local layers use torch's where Transformer Engine is not installed.
    """

    def _build_tf_config(self) -> None:
        super()._build_tf_config()
        packed_rotary.install()
        chosen = "gradient_accumulation_fusion" in self.engine_config.override_transformer_config
        if not chosen and importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is None:
            # Megatron-Bridge turns the fusion on where Transformer Engine is installed; Megatron's output layer, which
            # is there beside Transformer Engine's layers too, then refuses to be built without APEX's extension.
            self.provider.gradient_accumulation_fusion = False
        if not HAVE_TE:
            self.provider.transformer_impl = "local"
        if self.provider.transformer_impl == "local":
            self.provider.transformer_layer_spec = local_block
        elif self.provider.multi_latent_attention and self.provider.q_lora_rank is None:
            self.provider.transformer_layer_spec = with_plain_queries(self.provider.transformer_layer_spec)
        if self.peft_cls is not None:
            # with False Transformer Engine's norm gathers its output for the adapter, and drops the gradient of that
            self.peft_cls.sequence_parallel_input_regather = True

    def _build_megatron_module(self) -> list[torch.nn.Module]:
        """Build and load the model. Norms after a layer (Gemma 3) get the model's epsilon; Megatron-Bridge has 1e-5."""
        chunks: list[torch.nn.Module] = super()._build_megatron_module()
        for name, module in (pair for chunk in chunks for pair in chunk.named_modules()):
            if name.endswith(".post_layernorm"):
                module.eps = self.tf_config.layernorm_epsilon
        return chunks


def local_block(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Return the local layers of a pipeline stage, as Megatron-Bridge asks for them."""
    return block_spec(layer_spec(config, ATTENTION), config, vp_stage)
