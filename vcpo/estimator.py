"""Weights, baseline and normalisation together: one coefficient per sequence, one multiplier per step.

The update is G = sum_i coefficient_i * g_i, with g_i the score gradient of sequence i:
coefficient_i = min(w_i, c) (R_i - b_i) / s_i / B. (DESIGN: "The mathematics"; paper, algorithm 1.)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vcpo.baseline import group_mean, group_std, leave_one_out, optimal_off_policy
from vcpo.config import Baseline, OpobWeights, VCPOConfig
from vcpo.ess import ess_ratio, step_size_multiplier
from vcpo.importance import truncated_log_weights

# A group whose rewards differ by less than this has no signal: its coefficients are 0, not 0/0.
_EQUAL_REWARDS = 1e-6


@dataclass(frozen=True)
class Estimate:
    """What one optimizer step needs to know about its mini-batch. B sequences, all data-parallel ranks."""

    coefficient: Tensor
    """[B] float64: multiplies g_i in the update; 0 for a sequence that is not usable."""
    baseline: Tensor
    """[B] float64: b of the sequence's group."""
    weight: Tensor
    """[B] float64: min(w_i, c)."""
    usable: Tensor
    """[B] bool: false where the weight or the gradient norm is NaN or infinite. Left out of everything, B included."""
    ess_ratio: float
    """rho of the untruncated weights."""
    step_size_multiplier: float
    """What the learning rate is multiplied by at this step."""


def estimate(
    config: VCPOConfig, log_weight: Tensor, reward: Tensor, group: Tensor, squared_norm: Tensor | None = None
) -> Estimate:
    """The VCPO update of one global mini-batch.

    Args:
        config: which weights, baseline and normalisation.
        log_weight: [B] log w_i from `sequence_log_weights`.
        reward: [B] raw sequence rewards R_i.
        group: [B] integers, equal for the sequences of one prompt.
        squared_norm: [B] ||g_i||^2; needed where `config.needs_gradient_norms`.

    Raises:
        ValueError: gradient norms are needed and missing, or a reward is not finite.
    """
    if config.needs_gradient_norms and squared_norm is None:
        raise ValueError("vcpo.baseline=opob needs the gradient norm of every sequence")
    if not torch.isfinite(reward).all():
        raise ValueError("a reward is NaN or infinite: the reward function must return finite numbers")
    usable = torch.isfinite(log_weight)
    if config.needs_gradient_norms:
        assert squared_norm is not None
        usable = usable & torch.isfinite(squared_norm)

    coefficient, baseline, weight = (torch.zeros_like(log_weight, dtype=torch.float64) for _ in range(3))
    rho = ess_ratio(log_weight[usable])
    if usable.any():
        norm = None if squared_norm is None else squared_norm[usable]
        parts = _coefficients(config, log_weight[usable].double(), reward[usable].double(), group[usable], norm)
        coefficient[usable], baseline[usable], weight[usable] = parts
    multiplier = step_size_multiplier(
        rho, config.step_size_rule, config.base_ess_ratio, config.min_step_size_multiplier
    )
    return Estimate(coefficient, baseline, weight, usable, rho, multiplier)


def _coefficients(
    config: VCPOConfig, log_weight: Tensor, reward: Tensor, group: Tensor, squared_norm: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(coefficient, baseline, weight), each [B], of usable sequences only."""
    group = torch.unique(group, return_inverse=True)[1]  # [B], consecutive numbers
    log_used = truncated_log_weights(log_weight, config.truncation)
    weight = log_used.exp()
    match config.baseline:
        case Baseline.NONE:
            baseline = torch.zeros_like(reward)
        case Baseline.MEAN:
            baseline = group_mean(reward, group)
        case Baseline.LEAVE_ONE_OUT:
            baseline = leave_one_out(reward, group)
        case Baseline.OPOB:
            assert squared_norm is not None
            opob = log_weight if config.opob_weights is OpobWeights.PAPER else log_used
            baseline = optimal_off_policy(reward, opob, squared_norm, group)
    advantage = reward - baseline
    if config.norm_by_std:
        std = group_std(reward, group)
        advantage = torch.where(std > _EQUAL_REWARDS, advantage / std.clamp(min=_EQUAL_REWARDS), 0.0)
    return weight * advantage / reward.numel(), baseline, weight
