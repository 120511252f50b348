"""The sequence of each row that a layer's experts get: the rows of a micro-batch's sequences are mixed.

With expert parallelism some rows are of sequences that other data-parallel ranks train on.
"""

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from vcpo.gradnorm import Segments


@dataclass(frozen=True)
class ExpertRows:
    """R rows of e experts, expert after expert."""

    order: Tensor
    """[R] indices that bring the rows of an expert and a sequence together: from there they are a run."""
    counts: Tensor
    """[e, N] on the host: an expert's number of rows of each of the pass's N sequences."""

    @cached_property
    def splits(self) -> list[int]:
        """The number of rows of each of the e experts."""
        return self.counts.sum(1).tolist()

    @cached_property
    def runs(self) -> Segments:
        """The runs of equal expert and sequence, in the rows' sorted order."""
        return Segments.of_lengths(self.counts.flatten()[self._of_run].tolist(), self.order.device)

    @cached_property
    def sequence_of_run(self) -> Tensor:
        """[k] the number in the pass of each run's sequence."""
        return (self._of_run % self.counts.shape[1]).to(self.order.device, non_blocking=True)

    @cached_property
    def experts(self) -> "list[ExpertRows]":
        """The rows of each expert alone."""
        starts = [0, *itertools.accumulate(self.splits)]
        parts = zip(self.order.split(self.splits), starts, self.counts, strict=False)
        return [ExpertRows(order - start, counts[None]) for order, start, counts in parts]

    @cached_property
    def _of_run(self) -> Tensor:
        """[k] the expert (times N) and the sequence of each run, on the host."""
        return torch.from_numpy(self.counts.numpy().ravel().nonzero()[0])


class Routing:
    """The rows of one layer's experts in one forward, copied to the host by the time of the backward.

    Args:
        sequence: [R] the number in the pass of each row's sequence.
        per_expert: [e] numbers of rows.
        sequences: N, the number of sequences in the pass.
    """

    def __init__(self, sequence: Tensor, per_expert: Tensor, sequences: int) -> None:
        experts = len(per_expert)
        expert = torch.repeat_interleave(per_expert.to(sequence.device, non_blocking=True), output_size=len(sequence))
        key = expert * sequences + sequence
        counts = torch.zeros(experts * sequences, dtype=torch.int32, device=sequence.device)
        counts.index_add_(0, key, torch.ones_like(key, dtype=torch.int32))
        self._order = key.argsort(stable=True)
        self._counts = _Copy(counts.view(experts, sequences))

    @cached_property
    def rows(self) -> ExpertRows:
        """The rows of all experts."""
        return ExpertRows(self._order, self._counts.wait())


class _Copy:
    """A copy to the host that has begun."""

    def __init__(self, tensor: Tensor) -> None:
        self._host, self._copied = tensor, None
        if tensor.is_cuda:
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    def wait(self) -> Tensor:
        if self._copied is not None:
            self._copied.synchronize()
        return self._host
