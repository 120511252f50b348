"""Weights, baseline and normalisation together: one coefficient per sequence, one multiplier per step.

The update is G = sum_i coefficient_i * g_i, with g_i the score gradient of sequence i:
coefficient_i = min(w_i, c) (R_i - b_i) / (s_i B), s_i = 1 unless rewards are divided by their standard deviation.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vcpo.baseline import (
    group_mean,
    group_std,
    half_mean,
    lowest_of_group,
    optimal_off_policy,
    share_below_mean,
    without_optimal,
)
from vcpo.config import Baseline, EssPart, OpobScope, OpobWeights, VCPOConfig
from vcpo.ess import ess_ratio, step_size_multiplier
from vcpo.importance import truncated_log_weights

# A group whose rewards differ by less than this has no signal: its coefficients are 0, not 0/0.
_EQUAL_REWARDS = 1e-6

# Without truncation a weight has no bound. Beyond e^40 (2e17) the square of its float32 gradient, which clipping needs,
# would overflow. One sequence dominates such an update anyway, and gradient clipping decides the length of the update.
_LARGEST_LOG_WEIGHT = 40.0
# A packed backward measures the norm of w_i g_i and divides by w_i. A weight below e^-40 adds nothing to an update with
# other weights, and w_i g_i would underflow in float32.
_SMALLEST_LOG_WEIGHT = -40.0
# The square of a coefficient has to fit float32. At scope `minibatch` a reward's deviation from the baseline, divided
# by the standard deviation of the reward's group, has no bound.
_LARGEST_COEFFICIENT = 1e18

_OF_REWARDS: dict[Baseline, Callable[[Tensor, Tensor], Tensor]] = {
    Baseline.NONE: lambda reward, group: torch.zeros_like(reward),
    Baseline.MEAN: group_mean,
    Baseline.HALF_MEAN: half_mean,
}
"""The baselines that need no gradient norms, as functions of (rewards [B], groups [B])."""


@dataclass(frozen=True)
class Estimate:
    """The result for one mini-batch, of B sequences on all data-parallel ranks, that an optimizer step needs."""

    coefficient: Tensor
    """[B] float64: multiplies g_i in the update; 0 for a sequence that is masked or not usable."""
    baseline: Tensor
    """[B] float64: b of the sequence."""
    weight: Tensor
    """[B] float64: a_i, by which g_i (R_i - b_i) is multiplied: min(w_i, c)."""
    usable: Tensor
    """[B] bool: false where the weight or the gradient norm is NaN or infinite; such sequences do not count in B."""
    ess_ratio: float
    """rho; 0 where no sequence is usable."""
    step_size_multiplier: float
    """The factor of the learning rate at this step."""


def estimate(
    config: VCPOConfig,
    log_weight: Tensor,
    reward: Tensor,
    group: Tensor,
    *,
    squared_norm: Tensor | None = None,
    length: Tensor | None = None,
    masked: Tensor | None = None,
    lag_ess_ratio: float | None = None,
) -> Estimate:
    """Compute the VCPO update of one global mini-batch.

    Args:
        config: which weights, baseline and normalisation.
        log_weight: [B] log w_i from `sequence_log_weights`.
        reward: [B] raw sequence rewards R_i.
        group: [B] integers, equal for the sequences of one prompt.
        squared_norm: [B] ||g_i||^2; needed by `baseline=opob`.
        length: [B] numbers of response tokens; needed by `opob_weights=published`.
        masked: [B] bool: sequences without a gradient in the update. They count in B, and in baselines as if they had
            their gradient; rho, which says how few sequences are the update, leaves them out.
        lag_ess_ratio: with `ess_part=lag`, `vcpo.mismatch.WeightParts.lag`. The whole ratio bounds it from below: only
            by an error of measurement can a part of the weights have a smaller one.

    Raises:
        ValueError: the baseline's `squared_norm` or `length` is missing, or a reward is not finite.
    """
    _check(config, reward, squared_norm, length)
    usable = torch.isfinite(log_weight)
    if config.needs_gradient_norms and squared_norm is not None:
        usable = usable & torch.isfinite(squared_norm)

    coefficient, baseline, weight = (torch.zeros_like(log_weight, dtype=torch.float64) for _ in range(3))
    log_w = log_weight[usable].double()
    rho = ess_ratio(log_w if masked is None else log_w[~masked[usable]])
    if usable.any():
        rows = (x if x is None else x[usable] for x in (squared_norm, length))
        parts = _coefficients(config, log_w, reward[usable].double(), group[usable], *rows)
        coefficient[usable], baseline[usable], weight[usable] = parts
    if masked is not None:
        coefficient[masked] = 0.0
    followed = rho if config.ess_part is EssPart.WHOLE else max(rho, lag_ess_ratio or 0.0)
    multiplier = step_size_multiplier(followed, config.step_size_rule, config.base_ess_ratio)
    return Estimate(coefficient, baseline, weight, usable, rho, multiplier)


def _check(config: VCPOConfig, reward: Tensor, squared_norm: Tensor | None, length: Tensor | None) -> None:
    if config.needs_gradient_norms and squared_norm is None:
        raise ValueError(f"vcpo.baseline={config.baseline} needs the gradient norm of every sequence")
    if length is None and config.opob_weights is OpobWeights.PUBLISHED:
        raise ValueError("vcpo.opob_weights=published needs the length of every sequence")
    if not torch.isfinite(reward).all():
        raise ValueError("a reward is NaN or infinite: the reward function must return finite numbers")


def log_reward_scale(config: VCPOConfig, reward: Tensor, group: Tensor) -> Tensor:
    """Return [B] log 1/s, s the standard deviation of a group's rewards with `norm_by_std`; -inf if they are equal."""
    if not config.norm_by_std:
        return torch.zeros_like(reward)
    std = group_std(reward, group)
    return torch.where(std > _EQUAL_REWARDS, -std.clamp(min=_EQUAL_REWARDS).log(), -torch.inf)


def log_used_weights(config: VCPOConfig, log_weight: Tensor) -> Tensor:
    """Return [B] log of the weights that multiply the gradients: truncated, and small enough to square in float32."""
    return truncated_log_weights(log_weight, config.truncation).clamp(max=_LARGEST_LOG_WEIGHT)


def log_packed_weights(config: VCPOConfig, log_weight: Tensor) -> Tensor:
    """Return [B] log of the weights in the loss of a packed backward; norms are divided by the weights afterwards."""
    log_used = log_used_weights(config, log_weight)
    return log_used.clamp(min=_SMALLEST_LOG_WEIGHT) if config.needs_gradient_norms else log_used


def reward_factors(
    config: VCPOConfig, reward: Tensor, group: Tensor, *, usable: Tensor, masked: Tensor | None = None
) -> Tensor:
    """Return [B] float64 (R_i - b_i) / (s_i B), which the weight a_i multiplies: all of a coefficient but the weight.

    The factors are known before a forward pass gives the weights. Baselines that need gradient norms have none.

    Args:
        reward, group, masked: as for `estimate`.
        usable: [B] bool: the sequences that will have a finite weight.
    """
    factor = torch.zeros_like(reward, dtype=torch.float64)
    if usable.any():
        factor[usable] = _factors(config, reward[usable].double(), group[usable])[1]
    return factor if masked is None else factor.masked_fill(masked, 0.0)


def coefficients(weight: Tensor, factor: Tensor) -> Tensor:
    """Return [B] float64 coefficients: the weights a_i [B] times `reward_factors` [B], which float32 can square."""
    return (weight * factor).clamp(-_LARGEST_COEFFICIENT, _LARGEST_COEFFICIENT)


def log_opob_weights(config: VCPOConfig, log_weight: Tensor, log_used: Tensor, length: Tensor | None) -> Tensor:
    """Return [B] log of the weights that OPOB squares, from those of the data and those that multiply the gradients."""
    if config.opob_weights is OpobWeights.ESTIMATOR:
        return log_used
    assert length is not None
    return log_weight + log_used + length.double().log()


def _coefficients(
    config: VCPOConfig,
    log_weight: Tensor,
    reward: Tensor,
    group: Tensor,
    squared_norm: Tensor | None,
    length: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (coefficient, baseline, weight), each [B], of usable sequences only."""
    log_used = log_used_weights(config, log_weight)
    log_a = log_opob_weights(config, log_weight, log_used, length)
    baseline, factor = _factors(config, reward, group, log_a, squared_norm)
    weight = log_used.exp()
    return coefficients(weight, factor), baseline, weight


def _factors(
    config: VCPOConfig,
    reward: Tensor,
    group: Tensor,
    log_a: Tensor | None = None,
    squared_norm: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (b, (R - b) / (s B)), each [B], of usable sequences only; what OPOB weighs with, for OPOB alone."""
    group = torch.unique(group, return_inverse=True)[1]  # [B], consecutive numbers
    log_scale = log_reward_scale(config, reward, group)
    if config.uses_opob:
        assert log_a is not None and squared_norm is not None
        baseline, advantage = _off_policy(config, reward, log_a, squared_norm, group, log_scale)
    else:
        baseline = _OF_REWARDS[config.baseline](reward, group)
        advantage = reward - baseline
    return baseline, advantage * log_scale.exp() / reward.numel()


def _off_policy(
    config: VCPOConfig, reward: Tensor, log_a: Tensor, squared_norm: Tensor, group: Tensor, log_scale: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (the off-policy baseline b, R - b), each [B]."""
    if config.opob_scope is OpobScope.MINIBATCH:
        group = torch.zeros_like(group)
        log_scale = log_scale if config.opob_weights is OpobWeights.ESTIMATOR else torch.zeros_like(log_scale)
        log_a = log_a + log_scale
    baseline = optimal_off_policy(reward, log_a, squared_norm, group)
    advantage = without_optimal(reward, baseline, log_a, squared_norm, group)
    if config.baseline is Baseline.OPOB_CAPPED:
        mean, share = group_mean(reward, group), share_below_mean(reward, group)  # [B]
        lowest = torch.lerp(mean, lowest_of_group(reward, group), share)
        for bound, beyond in ((mean, baseline > mean), (lowest, (baseline < lowest) & (share < 1))):
            baseline, advantage = torch.where(beyond, bound, baseline), torch.where(beyond, reward - bound, advantage)
    return baseline, advantage
