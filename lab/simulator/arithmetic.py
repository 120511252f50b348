"""A sampler whose arithmetic is not the trainer's, and responses longer than those that are drawn.

The tokens that stand for the rest of a long response are not drawn: the reward does not see them, and of their
log-probs only what sampler and trainer differ by counts, a normal number at each of them. The mean of the weights that
follow is 1, as where a sampler draws from what it records: the recorded log-probs are those of the policy that sampled,
and the trainer's are off. Which answers are drawn does not change.
"""

import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

KINDS = ("normal", "tails", "falls", "jumps")
_JUMP, _OF_RESPONSES = 3.0, 0.05


@dataclass(frozen=True)
class Arithmetic:
    """What sampler and trainer differ by where they have the same weights."""

    rms: float
    """Of a token's log pi - log mu."""
    tokens: int
    """Those that each response has beside the tokens that are drawn."""
    kind: str = "normal"
    """`tails`: 2 % of the tokens have 90 % of the variance. `falls`: the variance falls by half while the run trains.
    `jumps`: the lag moves one token by 3 in 5 % of the stale responses."""

    @property
    def variance(self) -> float:
        """Of the logarithm of a fresh response's weight. Nothing else counts for a method that weights sequences."""
        return self.tokens * self.rms**2

    def draw(self, responses: int, generator: Generator, done: float = 0.0, stale: bool = False) -> Tensor:
        """[B, 5] of each response's tokens beside the drawn ones.

        Number, sum of log-ratios, sum of the squares of those that are no jumps, the sum of squares if a sampler
        computes them again, and sum of jumps.

        Args:
            responses: B.
            generator: of the random numbers.
            done: the share of the run's steps that is over.
            stale: whether the lag has moved the policy since.
        """
        size = responses, self.tokens
        variance = torch.full(size, self.rms**2)
        if self.kind == "falls":
            variance *= 1 - done / 2
        elif self.kind == "tails":
            variance *= torch.where(torch.rand(size, generator=generator) < 0.02, 45, 0.1 / 0.98)
        each = torch.randn(size, generator=generator) * variance.sqrt() - variance / 2
        again = torch.randn(size, generator=generator) * variance.sqrt()
        jump = torch.zeros(responses)
        if self.kind == "jumps" and stale:
            jump = _JUMP * (torch.rand(responses, generator=generator) < _OF_RESPONSES).float()
        mean = math.log1p(_OF_RESPONSES * math.expm1(_JUMP)) if jump.any() else 0.0  # of weights: 1 without it
        number = torch.full((responses,), float(self.tokens))
        sums = each.sum(dim=1) + jump - mean, each.square().sum(dim=1), again.square().sum(dim=1)
        return torch.stack([number, *sums, jump], dim=1).double()
