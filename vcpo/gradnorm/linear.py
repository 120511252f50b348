"""The weight of a linear layer: sequence i's gradient is dW_i = dy_i^T x_i, and the packed gradient is their sum.

Two forms of ||dW_i||^2, for a sequence of L tokens:

    direct   form dW_i, square it: 2 L in out operations, the same that the packed product spends on these tokens
    gram     sum_{t,u} (x_t . x_u) (dy_t . dy_u): 2 L^2 (in + out) operations, no memory of the weight's size

The direct form also gives weighted sums of the dW_i in the same pass: then the products replace the packed
weight-gradient product, and only squaring and adding each dW_i is extra work. The direct form runs over blocks of the
weight's rows, so that a block of dW_i is still in the cache when it is squared and added.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vcpo.gradnorm import cost
from vcpo.gradnorm.segments import Bucket, Segments

# The size in bytes of the buffer that holds some rows of several sequences' dW_i until they are squared and added. On a
# CPU the buffer has to stay in the cache: sizes from 1 to 16 MiB were measured, and 8 MiB chosen.
_CPU_BYTES, _DEVICE_BYTES = 8 << 20, 256 << 20
_NUMBER = 4  # bytes: narrower products are widened to float32 before they are added
# On a CPU BLAS repacks the right operand at every call, so a block has at least 256 rows; adding several blocks at a
# time touches the (large) output buffer once instead of several times.
_FEWEST_ROWS, _SUMMED_AT_ONCE = 256, 4


def gram_costs_less(segments: Segments, inputs: int, outputs: int, number_bytes: int = _NUMBER) -> bool:
    """Return True where norms take less time in the Gram form than in the direct form, by operations and bytes."""
    of = cost.rates(segments.device.type, number_bytes)
    lengths = segments.lengths
    return cost.gram(lengths, inputs, outputs, of) < cost.direct(lengths, inputs, outputs, of, number_bytes)


def squared_norms(x: Tensor, dy: Tensor, segments: Segments, *, batched: bool | None = None) -> Tensor:
    """Compute ||dW_i||^2 of every sequence, in the form that costs less.

    Args:
        x: [T, in] inputs of the layer.
        dy: [T, out] gradients of its outputs.
        segments: n sequences.
        batched: one product for many sequences, padded to one length. None: false on a CPU, where one product per
            sequence is as fast and needs no padding.

    Returns:
        [n] float32.
    """
    if batches(x) if batched is None else batched:
        norms = torch.zeros(len(segments), device=x.device)
        add_squared_norms(x, dy, segments, tuple(range(len(segments))), norms)
        return norms
    if not gram_costs_less(segments, x.shape[1], dy.shape[1], dy.element_size()):
        return add_weighted_per_sequence(x, dy, segments, torch.empty(0, len(segments), device=x.device), [])
    parts = zip(x.split(segments.lengths), dy.split(segments.lengths), strict=True)
    return torch.stack([_gram_squared_norm(a, b) for a, b in parts]) if len(segments) else x.new_zeros(0).float()


def add_squared_norms(x: Tensor, dy: Tensor, segments: Segments, some: tuple[int, ...], norms: Tensor) -> None:
    """Add ||dW_i||^2 of some sequences to norms[i]: one padded product, or two, for each bucket.

    Args:
        x, dy, segments: those of `squared_norms`.
        some: numbers of sequences, ascending.
        norms: [n] float32.
    """
    padded = segments.padded(some)
    if not padded.buckets:
        return
    shape = x.shape[1], dy.shape[1], cost.rates(x.device.type, dy.element_size())
    x, dy = x[padded.tokens], dy[padded.tokens]
    direct = {
        bucket.first
        for bucket in padded.buckets
        if cost.direct([bucket.longest] * len(bucket), *shape, dy.element_size())
        <= cost.gram([bucket.longest] * len(bucket), *shape)
    }
    of_gram = tuple(bucket for bucket in padded.buckets if bucket.first not in direct)
    grams = _gram_squared_norms(x, dy, of_gram, padded.pairs(of_gram))
    parts = [
        _direct_squared_norms(bucket.part_of(x), bucket.part_of(dy), bucket.padding)
        if bucket.first in direct
        else next(grams)
        for bucket in padded.buckets
    ]
    norms.index_add_(0, padded.sequences, torch.cat(parts))


def _gram_squared_norms(x: Tensor, dy: Tensor, buckets: Sequence[Bucket], pairs: Tensor) -> Iterator[Tensor]:
    """Yield each bucket's squared norms [k] float32. All buckets' matrices lie in one block: few, large operations.

    Args:
        x, dy: [P, in], [P, out] the rows of all buckets.
        pairs: 1 for each pair of real tokens of these buckets, else 0.
    """
    sizes = [bucket.tokens.numel() * bucket.longest for bucket in buckets]
    both = []
    for rows in (x, dy):
        memory = rows.new_empty(sum(sizes))
        for bucket, part in zip(buckets, memory.split(sizes), strict=True):
            some = bucket.part_of(rows)
            torch.bmm(some, some.mT, out=part.view(len(bucket), bucket.longest, -1))
        both.append(memory)
    products = both[0].float().mul_(both[1].mul_(pairs))
    for bucket, part in zip(buckets, products.split(sizes), strict=True):
        yield part.view(len(bucket), -1).sum(1)


def _direct_squared_norms(x: Tensor, dy: Tensor, padding: Tensor) -> Tensor:
    """Return [k] float32 norms of [k, L, in] and [k, L, out], over as many rows of the weight as the buffer holds.

    The narrower factor is set to zero on padding, so padding adds nothing.
    """
    if len(x) > 1:
        narrower = x if x.shape[2] < dy.shape[2] else dy
        narrower.masked_fill_(padding[..., None], 0.0)  # a copy of the rows: a bucket of one sequence has no padding
    height = max(1, _DEVICE_BYTES // (len(x) * x.shape[2] * _NUMBER))
    parts = [
        torch.linalg.vector_norm(rows.mT @ x, dim=(1, 2), dtype=torch.float32).square_()
        for rows in dy.split(height, dim=2)
    ]
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def _gram_squared_norm(x: Tensor, dy: Tensor) -> Tensor:
    """Return sum_{t,u} (x_t . x_u) (dy_t . dy_u) of one sequence, float32.

    Both matrices are symmetric: for long sequences only tiles on and right of the diagonal are formed.
    """
    tokens = len(x)
    if tokens < 1.5 * cost.TILE:
        return torch.dot((x @ x.T).float().view(-1), (dy @ dy.T).float().view(-1))
    sums = []
    for top in range(0, tokens, cost.TILE):
        rows = slice(top, top + cost.TILE)
        products = (x[rows] @ x[top:].T).float().mul_(dy[rows] @ dy[top:].T)  # [tile, tokens - top]
        sums.append(2 * products.sum() - products[:, : cost.TILE].sum())
    return torch.stack(sums).sum()


def add_weighted(x: Tensor, dy: Tensor, coefficient: Tensor, into: Tensor) -> None:
    """Add to a buffer, as one packed product: into += sum_i coefficient_i dW_i.

    Args:
        x: [T, in] inputs of the layer.
        dy: [T, out] gradients of its outputs.
        coefficient: [T] the coefficient of each token's sequence.
        into: [out, in], usually of a wider dtype than the product.
    """
    # The product of two numbers is rounded to their format, once; a coefficient rounded before would be wrong for all
    # tokens of a sequence by as much, and in the same direction.
    coefficient = coefficient.to(torch.promote_types(dy.dtype, coefficient.dtype))[:, None]
    if x.shape[1] < dy.shape[1]:  # the narrower factor: fewer numbers are written
        _add_product(dy, (x * coefficient).to(x.dtype), into)
    else:
        _add_product((dy * coefficient).to(dy.dtype), x, into)


def _add_product(dy: Tensor, x: Tensor, into: Tensor) -> None:
    if into.dtype == x.dtype:
        into.addmm_(dy.T, x)
    else:
        into.add_(dy.T @ x)


def add_weighted_per_sequence(
    x: Tensor,
    dy: Tensor,
    segments: Segments,
    coefficient: Tensor,
    into: Sequence[Tensor],
    *,
    spans: Sequence[tuple[int, int]] | None = None,
) -> Tensor:
    """Add sum_i coefficient[j, i] dW_i to into[j] for every j. Return the norms of the dW_i from the same products.

    Args:
        x: [T, in] inputs of the layer.
        dy: [T, out] gradients of its outputs.
        segments: n sequences.
        coefficient: [k, n].
        into: k buffers [out, in].
        spans: (first, end) for each buffer: the coefficients of sequences outside of first <= i < end are 0, and the
            products of these sequences are not added. None: no such limits.

    Returns:
        [n] float32 ||dW_i||^2.
    """
    norms = torch.zeros(len(segments), device=x.device)
    spans = spans or [(0, len(segments))] * len(into)
    for first, end, rows, block in _blocks(x, dy, segments):
        norms[first:end] += _row_squares(block, x.shape[1])
        for weights, buffer, (low, high) in zip(coefficient, into, spans, strict=True):
            low, high = max(low, first), min(high, end)
            if low < high:
                _add_sum(block[low - first : high - first], weights[low:high], buffer[rows])
    return norms


def _add_sum(block: Tensor, weights: Tensor, into: Tensor) -> None:
    """Add weights @ block to a buffer, in the weights' format: the sums of large numbers may have to cancel.

    Args:
        block: [k, rows * in] some rows of k gradients.
        weights: [k].
        into: [rows, in].
    """
    block, into = block.to(torch.promote_types(block.dtype, weights.dtype)), into.view(1, -1)
    if into.dtype == block.dtype:
        into.addmm_(weights[None], block)
    else:
        into.add_(weights[None] @ block)


def batches(x: Tensor) -> bool:
    """Return True on all devices but a CPU: few large, padded products take less time than one for each sequence."""
    return x.device.type != "cpu"


def _row_squares(block: Tensor, inputs: int) -> Tensor:
    """Return [k] float32 squared norms of k gradients [k, rows * in], of some rows of the weight.

    torch adds up a norm's squares one after the other on a CPU: over a whole weight the error is 6e-5, over one row of
    the weight at a time 1e-7.
    """
    rows = block.view(len(block), -1, inputs)
    return torch.linalg.vector_norm(rows, dim=2, dtype=torch.float32).square_().sum(1)


def _bounds(segments: Segments) -> Iterator[tuple[int, int]]:
    return zip(segments.bounds, segments.bounds[1:], strict=False)


def _blocks(x: Tensor, dy: Tensor, segments: Segments) -> Iterator[tuple[int, int, slice, Tensor]]:
    """Yield (first, end, some rows of the weight, [k, rows * in] these rows of the dW_i): one product per sequence.

    The k sequences are first <= i < end.
    """
    outputs, inputs = dy.shape[1], x.shape[1]
    bounds = list(_bounds(segments))
    size = _CPU_BYTES if x.device.type == "cpu" else _DEVICE_BYTES
    budget = size // (inputs * _NUMBER)  # rows that fit in the buffer, of all sequences together
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
