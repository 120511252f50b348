"""BAPO, balanced policy optimisation with adaptive clipping (arXiv 2510.18927)."""

import torch
from torch import Tensor

from vcpo.stabilizers.ratios import token_log_ratios


def bapo(
    log_prob: Tensor,
    rollout_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    positive_share: float = 0.5,
    lower: tuple[float, float] = (0.6, 0.9),
    upper: tuple[float, float] = (1.2, 3.0),
    lower_step: float = 0.02,
    upper_step: float = 0.05,
) -> Tensor:
    """PPO's clip, with bounds that move until positive advantages make up `positive_share` of the surrogate.

    Source: the paper's description and the authors' repository (WooooDyy/BAPO): ranges, rho_0 = 0.5, and the order (the
    lower bound rises first, then the upper one). There rho is positive / negative; here, as in the paper's text, the
    share of positive contributions in all, so 0.5 is balance. The steps are settings of the authors' that were
    not available: ours.

    Args:
        log_prob: [B, T] under the policy being trained.
        rollout_log_prob: [B, T] recorded by the sampler.
        advantage: [B, T].
        mask: [B, T] true on response tokens.
        positive_share: rho_0.
        lower: the range in which the lower bound moves, from its start.
        upper: the same for the upper bound.
        lower_step: by how much the lower bound moves at a time.
        upper_step: the same for the upper bound.

    Returns:
        [B, T] losses.
    """
    ratio = token_log_ratios(log_prob, rollout_log_prob, mask).exp()
    (low, low_end), (high, high_end) = lower, upper
    while low < low_end and _positive_share(ratio, advantage, mask, low, high) < positive_share:
        low = min(low + lower_step, low_end)
    while high < high_end and _positive_share(ratio, advantage, mask, low, high) < positive_share:
        high = min(high + upper_step, high_end)
    return torch.where(mask.bool(), -_surrogate(ratio, advantage, low, high), 0.0)


def _surrogate(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage)


def _positive_share(ratio: Tensor, advantage: Tensor, mask: Tensor, low: float, high: float) -> float:
    """What part of the surrogate's absolute value positive advantages contribute; 1 where there is nothing at all."""
    value = torch.where(mask.bool(), _surrogate(ratio.detach(), advantage, low, high), 0.0)
    positive, total = value.clamp(min=0).sum().item(), value.abs().sum().item()
    return positive / total if total > 0 else 1.0
