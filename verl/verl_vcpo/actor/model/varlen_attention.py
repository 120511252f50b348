"""Attention over packed sequences with torch's kernels, where Transformer Engine is not installed, as on CPUs."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

# Without cuDNN, which builds a plan for every new shape, up to a second each: lengths make thousands of shapes.
_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class VarlenAttention(MegatronModule):
    """Causal grouped-query attention for padded ([S, B, H, D]) and packed ([T, H, D]) batches.

    On a GPU in half precision torch's FlashAttention takes packed sequences as they are. Elsewhere, and under context
    parallelism, sequences are padded on the right for one SDPA call. Under context parallelism every rank gathers the
    keys and values of the group (Transformer Engine passes them around a ring), and computes attention for its queries.

    Raises:
        NotImplementedError: the configuration has dropout or a sliding window.
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
        if config.attention_dropout or config.window_size is not None:
            raise NotImplementedError("attention without Transformer Engine has neither dropout nor a sliding window")
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.cp_group = groups.cp
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

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
        """Map [S, B, H, D] to [S, B, H*D], or packed [T, H, D] to [T, H*D]; under context parallelism a rank's part."""
        if packed_seq_params is not None and packed_seq_params.qkv_format == "thd":
            offsets, ranks = packed_seq_params.cu_seqlens_q_padded, self.cp_group.size()
            if offsets is None:
                offsets = packed_seq_params.cu_seqlens_q
            return self._packed(query, key, value, offsets // ranks, packed_seq_params.max_seqlen_q // ranks)
        steps, batch = query.shape[:2]
        q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (query, key, value))  # [B*S, H, D]
        offsets = torch.arange(0, (batch + 1) * steps, steps, dtype=torch.int32, device=query.device)
        out = self._packed(q, k, v, offsets, steps)
        return out.unflatten(0, (batch, steps)).transpose(0, 1)

    def _packed(self, query: Tensor, key: Tensor, value: Tensor, offsets: Tensor, longest: int) -> Tensor:
        """Map packed [T, H, D] to [T, H*D]; `offsets` [B + 1] int32: the first token of each sequence on this rank."""
        if query.is_cuda and query.element_size() == 2 and self.cp_group.size() == 1:
            shared = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(shared, dim=1) if shared > 1 else x for x in (key, value))
            causal = (-1, 0)  # the window: all keys before the query, none after
            lengths = offsets, offsets, longest, longest
            out = varlen_attn(query, key, value, *lengths, scale=self.scale, window_size=causal)
            assert isinstance(out, Tensor)  # a tuple only where more is asked for
            return out.flatten(1)
        return self._padded(query, key, value, offsets.diff(), longest)

    def _padded(self, query: Tensor, key: Tensor, value: Tensor, length: Tensor, longest: int) -> Tensor:
        """Compute `_packed` with padding; `length` [B]: this rank's tokens of each sequence."""
        ranks, rank, device = self.cp_group.size(), self.cp_group.rank(), query.device
        # [T] the sequence of each token; `output_size` spares torch a copy of the size from the GPU
        sequence = torch.repeat_interleave(length, output_size=len(query))
        index = torch.arange(len(query), device=device) - (length.cumsum(0) - length)[sequence]  # [T] in this part
        positions = torch.cat([_zigzag(index, length[sequence], r, ranks) for r in range(ranks)])  # [ranks*T]
        if ranks > 1:  # the backward sums the gradients of keys and values over the ranks
            key = gather_from_sequence_parallel_region(key, group=self.cp_group)
            value = gather_from_sequence_parallel_region(value, group=self.cp_group)
        places = (sequence.repeat(ranks), positions)
        k = key.new_zeros(len(length), longest * ranks, *key.shape[1:]).index_put(places, key)
        v = value.new_zeros(len(length), longest * ranks, *value.shape[1:]).index_put(places, value)
        q = query.new_zeros(len(length), longest, *query.shape[1:]).index_put((sequence, index), query)
        mask = None
        if ranks > 1:  # padding queries get position 0; their outputs are not used
            at = torch.zeros(len(length), longest, dtype=torch.long, device=device)
            at[sequence, index] = positions.chunk(ranks)[rank]
            mask = (at[:, :, None] >= torch.arange(longest * ranks, device=device))[:, None]  # [B, 1, Sq, Sk]
        with sdpa_kernel(_KERNELS):
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                attn_mask=mask,
                is_causal=mask is None,
                scale=self.scale,
                enable_gqa=True,
            )
        return out.transpose(1, 2)[sequence, index].flatten(1)


def _zigzag(index: Tensor, length: Tensor, rank: int, ranks: int) -> Tensor:
    """Return the positions of a rank's tokens in their sequence: chunk r and the r-th from the end, of 2*ranks.

    Attention to a late chunk costs more than to an early one; so all ranks have the same work. `index` [T] is a token's
    position within the rank's part of its sequence, `length` [T] the length of that part.
    """
    if ranks == 1:
        return index
    chunk = length // 2
    return torch.where(index < chunk, rank * chunk + index, (2 * ranks - 1 - rank) * chunk + index - chunk)
