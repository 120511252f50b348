"""TBA's replay buffer (arXiv 2503.18929): a batch has recent prompt groups, and earlier ones with high rewards."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import torch

Group = TypeVar("Group")


class GroupReplay(Generic[Group]):
    """A memory of prompt groups that draws groups with high rewards more often.

    Source: the paper mixes on-policy and reward-prioritised draws; capacity, share and temperature are ours.

    Args:
        seed: the seed of the draws.
        capacity: prompt groups that are remembered; the oldest is forgotten first.
        recent: the probability that a recent group of a batch stays, and is not replaced by a remembered one.
        temperature: that of the softmax over mean rewards by which remembered groups are drawn, with replacement.
    """

    def __init__(self, seed: int, capacity: int = 512, recent: float = 0.5, temperature: float = 0.25) -> None:
        self.capacity, self.recent, self.temperature = capacity, recent, temperature
        self._memory: deque[tuple[Group, float]] = deque()
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, count: int) -> list[Group | None]:
        """Draw for each recent group of a batch a remembered group that replaces it, or None.

        Args:
            count: recent groups of the batch.
        """
        if not self._memory:
            return [None] * count
        rewards = torch.tensor([reward for _, reward in self._memory])
        chance = (rewards / self.temperature).softmax(0)
        drawn = torch.multinomial(chance, count, replacement=True, generator=self._generator)
        recent = torch.rand(count, generator=self._generator) < self.recent
        return [None if keep else self._memory[i][0] for keep, i in zip(recent, drawn.tolist(), strict=True)]

    def remember(self, groups: Sequence[Group], mean_rewards: Iterable[float]) -> list[Group]:
        """Add groups with their mean rewards. Returns the groups that exceed `capacity` and are forgotten."""
        self._memory.extend(zip(groups, mean_rewards, strict=True))
        return [self._memory.popleft()[0] for _ in range(len(self._memory) - self.capacity)]
