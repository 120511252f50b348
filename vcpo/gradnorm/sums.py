"""Norms and weighted sums of the gradients of a micro-batch's sequences: ||dW_i||^2, and sum_i c_ji dW_i in buffer j.

On a CPU every dW_i is formed in blocks that stay in the cache (`linear.add_weighted_per_sequence`). On a GPU, where no
cache holds them, every dW_i would be written and read several times; there

    long sequences    have a product of their own, from which the norm comes as well
    all others        share one product with all sequences of the same coefficients: a group's rewards have few values,
                      so that two sums of a group take the operations of one packed product. Their norms come in the
                      Gram form

All coefficients are known on the host before the backward, so that nothing waits for the GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vcpo.gradnorm.linear import add_gram_norms, add_weighted_per_sequence, product
from vcpo.gradnorm.segments import Segments, batches

# A GPU makes so many operations in the time in which a sequence's own product moves a number of the weight (bfloat16 at
# three quarters of 450 TFLOP/s, 20 bytes at 3 TB/s, an H100's rates), and moves so many numbers in the time that the
# host takes to launch the product. The choice follows from shapes alone: every run of a seed adds in the same order.
_OPERATIONS, _LAUNCHED = 2250, 6_000_000


@dataclass(frozen=True)
class _Shared:
    """The sequences without a product of their own."""

    sequences: tuple[int, ...]
    order: Tensor | None
    """The rows of the packed batch, coefficients after coefficients; None where they lie in this order already."""
    products: tuple[tuple[slice, tuple[float, ...]], ...]
    """Each product's rows in that order, and the factor of the product in each buffer."""


def squared_norms(x: Tensor, dy: Tensor, segments: Segments, *, batched: bool | None = None) -> Tensor:
    """Return [n] float32 ||dW_i||^2 of every sequence alone. Arguments: see `WeightedSums.add`."""
    norms = torch.zeros(len(segments), device=x.device)
    WeightedSums(segments, []).add(x, dy, [], norms, batched=batched)
    return norms


class WeightedSums:
    """The weighted sums of one micro-batch, for all weights of linear layers.

    Args:
        segments: n sequences.
        coefficient: n numbers for each of k buffers; without buffers there are norms alone.
    """

    def __init__(self, segments: Segments, coefficient: Sequence[Sequence[float]]) -> None:
        self.segments, self.coefficient = segments, coefficient
        self._of_sequence = list(zip(*coefficient, strict=True)) or [()] * len(segments)
        self._shared: dict[tuple[int, ...], _Shared] = {}

    def add(self, x: Tensor, dy: Tensor, into: Sequence[Tensor], norms: Tensor, *, batched: bool | None = None) -> None:
        """Add to buffers and norms: sum_i c_ji dW_i into buffer j, and ||dW_i||^2 into norm i.

        Args:
            x: [T, in] inputs of the layer.
            dy: [T, out] gradients of its outputs.
            into: k buffers [out, in].
            norms: [n] float32.
            batched: the form for GPUs. None: on all devices but a CPU.
        """
        if not (batches(x) if batched is None else batched):
            norms += add_weighted_per_sequence(x, dy, self.segments, self._on_device, into, self._spans)
            return
        long = self._long(x.shape[1], dy.shape[1])
        if long not in self._shared:
            self._shared[long] = self._share(tuple(i for i in range(len(self.segments)) if i not in long))
        shared = self._shared[long]
        add_gram_norms(x, dy, self.segments, shared.sequences, norms)
        for i in long:
            rows = slice(*self.segments.bounds[i : i + 2])
            own = product(dy[rows], x[rows])
            norm = torch.linalg.vector_norm(own)
            norms[i].addcmul_(norm, norm)
            _add(own, self._of_sequence[i], into)
        if shared.products and shared.order is not None:
            x, dy = x[shared.order], dy[shared.order]
        for rows, of_buffers in shared.products:
            _add(product(dy[rows], x[rows]), of_buffers, into)

    def _long(self, inputs: int, outputs: int) -> tuple[int, ...]:
        """Return the sequences whose norm costs more in the Gram form than their own product moves in memory.

        All of the symmetric matrices is counted, also where the kernel computes half: with that half as the limit,
        weighted sums of 2048 tokens took up to a fifth longer on an H200.
        """
        own = _OPERATIONS * (inputs * outputs + _LAUNCHED)
        return tuple(i for i, n in enumerate(self.segments.lengths) if 2 * n * n * (inputs + outputs) > own)

    def _share(self, sequences: tuple[int, ...]) -> _Shared:
        bounds, of = self.segments.bounds, self._of_sequence
        used = [i for i in sequences if any(of[i]) and bounds[i] < bounds[i + 1]]
        kinds = list(dict.fromkeys(of[i] for i in used))
        used.sort(key=lambda i: kinds.index(of[i]))  # stable: by first appearance
        products, end = [], 0
        for kind in kinds:
            start, end = end, end + sum(self.segments.lengths[i] for i in used if of[i] == kind)
            products.append((slice(start, end), kind))
        rows = [row for i in used for row in range(bounds[i], bounds[i + 1])]
        if rows == list(range(end)):
            return _Shared(sequences, None, tuple(products))
        order = torch.tensor(rows, dtype=torch.long).to(self.segments.device, non_blocking=True)
        return _Shared(sequences, order, tuple(products))

    @cached_property
    def _on_device(self) -> Tensor:
        """[k, n] the coefficients on the device."""
        numbers = torch.tensor(self.coefficient).view(len(self.coefficient), len(self.segments))
        return numbers.to(self.segments.device, non_blocking=True)

    @cached_property
    def _spans(self) -> list[tuple[int, int]]:
        """(first, end) for each buffer: no sequence outside of first <= i < end has a coefficient."""
        used = [[i for i, number in enumerate(of_buffer) if number] for of_buffer in self.coefficient]
        return [(min(some), max(some) + 1) if some else (len(self.segments), 0) for some in used]


def _add(of_rows: Tensor, of_buffers: tuple[float, ...], into: Sequence[Tensor]) -> None:
    for number, buffer in zip(of_buffers, into, strict=True):
        if number:
            buffer.add_(of_rows, alpha=number)
