"""The digits that `keep=gradients` loses in float32: predicted from norms and coefficients, before the optimizer step.

`main - (b - m) second` is a difference of two sums. Sequence i has the norm |R_i - m| ||h_i|| / s in the first sum,
|b - m| ||h_i|| / s in the second, and |R_i - b| ||h_i|| / s in the difference. Where one sequence has almost all the
influence on b, R_i - b is almost 0 for that sequence, and rounding its two terms may outweigh all other sequences.
Where all weights of a baseline are tiny, float32 cannot hold the squares of h_i = a_i g_i, and so b is in doubt.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from vcpo import Estimate, OpobScope
from vcpo.baseline import group_sum
from vcpo.estimator import log_opob_weights, log_packed_weights
from verl_vcpo.actor.mini_batch import MiniBatch
from verl_vcpo.actor.vcpo_settings import VCPOSettings

LIMITS = {torch.float32: 5e-5, torch.bfloat16: 1e-2}
"""The largest error of the gradient with which the two sums are used, by the narrower number format of the sums."""

# A CPU adds so many sequences to a sum at a time, and each addition rounds the sum (vcpo/gradnorm/linear.py).
_ADDED_AT_ONCE = 4
# The most that squaring and adding lose of ||h_i||^2: float32's smallest normal number, for each of 1e12 weights.
_LOST = 1e12 * torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Rounding:
    """Predicted errors of a gradient, relative to its norm, the sequences' gradients taken as orthogonal."""

    cancellation: float
    """The error of the difference of two sums."""
    underflow: float
    """The error of the baselines."""


@dataclass(frozen=True)
class TwoSums:
    """The sums whose difference is the gradient."""

    main: torch.dtype
    """The number format of sum (R_i - m) / s h_i."""
    second: torch.dtype
    """The number format of sum h_i / s."""
    baselines: int = 1
    """The number of baselines whose sequences are in the first sum when the second is subtracted."""

    @classmethod
    def of_buffers(cls, second: dict[Tensor, Tensor], baselines: int) -> "TwoSums":
        """Return the two sums in main gradients and in these second buffers."""
        parameter, buffer = next(iter(second.items()))
        return cls(parameter.main_grad.dtype, buffer.dtype, baselines)  # type: ignore[attr-defined]

    @property
    def limit(self) -> float:
        """The largest error of the gradient that is accepted."""
        return max(LIMITS[self.main], LIMITS[self.second])

    def errors(self, of_main: Tensor, of_second: Tensor, together: Tensor) -> Tensor:
        """Return [B] the rounding of sequences with these norms in the two sums; `together` share a baseline."""
        main, second = (torch.finfo(dtype).eps / 2 for dtype in (self.main, self.second))
        in_second = (together / _ADDED_AT_ONCE).clamp(min=1.0).sqrt()
        in_main = (self.baselines * together / _ADDED_AT_ONCE).clamp(min=1.0).sqrt()
        return in_main * main * of_main + in_second * max(main, second) * of_second


def predicted_rounding(
    config: VCPOSettings, batch: MiniBatch, step: Estimate, common: Tensor, scale: Tensor, sums: TwoSums
) -> Rounding:
    """Predict the errors of `keep=gradients` on one global mini-batch: on the host, the same on every rank.

    Args:
        config: VCPO's settings, with `baseline=opob`.
        batch: B sequences, with the norms of g_i.
        step: the estimate of `batch`.
        common: [B] m of each sequence, the commonest reward.
        scale: [B] 1 / (s B) of each sequence.
        sums: the number formats of the sums.
    """
    rows = step.usable
    if batch.squared_norm is None or not rows.any():
        return Rounding(0.0, 0.0)
    log_used = log_packed_weights(config, batch.log_weight[rows])
    squared, reward, baseline = batch.squared_norm[rows], batch.reward[rows], step.baseline[rows]
    common, scale = common[rows], scale[rows]
    weighted = squared * (2 * log_used).exp()  # [B] ||h_i||^2
    left = (step.coefficient[rows] * squared.sqrt()).norm().item()
    log_a = log_opob_weights(config, batch.log_weight[rows], log_used, batch.tokens[rows])
    log_influence = 2 * (log_a - log_used) + (weighted + _LOST).log()
    group = torch.unique(batch.group[rows], return_inverse=True)[1]
    if config.opob_scope is OpobScope.MINIBATCH:
        group = torch.zeros_like(group)
        log_influence = log_influence + 2 * scale.log()

    size = scale * weighted.sqrt()  # [B] ||h_i|| / (s B)
    together = group_sum(torch.ones_like(size), group)
    error = sums.errors((reward - common).abs() * size, (baseline - common).abs() * size, together)
    unknown = _LOST / (weighted + _LOST)
    of_baseline = _weighted_sum(unknown * (reward - baseline).abs(), log_influence, group)
    return Rounding(
        cancellation=_ratio(error.norm().item(), left),
        underflow=_ratio((of_baseline * scale * (weighted + _LOST).sqrt()).sum().item(), left),
    )


def _weighted_sum(value: Tensor, log_influence: Tensor, group: Tensor) -> Tensor:
    """Return [B] sums over the group of `value` times a share of the influence; shares add up to 1, or are 0."""
    groups = int(group.max()) + 1
    top = log_influence.new_full((groups,), -torch.inf).scatter_reduce_(0, group, log_influence, "amax")[group]
    influence = torch.where(top.isfinite(), (log_influence - top).exp(), 0.0)
    return group_sum(influence * value, group) / group_sum(influence, group).clamp(min=1.0)


def _ratio(error: float, left: float) -> float:
    return error / left if left else math.inf * error if error else 0.0
