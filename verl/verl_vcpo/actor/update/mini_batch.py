"""The global mini-batch, with one row per sequence: the same numbers on every rank of the trainer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from vcpo import Estimate, Mismatch, VCPOConfig, estimate
from vcpo.mismatch import WeightParts


@dataclass(frozen=True)
class Facts:
    """What is known of B sequences before a forward pass: those of all data-parallel ranks, in rank order.

    A prompt's group may lie on several ranks.
    """

    rank: Tensor
    """[B] data-parallel ranks."""
    group: Tensor
    """[B] integers, equal for the sequences of one prompt: 0, 1, ... in the order of their first sequences."""
    reward: Tensor
    """[B] float64 raw rewards."""
    tokens: Tensor
    """[B] float64 numbers of response tokens in the loss."""
    length: Tensor
    """[B] numbers of all tokens."""
    padding: Tensor
    """[B] bool: rows without a real sequence."""
    dropped: Tensor
    """[B] bool: sequences that are excluded by a response mask of zeros."""
    recorded: Tensor
    """[B] bool: the sampler's log-probs are finite."""
    truncated: Tensor
    """[B] bool: responses that a limit ended."""
    masked: Tensor
    """[B] bool: truncated responses without a gradient in the update (`async.truncated=mask`)."""
    lag: Tensor
    """[B] float64 updates since the oldest token; NaN where the version is unknown."""
    fresh_tokens: Tensor
    """[B] float64 numbers of response tokens that the trainer's own version sampled."""

    @property
    def usable(self) -> Tensor:
        """[B] bool: false for padding, excluded sequences, and log-probs recorded as not finite.

        `Estimate.usable` also asks for a finite weight and norm.
        """
        return self.recorded & ~self.padding & ~self.dropped

    def of(self, rows: Tensor) -> Self:
        """Return these rows."""
        return type(self)(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})


@dataclass(frozen=True)
class MiniBatch(Facts):
    """B sequences after a forward pass."""

    log_weight: Tensor
    """[B] float64 log importance weights; NaN for `padding` and `dropped`, so that the estimator excludes them."""
    kl: Tensor
    """[B] float64 k3 sums over the response tokens, in nats."""
    squares: Tensor
    """[B] float64 sums of `vcpo.mismatch.squared_log_ratios`."""
    jump: Tensor
    """[B] float64 sums of `vcpo.mismatch.jumps`."""
    fresh_squares: Tensor
    """[B] float64 what fresh tokens have of `squares`."""
    again: Tensor
    """[B, 2, 3] float64, of the fresh and of the other tokens whose log-probs a sampler computed again: their number,
    and their squared log-ratios to the log-probs as sampled, and to those computed again."""
    squared_norm: Tensor | None
    """[B] float64 ||g_i||^2; None where norms are not needed."""

    @property
    def spoils(self) -> Tensor:
        """[B] bool: real sequences whose weight or norm is NaN or infinite: their pass may spoil any gradient."""
        finite = self.log_weight.isfinite() | self.padding | self.dropped
        return ~finite if self.squared_norm is None else ~(finite & self.squared_norm.isfinite())

    @property
    def fresh(self) -> Tensor:
        """[B, 2] float64 numbers of fresh tokens, and the sums of their squared log-ratios."""
        return torch.stack([self.fresh_tokens, self.fresh_squares], dim=1)

    def weight_parts(self, mismatch: Mismatch, batch_begins: bool) -> WeightParts | None:
        """Return what lag and arithmetic make of the weights that rho is of: masked sequences count in neither.

        Args:
            mismatch: what has been measured of earlier batches, which this call follows.
            batch_begins: false after a batch's first mini-batch, when the policy is one that no sampler has.
        """
        log_weight = self.log_weight.masked_fill(self.masked, math.nan)
        fresh, again = (self.fresh, self.again) if batch_begins else (None, None)
        return mismatch.update(log_weight, self.jump, self.tokens, self.squares, fresh, again)

    def moves(self, step: Estimate) -> bool:
        """Return False where no sequence has a gradient: momentum and weight decay must not move the weights alone."""
        return bool((step.usable & ~self.masked).any())

    def estimate(self, config: VCPOConfig, lag_ess_ratio: float | None = None) -> Estimate:
        """Return the update of these sequences. Arguments and errors: see `vcpo.estimate`."""
        return estimate(
            config,
            self.log_weight,
            self.reward,
            self.group,
            squared_norm=self.squared_norm,
            length=self.tokens,
            masked=self.masked,
            lag_ess_ratio=lag_ess_ratio,
        )


def joined(parts: Sequence[MiniBatch], rows: Tensor) -> MiniBatch:
    """Return one mini-batch of several that have norms.

    Args:
        rows: [B] for each sequence of `parts`, one after the other, its row in the result.
    """
    columns = {field.name: [getattr(part, field.name) for part in parts] for field in fields(MiniBatch)}
    order = rows.argsort()
    return MiniBatch(**{name: torch.cat(of_parts)[order] for name, of_parts in columns.items()})


class Measured(NamedTuple):
    """What a measuring pass leaves behind."""

    batch: MiniBatch
    outputs: dict[str, Any] | None
    """Outputs of `forward_backward_batch`: the gradient of the update is in Megatron's buffers. None on all ranks: it
    is still to be formed."""
