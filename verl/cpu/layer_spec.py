"""Plain-torch attention and RMSNorm in the places where Megatron's layers want Transformer Engine."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.RMSNorm):
    """torch's RMSNorm, its weight marked so that sequence parallelism sums its gradient over tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class VarlenAttention(MegatronModule):
    """Causal grouped-query attention for padded ([S, B, H, D]) and packed ([T, H, D]) batches.

    A packed batch is padded on the right for one SDPA call: under a causal mask no real token sees the padding.

    Raises:
        NotImplementedError: context parallelism, dropout or a sliding window, which it does not have.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size > 1:
            raise NotImplementedError("context parallelism on CPU: set actor.megatron.context_parallel_size=1")
        if config.attention_dropout or config.window_size is not None:
            raise NotImplementedError("attention on CPU has neither dropout nor a sliding window")
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[B, S, H, D] queries, [B, S, G, D] keys and values -> [B, S, H, D]."""
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True).transpose(
            1, 2
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """[S, B, H, D] -> [S, B, H*D], or packed [T, H, D] -> [T, H*D]."""
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            out = self._attend(*(x.transpose(0, 1) for x in (query, key, value)))
            return out.transpose(0, 1).flatten(2)
        offsets = packed_seq_params.cu_seqlens_q_padded
        if offsets is None:
            offsets = packed_seq_params.cu_seqlens_q
        lengths = offsets.diff()
        if len(lengths) == 1:
            return self._attend(*(x.unsqueeze(0) for x in (query, key, value))).squeeze(0).flatten(1)
        real = torch.arange(int(lengths.max())) < lengths[:, None]  # [B, S]
        padded = []
        for x in (query, key, value):
            full = x.new_zeros(*real.shape, *x.shape[1:])
            full[real] = x
            padded.append(full)
        return self._attend(*padded)[real].flatten(1)


def layer_spec(qk_layernorm: bool = False) -> ModuleSpec:
    """One transformer layer: Megatron's own, with the modules of this file."""
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=qk_layernorm)
    spec.submodules.input_layernorm = RMSNorm
    spec.submodules.pre_mlp_layernorm = RMSNorm
    attention = spec.submodules.self_attention.submodules
    attention.core_attention = VarlenAttention
    if qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def block_spec(config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """The layers that this pipeline (and virtual pipeline) stage builds."""
    layers = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(
        layer_specs=[layer_spec(config.qk_layernorm) for _ in range(layers)], layer_norm=RMSNorm
    )
