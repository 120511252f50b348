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
    lower bound rises first, then the upper one). In the repository rho is positive / negative contributions; here, as
    in the paper's text, rho is the share of positive contributions, so 0.5 is balance. Three more differences: in
    the repository the lower bound moves by 0.05, a dual clip bounds the ratio by 3 where A < 0, and contributions are
    summed over all ranks.

    Args:
        positive_share: rho_0.
        lower: the range in which the lower bound moves, from its start.
        upper: the same for the upper bound.
        lower_step: the lower bound moves by so much at a time.
        upper_step: the same for the upper bound.
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
    """Return the share of positive advantages in the sum of the surrogate's absolute values; 1 if the sum is 0."""
    value = torch.where(mask.bool(), _surrogate(ratio.detach(), advantage, low, high), 0.0)
    positive, total = value.clamp(min=0).sum().item(), value.abs().sum().item()
    return positive / total if total > 0 else 1.0
