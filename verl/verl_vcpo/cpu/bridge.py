"""mbridge for layers without Transformer Engine."""

from typing import Any

from mbridge.core import register_model
from mbridge.models.qwen2 import Qwen2Bridge
from mbridge.models.qwen3 import Qwen3Bridge
from mbridge.models.qwen3moe import Qwen3MoEBridge
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from verl_vcpo.actor.llama import LlamaBridge
from verl_vcpo.actor.local_layers import UnfusedNames
from verl_vcpo.cpu.layer_spec import block_spec

DEVICE_REASONS = {
    "_UnfusedLayers._get_transformer_layer_spec": "attention and experts without CUDA kernels",
    "CPUQwen3MoEBridge._build_config": "grouped products of experts are CUDA kernels",
}


class _UnfusedLayers(UnfusedNames):
    """Mixin of all bridges on CPU, which build the layers of `layer_spec`."""

    def _get_transformer_layer_spec(self, vp_stage: int | None = None) -> TransformerBlockSubmodules:
        self.has_vp_stage = True
        return block_spec(self.config, vp_stage)


@register_model("qwen2")
class CPUQwen2Bridge(_UnfusedLayers, Qwen2Bridge):
    """Qwen2 (Hugging Face) <-> Megatron with the layers of `layer_spec`. Registering it replaces mbridge's own."""


@register_model("qwen3")
class CPUQwen3Bridge(_UnfusedLayers, Qwen3Bridge):
    """Qwen3, dense, <-> Megatron with the layers of `layer_spec`, and norms of queries and keys."""


@register_model("llama")
class CPULlamaBridge(_UnfusedLayers, LlamaBridge):
    """Llama, SmolLM2."""


@register_model("qwen3_moe")
class CPUQwen3MoEBridge(_UnfusedLayers, Qwen3MoEBridge):
    """Qwen3-MoE <-> Megatron with the experts of `layer_spec`."""

    extra_args: dict[str, Any]

    def _build_config(self) -> TransformerConfig:
        self.extra_args = {**self.extra_args, "moe_grouped_gemm": False}
        return super()._build_config()
