"""Where `keep=gradients` adds up gradients until their baselines are known: in the main and in second buffers."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sums:
    """Two weighted sums of the gradients of a pass over N sequences, in the buffers of every parameter.

    Every baseline of the pass has a second buffer of its own: S of each parameter. All of them share the main buffer.
    """

    coefficient: Tensor
    """[2, N] of each sequence in the main and in the second buffer."""
    slot: tuple[int, ...]
    """N numbers: the second buffer, of S, that each sequence is added to."""
    second: dict[Tensor, Tensor]
    """Of each parameter at least S second buffers [S, ...]."""

    @property
    def slots(self) -> int:
        """S."""
        return max(self.slot) + 1

    @cached_property
    def slot_of(self) -> Tensor:
        """[N] `slot` on the device."""
        return torch.tensor(self.slot).to(self.coefficient.device, non_blocking=True)

    @cached_property
    def weights(self) -> Tensor:
        """[1 + S, N] of each sequence in the main and in all second buffers."""
        mine = torch.arange(self.slots, device=self.slot_of.device)[:, None] == self.slot_of
        return torch.cat([self.coefficient[:1], mine * self.coefficient[1]])

    def of(self, parameter: Tensor) -> Tensor:
        """[S, ...] the second buffers of a parameter."""
        return self.second[parameter][: self.slots]

    def spans(self, numbers: tuple[int, ...]) -> list[tuple[int, int]]:
        """Of each of 1 + S buffers (first, end) in a micro-batch of the sequences with these numbers: no sequence
        outside of first <= i < end is added to the buffer."""
        spans = [(0, len(numbers))] + [(len(numbers), 0)] * self.slots
        for i, number in enumerate(numbers):
            first, end = spans[1 + self.slot[number]]
            spans[1 + self.slot[number]] = min(first, i), max(end, i + 1)
        return spans

    def subtract(self, shift: list[float]) -> None:
        """Every parameter's main buffer -= sum_s shift[s] second[s]; the second buffers become 0.

        Args:
            shift: S numbers.
        """
        for parameter in self.second:
            buffers = self.of(parameter)
            for one, of_baseline in zip(buffers, shift, strict=True):
                parameter.main_grad.sub_(one, alpha=of_baseline)  # type: ignore[attr-defined]
            buffers.zero_()


def second_buffers(modules: list[torch.nn.Module], slots: int, dtype: torch.dtype) -> dict[Tensor, Tensor]:
    """S buffers of zeros [S, ...] for every trained parameter."""
    return {
        parameter: parameter.main_grad.new_zeros(slots, *parameter.shape, dtype=dtype)  # type: ignore[attr-defined]
        for chunk in modules
        for parameter in chunk.parameters()
        if parameter.requires_grad
    }
