"""The main and second buffers in which `keep=gradients` adds up gradients until their baselines are known."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vcpo.gradnorm import WeightedSums
from verl_vcpo.actor.norms.layout import MicroBatch


@dataclass(frozen=True)
class Sums:
    """Two weighted sums of the gradients of a pass over N sequences, in the buffers of every parameter.

    Every baseline of the pass has its own second buffer, so each parameter has S. All baselines share the main buffer.
    """

    coefficient: Tensor
    """[2, N] the coefficients of each sequence in the main and in the second buffer; on the host."""
    slot: tuple[int, ...]
    """The second buffer, 0 to S - 1, that each of the N sequences is added to."""
    second: "SecondBuffers"
    """At least S second buffers [S, ...] for each parameter."""

    @property
    def slots(self) -> int:
        """S, the number of second buffers in use."""
        return max(self.slot) + 1

    @cached_property
    def weights(self) -> Tensor:
        """[1 + S, N] the coefficients of each sequence in the main and in all second buffers; on the host."""
        mine = torch.arange(self.slots)[:, None] == torch.tensor(self.slot)
        return torch.cat([self.coefficient[:1], mine * self.coefficient[1]])

    @cached_property
    def on_device(self) -> Tensor:
        """[1 + S, N] the weights, on the device."""
        return self.weights.to(next(iter(self.second.values())).device, non_blocking=True)

    @cached_property
    def slot_on_device(self) -> Tensor:
        """[N] the slots, on the device."""
        return torch.tensor(self.slot).to(self.on_device.device, non_blocking=True)

    def of_sequences(self, micro_batch: MicroBatch) -> Tensor:
        """Return [1 + S, n], the weights of a micro-batch's sequences, on the device; computed once for all layers."""
        numbers = micro_batch.numbers
        if numbers not in self._of_sequences:
            self._of_sequences[numbers] = self.on_device[:, micro_batch.rows]
        return self._of_sequences[numbers]

    @cached_property
    def _of_sequences(self) -> dict[tuple[int, ...], Tensor]:
        return {}

    def in_micro_batch(self, micro_batch: MicroBatch) -> WeightedSums:
        """Return the weighted sums of a micro-batch's sequences, for linear layers; made once for all layers."""
        numbers = micro_batch.numbers
        if numbers not in self._in_micro_batch:
            of_numbers = self.weights[:, list(numbers)].tolist()
            self._in_micro_batch[numbers] = WeightedSums(micro_batch.whole, of_numbers)
        return self._in_micro_batch[numbers]

    @cached_property
    def _in_micro_batch(self) -> dict[tuple[int, ...], WeightedSums]:
        return {}

    def second_of(self, parameter: Tensor) -> Tensor:
        """Return [S, ...], the second buffers of a parameter."""
        return self.second[parameter][: self.slots]

    def subtract(self, shift: list[float]) -> None:
        """Subtract sum_s shift[s] second[s] from every parameter's main buffer; the second buffers become 0.

        Args:
            shift: S numbers.
        """
        for main, second in self.second.blocks:
            for one, of_baseline in zip(second, shift, strict=False):
                main.sub_(one, alpha=of_baseline)
            second[: self.slots].zero_()


class SecondBuffers(dict[Tensor, Tensor]):
    """The S float32 buffers [S, ...] of each parameter, zero between updates.

    Main gradients that share a block of memory, as Megatron's do, have second buffers in one block, of the same layout:
    one operation subtracts the second buffers of all of them.
    """

    def __init__(self, parameters: Iterable[Tensor] = (), slots: int = 1) -> None:
        super().__init__()
        self.blocks: list[tuple[Tensor, Tensor]] = []
        """Pairs of a block of main gradients [P] and its second buffers [S, P]."""
        mains: dict[Any, list[Tensor]] = {}
        for parameter in parameters:
            main = parameter.main_grad  # type: ignore[attr-defined]
            mains.setdefault((main.untyped_storage()._cdata, main.dtype), []).append(parameter)
        for of_block in mains.values():
            self._add(of_block, slots)

    @classmethod
    def for_modules(cls, modules: list[torch.nn.Module], slots: int) -> "SecondBuffers":
        """Make the second buffers of every trained parameter."""
        return cls([p for chunk in modules for p in chunk.parameters() if p.requires_grad], slots)

    def clear(self) -> None:
        super().clear()
        self.blocks.clear()

    def _add(self, parameters: list[Tensor], slots: int) -> None:
        places = []
        for parameter in parameters:
            main = parameter.main_grad  # type: ignore[attr-defined]
            places.append((main.storage_offset(), main.numel()))
        first, end = min(start for start, _ in places), max(start + size for start, size in places)
        one = parameters[0].main_grad  # type: ignore[attr-defined]
        block = one.as_strided((end - first,), (1,), first)
        second = block.new_zeros(slots, end - first, dtype=torch.float32)
        self.blocks.append((block, second))
        for parameter, (start, size) in zip(parameters, places, strict=True):
            self[parameter] = second[:, start - first : start - first + size].view(slots, *parameter.shape)
