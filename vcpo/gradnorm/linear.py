"""The weight of a linear layer: sequence i's gradient is dW_i = dy_i^T x_i, and the packed gradient is their sum.

Two forms of ||dW_i||^2, for a sequence of L tokens:

    direct   form dW_i, square it: 2 L in out operations, the same that the packed product spends on these tokens
    gram     sum_{t,u} (x_t . x_u) (dy_t . dy_u): 2 L^2 (in + out) operations, no memory of the weight's size

On a CPU the direct form takes the place of the packed product: weighted sums of the dW_i come from the same blocks of
the weight's rows, which are still in the cache when they are squared and added. On a GPU both forms are used (sums.py).
"""

import importlib
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from vcpo.gradnorm.segments import Segments

# The bytes of the buffer that holds some rows of several sequences' dW_i until they are squared and added. The buffer
# has to stay in the cache: sizes from 1 to 16 MiB were measured.
_CPU_BYTES = 8 << 20
_NUMBER = 4  # bytes: products are formed in float32
# BLAS repacks the right operand at every call, so a block has at least 256 rows; adding several blocks at a time
# touches the (large) output buffer once instead of several times.
_FEWEST_ROWS, _SUMMED_AT_ONCE = 256, 4


def kernel(*rows: Tensor) -> Any:
    """Return the module `gram_kernel` if it can take the rows: of two bytes per number, on a GPU; else None."""
    return _with_triton() if all(part.is_cuda and part.element_size() == 2 for part in rows) else None


@cache
def _with_triton() -> Any:
    try:
        return importlib.import_module("vcpo.gradnorm.gram_kernel")
    except ImportError:  # no Triton
        return None


def product(dy: Tensor, x: Tensor) -> Tensor:
    """Return dy^T x, [out, in] float32, of rows dy [T, out] and x [T, in] in any format.

    Two sums of products cancel where sequences share a gradient. In bfloat16 a product has 2e-3 of rounding, of which
    the difference of two sums keeps a multiple.
    """
    if dy.dtype == torch.float32 or not dy.is_cuda:
        return dy.T.float() @ x.float()
    return torch.mm(dy.T, x, out_dtype=torch.float32)


def add_gram_norms(x: Tensor, dy: Tensor, segments: Segments, some: tuple[int, ...], norms: Tensor) -> None:
    """Add ||dW_i||^2 of some sequences to norms[i], in the Gram form.

    In one kernel, or, where there is none, as two padded products for each bucket. All buckets' matrices lie in one
    block, for few, large operations.

    Args:
        x: [T, in] inputs of the layer.
        dy: [T, out] gradients of its outputs.
        segments: n sequences.
        some: numbers of sequences, ascending.
        norms: [n] float32.
    """
    if (fused := kernel(x, dy)) is not None:
        if some not in segments.tiles:
            segments.tiles[some] = fused.Tiles(segments, some)
        segments.tiles[some].add_norms(x, dy, norms)
        return
    padded = segments.padded(some)
    if not padded.buckets:
        return
    sizes = [bucket.tokens.numel() * bucket.longest for bucket in padded.buckets]
    both = []
    for rows in (x[padded.tokens], dy[padded.tokens]):
        memory = rows.new_empty(sum(sizes))
        for bucket, part in zip(padded.buckets, memory.split(sizes), strict=True):
            of_bucket = bucket.part_of(rows)
            torch.bmm(of_bucket, of_bucket.mT, out=part.view(len(bucket), bucket.longest, -1))
        both.append(memory)
    products = both[0].float().mul_(both[1].mul_(padded.pairs))
    parts = zip(padded.buckets, products.split(sizes), strict=True)
    norms.index_add_(0, padded.sequences, torch.cat([part.view(len(bucket), -1).sum(1) for bucket, part in parts]))


def add_weighted_per_sequence(
    x: Tensor,
    dy: Tensor,
    segments: Segments,
    coefficient: Tensor,
    into: Sequence[Tensor],
    spans: Sequence[tuple[int, int]],
) -> Tensor:
    """Add sum_i coefficient[j, i] dW_i to into[j] for every j. Return the norms of the dW_i from the same products.

    Args:
        x: [T, in] inputs of the layer.
        dy: [T, out] gradients of its outputs.
        segments: n sequences.
        coefficient: [k, n].
        into: k buffers [out, in].
        spans: (first, end) for each buffer: sequences outside of first <= i < end have the coefficient 0, and are not
            added.

    Returns:
        [n] float32 ||dW_i||^2.
    """
    norms = torch.zeros(len(segments), device=x.device)
    x, dy = x.float(), dy.float()  # as `product` forms them
    for first, end, rows, block in _blocks(x, dy, segments):
        norms[first:end] += _row_squares(block, x.shape[1])
        for weights, buffer, (low, high) in zip(coefficient, into, spans, strict=True):
            low, high = max(low, first), min(high, end)
            if low < high:
                _add_sum(block[low - first : high - first], weights[low:high], buffer[rows])
    return norms


def _blocks(x: Tensor, dy: Tensor, segments: Segments) -> Iterator[tuple[int, int, slice, Tensor]]:
    """Yield (first, end, some rows of the weight, [k, rows * in] these rows of the dW_i): one product per sequence.

    The k sequences are first <= i < end.
    """
    outputs, inputs = dy.shape[1], x.shape[1]
    bounds = list(pairwise(segments.bounds))
    budget = _CPU_BYTES // (inputs * _NUMBER)  # rows that fit in the buffer, of all sequences together
    together = max(1, min(len(bounds), _SUMMED_AT_ONCE, budget // _FEWEST_ROWS))
    height = min(outputs, max(_FEWEST_ROWS, budget // together))
    memory = x.new_empty(together * height * inputs)
    for top in range(0, outputs, height):
        rows = slice(top, min(outputs, top + height))
        size = (rows.stop - top) * inputs
        for first in range(0, len(bounds), together):
            end = min(len(bounds), first + together)
            block = memory[: (end - first) * size].view(-1, size)
            for (start, stop), dw in zip(bounds[first:end], block, strict=True):
                torch.mm(dy[start:stop, rows].T, x[start:stop], out=dw.view(-1, inputs))
            yield first, end, rows, block


def _row_squares(block: Tensor, inputs: int) -> Tensor:
    """Return [k] squared norms of k gradients [k, rows * in] float32, of some rows of the weight.

    torch adds up a norm's squares one after the other on a CPU: over a whole weight the error is 6e-5, over one row of
    the weight at a time 1e-7.
    """
    rows = block.view(len(block), -1, inputs)
    return torch.linalg.vector_norm(rows, dim=2).square_().sum(1)


def _add_sum(block: Tensor, weights: Tensor, into: Tensor) -> None:
    """Add weights [k] @ block [k, rows * in] to a buffer [rows, in]."""
    block, into = block.to(weights.dtype), into.view(1, -1)
    if into.dtype == block.dtype:
        into.addmm_(weights[None], block)
    else:
        into.add_(weights[None] @ block)
