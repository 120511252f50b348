"""Megatron's layers on CPU: without Transformer Engine's attention and experts."""

from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from verl_vcpo.actor import local_layers
from verl_vcpo.actor.varlen_attention import VarlenAttention


class Experts(SequentialMLP):
    """Megatron's experts as one MLP each; weights have the names of fused experts, which weight bridges know.

    experts.local_experts.3.linear_fc1.weight -> experts.linear_fc1.weight3
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        experts = list(self.local_experts)
        del self.local_experts
        object.__setattr__(self, "local_experts", experts)  # hidden from the module tree
        for layer in ("linear_fc1", "linear_fc2"):
            fused = torch.nn.Module()
            for i, expert in enumerate(experts):
                fused.register_parameter(f"weight{i}", getattr(expert, layer).weight)
            self.add_module(layer, fused)


def block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Return the layers of one (virtual) pipeline stage: Megatron's, with attention and experts for the CPU."""
    spec = local_layers.layer_spec(config, VarlenAttention)
    if config.num_moe_experts:
        spec.submodules.mlp.submodules.experts.module = Experts
    return local_layers.block_spec(spec, config, vp_stage)
