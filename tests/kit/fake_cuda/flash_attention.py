"""FlashAttention of packed sequences in plain torch, sequence by sequence: only CUDA has a kernel for it."""

import itertools
import math
from collections import Counter
from typing import Any

import torch
from torch import Tensor

calls: Counter[str] = Counter()
"""The number of calls in this process, by direction."""


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    begins: Tensor,
    begins_of_keys: Tensor,
    longest: int,
    longest_keys: int,
    dropout: float,
    causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    **of_later_versions: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute `aten::_flash_attention_forward` of packed [T, H, D]: (output, logsumexp [H, T], three not read)."""
    _check(query, key, dropout, begins, longest, causal, window_size_left, window_size_right, **of_later_versions)
    calls["forward"] += 1
    output, sums = torch.empty_like(query), query.new_empty(query.shape[1], len(query), dtype=torch.float32)
    for rows in _sequences(begins):
        scores = _scores(query[rows], key[rows], scale)
        sums[:, rows] = scores.logsumexp(-1)
        output[rows] = (scores.softmax(-1) @ value[rows].float().transpose(0, 1)).transpose(0, 1).to(output.dtype)
    unread = torch.zeros(2, dtype=torch.uint64)
    return output, sums, unread, unread, torch.empty(0)


def backward(
    of_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    sums: Tensor,
    begins: Tensor,
    begins_of_keys: Tensor,
    longest: int,
    longest_keys: int,
    dropout: float,
    causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `aten::_flash_attention_backward`: the gradients of query, key and value."""
    _check(query, key, dropout, begins, longest, causal, window_size_left, window_size_right)
    calls["backward"] += 1
    gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    factor = _factor(query, scale)
    for rows in _sequences(begins):
        q, k, v, upstream = (x[rows].float().transpose(0, 1) for x in (query, key, value, of_output))  # [H, L, D]
        weights = _scores(query[rows], key[rows], scale).softmax(-1)  # [H, L, L]
        of_weights = upstream @ v.mT
        of_scores = factor * weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True))
        for gradient, part in zip(gradients, (of_scores @ k, of_scores.mT @ q, weights.mT @ upstream), strict=True):
            gradient[rows] = part.transpose(0, 1).to(gradient.dtype)
    return gradients


def _sequences(begins: Tensor) -> list[slice]:
    bounds = begins.tolist()
    return [slice(start, end) for start, end in itertools.pairwise(bounds)]


def _factor(query: Tensor, scale: float | None) -> float:
    return 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale


def _scores(query: Tensor, key: Tensor, scale: float | None) -> Tensor:
    """Return [H, L, L] float32 scores of [L, H, D]; -inf for keys after the query."""
    scores = _factor(query, scale) * (query.float().transpose(0, 1) @ key.float().permute(1, 2, 0))
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -torch.inf)


def _check(
    query: Tensor,
    key: Tensor,
    dropout: float,
    begins: Tensor,
    longest: int,
    causal: bool,
    left: int | None,
    right: int | None,
    **more: Any,
) -> None:
    """Refuse arguments that the kernel of an H100 or this stand-in cannot take."""
    if query.dtype not in (torch.float16, torch.bfloat16) or query.shape[-1] % 8 or query.shape[-1] > 256:
        raise RuntimeError(
            f"FlashAttention takes half precision and heads of up to 256, a multiple of 8: {query.shape}"
        )
    if begins.dtype != torch.int32 or int(begins.diff().max()) > longest or int(begins[-1]) != len(query):
        raise RuntimeError(
            f"FlashAttention takes int32 offsets of all {len(query)} tokens, {longest} at most: {begins}"
        )
    if dropout or query.shape != key.shape or (left, right) != (-1, 0) or any(v is not None for v in more.values()):
        raise NotImplementedError(
            "the stand-in for FlashAttention is causal, without dropout, with as many keys as queries"
        )
