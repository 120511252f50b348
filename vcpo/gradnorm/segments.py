"""Which tokens of a packed micro-batch belong to which sequence: known on the host, so that no call waits for a GPU."""

import bisect
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

# A bucket's sequences are padded to the longest of them, which is at most this factor longer than the shortest.
_PADDING = 1.25


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length, for one batched product."""

    sequences: Tensor
    """[k] numbers of the sequences."""
    tokens: Tensor
    """[k, L] rows of the packed batch; row 0 on padding."""
    real: Tensor
    """[k, L] bool: false on padding."""

    def gather(self, packed: Tensor) -> Tensor:
        """[T, d] -> [k, L, d], zero on padding."""
        return packed[self.tokens].masked_fill_(~self.real[..., None], 0.0)


@dataclass(frozen=True)
class Segments:
    """n sequences, one after the other: sequence i has the rows bounds[i] to bounds[i + 1] of T."""

    bounds: tuple[int, ...]
    device: torch.device = torch.device("cpu")

    @classmethod
    def of_lengths(cls, lengths: list[int], device: torch.device | str = "cpu") -> "Segments":
        """Segments of sequences with these numbers of tokens."""
        bounds = [0]
        for length in lengths:
            bounds.append(bounds[-1] + length)
        return cls(tuple(bounds), torch.device(device))

    @cached_property
    def lengths(self) -> list[int]:
        """n numbers of tokens."""
        return [end - start for start, end in zip(self.bounds, self.bounds[1:], strict=False)]

    def __len__(self) -> int:
        return len(self.bounds) - 1

    @cached_property
    def sequence(self) -> Tensor:
        """[T] the sequence of each token."""
        numbers = torch.arange(len(self)).repeat_interleave(torch.tensor(self.lengths, dtype=torch.long))
        return numbers.to(self.device, non_blocking=True)

    @cached_property
    def buckets(self) -> list[Bucket]:
        """All sequences that have tokens, by length; computed once for all layers."""
        order = sorted((i for i, length in enumerate(self.lengths) if length), key=lambda i: -self.lengths[i])
        shrinking = [-self.lengths[i] for i in order]
        buckets: list[Bucket] = []
        first = 0
        while first < len(order):
            last = bisect.bisect_right(shrinking, shrinking[first] / _PADDING)
            buckets.append(self._bucket(order[first:last]))
            first = last
        return buckets

    def _bucket(self, sequences: list[int]) -> Bucket:
        steps = torch.arange(self.lengths[sequences[0]])  # [L]
        real = steps < torch.tensor([self.lengths[i] for i in sequences])[:, None]
        tokens = torch.where(real, steps + torch.tensor([self.bounds[i] for i in sequences])[:, None], 0)
        parts = (torch.tensor(sequences), tokens, real)
        return Bucket(*(part.to(self.device, non_blocking=True) for part in parts))
