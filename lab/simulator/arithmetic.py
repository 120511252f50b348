"""A sampler whose arithmetic is not the trainer's, and responses longer than those that are drawn.

The tokens that stand for the rest of a long response are not drawn: the reward does not see them, and of their
log-probs only what sampler and trainer differ by counts, a normal number at each of them. The mean of the weights that
follow is 1, as where a sampler draws from what it records: the recorded log-probs are those of the policy that sampled,
and the trainer's are off. Which answers are drawn does not change.
"""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor


@dataclass(frozen=True)
class Arithmetic:
    """What sampler and trainer differ by where they have the same weights."""

    rms: float
    """Of a token's log pi - log mu."""
    tokens: int
    """Those that each response has beside the tokens that are drawn."""

    @property
    def variance(self) -> float:
        """Of the logarithm of a fresh response's weight. Nothing else counts for a method that weights sequences."""
        return self.tokens * self.rms**2

    def draw(self, responses: int, generator: Generator) -> Tensor:
        """[B, 4] of each response's tokens beside the drawn ones.

        Number, sum of log-ratios, sum of their squares, and the sum of squares if a sampler computes them again.
        """
        each = torch.randn(responses, self.tokens, generator=generator) * self.rms - self.rms**2 / 2
        again = torch.randn(responses, self.tokens, generator=generator) * self.rms
        number = torch.full((responses,), float(self.tokens))
        sums = each.sum(dim=1), each.square().sum(dim=1), again.square().sum(dim=1)
        return torch.stack([number, *sums], dim=1).double()
