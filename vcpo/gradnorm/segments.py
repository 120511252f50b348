"""The sequences of a packed micro-batch and their tokens: known on the host, so that no call waits for a GPU."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

# A bucket is split in two while the split spares this share of the products of padded sequences, up to so many buckets:
# each bucket costs a GPU three more operations in every layer.
_SPARED, _BUCKETS = 0.14, 3


@dataclass(frozen=True)
class Bucket:
    """k sequences of similar length, padded to the longest, for one batched product."""

    sequences: Tensor
    """[k] numbers of the sequences."""
    tokens: Tensor
    """[k, L] rows of the packed batch; row 0 on padding."""
    padding: Tensor
    """[k, L] bool."""
    first: int
    """The row, among the rows of all buckets, at which the bucket begins."""

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def longest(self) -> int:
        """L, the tokens of the longest sequence."""
        return self.tokens.shape[1]

    def part_of(self, rows: Tensor) -> Tensor:
        """Return [k, L, d], the bucket's part of [P, d], the rows of all buckets; on padding some row."""
        return rows[self.first : self.first + self.tokens.numel()].view(*self.tokens.shape, -1)

    def gather(self, packed: Tensor) -> Tensor:
        """Return [k, L, d], the bucket's part of the packed batch [T, d]; zero on padding."""
        return packed[self.tokens].masked_fill_(self.padding[..., None], 0.0)


@dataclass(frozen=True)
class Padded:
    """The buckets of some sequences."""

    buckets: tuple[Bucket, ...]
    sequences: Tensor
    """[n] the numbers of the sequences, bucket after bucket."""
    tokens: Tensor | slice
    """[P] the rows of the packed batch that the buckets hold; a slice where there is one sequence."""

    @cached_property
    def pairs(self) -> Tensor:
        """[sum of k L L], bucket after bucket: true for two real tokens of one sequence."""
        real = [~bucket.padding for bucket in self.buckets]
        return torch.cat([(one[:, :, None] & one[:, None, :]).flatten() for one in real])


@dataclass(frozen=True)
class Segments:
    """n sequences, one after the other: sequence i has the rows bounds[i] to bounds[i + 1] of T."""

    bounds: tuple[int, ...]
    device: torch.device = torch.device("cpu")

    @classmethod
    def of_lengths(cls, lengths: list[int], device: torch.device | str = "cpu") -> "Segments":
        """Make the segments of sequences with these numbers of tokens."""
        bounds = [0]
        for length in lengths:
            bounds.append(bounds[-1] + length)
        return cls(tuple(bounds), torch.device(device))

    @cached_property
    def lengths(self) -> list[int]:
        """The number of tokens of each of the n sequences."""
        return [end - start for start, end in zip(self.bounds, self.bounds[1:], strict=False)]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @cached_property
    def sequence(self) -> Tensor:
        """[T] the sequence of each token."""
        numbers = torch.arange(len(self)).repeat_interleave(torch.tensor(self.lengths, dtype=torch.long))
        return numbers.to(self.device, non_blocking=True)

    def padded(self, some: tuple[int, ...]) -> Padded:
        """Return the buckets of those of `some` sequences that have tokens; computed once for all layers."""
        if some not in self._padded:
            self._padded[some] = self._pad(sorted((i for i in some if self.lengths[i]), key=lambda i: -self.lengths[i]))
        return self._padded[some]

    @cached_property
    def _padded(self) -> dict[tuple[int, ...], Padded]:
        return {}

    @cached_property
    def tiles(self) -> dict[tuple[int, ...], Any]:
        """`gram_kernel.Tiles` of some sequences, computed once for all layers."""
        return {}

    def _pad(self, order: list[int]) -> Padded:
        ends = _split([self.lengths[i] for i in order])
        parts = [self._rows(order[first:end]) for first, end in zip([0, *ends], ends, strict=False)]
        flat = torch.cat([tokens.flatten() for tokens, _ in parts]) if parts else torch.empty(0, dtype=torch.long)
        numbers, flat = (part.to(self.device, non_blocking=True) for part in (torch.tensor(order), flat))
        buckets, first, row = [], 0, 0
        for tokens, padding in parts:
            end, rows = first + len(tokens), flat[row : row + tokens.numel()].view_as(tokens)
            on_device = padding.to(self.device, non_blocking=True)
            buckets.append(Bucket(numbers[first:end], rows, on_device, row))
            first, row = end, row + tokens.numel()
        alone = slice(*self.bounds[order[0] : order[0] + 2]) if len(order) == 1 else None
        return Padded(tuple(buckets), numbers, alone or flat)

    def _rows(self, sequences: list[int]) -> tuple[Tensor, Tensor]:
        """Return one bucket's rows of the packed batch and its padding, each [k, L], on the host."""
        steps = torch.arange(self.lengths[sequences[0]])  # [L]
        padding = steps >= torch.tensor([self.lengths[i] for i in sequences])[:, None]
        return torch.where(padding, 0, steps + torch.tensor([self.bounds[i] for i in sequences])[:, None]), padding


def batches(x: Tensor) -> bool:
    """Return True on all devices but a CPU: few large, padded products take less time than one for each sequence."""
    return x.device.type != "cpu"


def add_rows(into: Tensor, index: Tensor, rows: Tensor) -> None:
    """Add rows [T, ...] to into[index], index [T], in an order that is the same in every run.

    index_add_ is atomic on a GPU: the order in which equal indices add up, and with it the rounding, would differ from
    run to run. index_put_ sorts them there.
    """
    if batches(into):
        into.index_put_((index,), rows, accumulate=True)
    else:
        into.index_add_(0, index, rows)


def _split(lengths: list[int]) -> list[int]:
    """Return the ends of the buckets of sequences of these lengths, longest first."""

    def pairs(first: int, end: int) -> int:
        return (end - first) * lengths[first] ** 2 if end > first else 0

    ends = [len(lengths)] if lengths else []
    while 0 < len(ends) < _BUCKETS:
        starts = [0, *ends[:-1]]
        whole = sum(map(pairs, starts, ends))
        spared, at = max(
            (pairs(first, end) - pairs(first, middle) - pairs(middle, end), middle)
            for first, end in zip(starts, ends, strict=True)
            for middle in range(first, end)
        )
        if spared < _SPARED * whole:
            break
        ends = sorted([*ends, at])
    return ends
