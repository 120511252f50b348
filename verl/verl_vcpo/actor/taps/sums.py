"""The main and second buffers in which gradients are added up until their baselines are known."""

import torch
from torch import Tensor

from vcpo.gradnorm import WeightedSums
from verl_vcpo.actor.taps.layout import MicroBatch


class SecondBuffers(dict[Tensor, Tensor]):
    """The second buffers of each trained parameter, float32 [S, ...], zero between updates.

    Args:
        most: the most that a parameter may have.
    """

    def __init__(self, most: int = 1) -> None:
        super().__init__()
        self.most = most


def make_room(second: SecondBuffers, modules: list[torch.nn.Module], slots: int) -> None:
    """Give every trained parameter `slots` second buffers, unless there are as many already."""
    if len(next(iter(second.values()), ())) >= slots:
        return
    second.clear()  # first: both need not fit
    trained = [p for chunk in modules for p in chunk.parameters() if p.requires_grad]
    second.update({p: p.main_grad.new_zeros(slots, *p.shape, dtype=torch.float32) for p in trained})  # type: ignore[attr-defined]


class Sums:
    """Two weighted sums of the gradients of a pass over N sequences, in the buffers of every parameter.

    Every baseline of the pass has its own second buffer, so each parameter has S. All baselines share the main buffer.

    Args:
        coefficient: [2, N] the coefficients of each sequence in the main and in the second buffer; on the host.
        slot: [N] the second buffer, 0 to S - 1, that each sequence is added to; on the host.
        second: at least S second buffers for each parameter.
    """

    def __init__(self, coefficient: Tensor, slot: Tensor, second: SecondBuffers) -> None:
        self.slot, self._second = slot, second
        self.slots = int(slot.max()) + 1
        """S, the number of second buffers in use."""
        of_slots = (torch.arange(self.slots)[:, None] == slot) * coefficient[1]
        self._weights = torch.cat([coefficient[:1], of_slots])  # [1 + S, N] in the main and in all second buffers
        device = next(iter(second.values())).device
        self.on_device = self._weights.to(device, non_blocking=True)
        """[1 + S, N] the coefficients in the main and in all second buffers, on the device."""
        self.slot_on_device = slot.to(device, non_blocking=True)
        self._made: dict[tuple[int, ...], tuple[Tensor, WeightedSums]] = {}

    def of_micro_batch(self, micro_batch: MicroBatch) -> tuple[Tensor, WeightedSums]:
        """Return [1 + S, n] coefficients on the device, and the sums of linear layers; made once for all layers."""
        numbers = micro_batch.numbers
        if numbers not in self._made:
            of_linear = WeightedSums(micro_batch.whole, self._weights[:, list(numbers)].tolist())
            self._made[numbers] = self.on_device[:, micro_batch.rows], of_linear
        return self._made[numbers]

    def second_of(self, parameter: Tensor) -> Tensor:
        """Return [S, ...], the second buffers of a parameter."""
        return self._second[parameter][: self.slots]

    def subtract(self, shift: list[float]) -> None:
        """Subtract sum_s shift[s] second[s] from every parameter's main buffer; the second buffers become 0."""
        mains = [parameter.main_grad for parameter in self._second]  # type: ignore[attr-defined]
        for slot, of_baseline in enumerate(shift):
            second = [buffers[slot] for buffers in self._second.values()]
            torch._foreach_sub_(mains, second, alpha=of_baseline)
            torch._foreach_zero_(second)
