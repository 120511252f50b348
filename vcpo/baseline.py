"""Baselines, which are subtracted from the rewards of sequences.

`group` is [B] integers in [0, G), equal for the sequences of one prompt, in any order.
"""

import torch
from torch import Tensor

# A reward as close as this to its baseline, relative to the group's rewards, has lost digits to the subtraction.
_CLOSE = 1e-6


def group_sum(value: Tensor, group: Tensor) -> Tensor:
    """Return [B], the sum of `value` [B] over each sequence's group."""
    total = value.new_zeros(int(group.max()) + 1).index_add_(0, group, value)
    return total[group]


def group_mean(value: Tensor, group: Tensor) -> Tensor:
    """Return [B], the mean of `value` [B] over each sequence's group: GRPO's baseline for rewards."""
    return group_sum(value, group) / group_sum(torch.ones_like(value), group)


def half_mean(reward: Tensor, group: Tensor) -> Tensor:
    """Return [B], the number halfway from the lowest reward of each sequence's group to the mean of its `reward` [B].

    The level of a baseline decides what stale data do: below the mean an update raises right answers more than it
    lowers wrong ones (AsymRE, arXiv 2506.20520). Measured from the lowest reward, the level stays below the mean for
    rewards of any sign; where the lowest reward is 0 the result is half of the mean. A group of more than two rewards
    has only `share_below_mean` of the way from its mean.
    """
    mean = group_mean(reward, group)
    return torch.lerp(mean, (lowest_of_group(reward, group) + mean) / 2, share_below_mean(reward, group))


def lowest_of_group(value: Tensor, group: Tensor) -> Tensor:
    """Return [B], the lowest `value` [B] of each sequence's group."""
    return value.new_full((int(group.max()) + 1,), torch.inf).scatter_reduce(0, group, value, "amin")[group]


def share_below_mean(reward: Tensor, group: Tensor) -> Tensor:
    """Return [B] in [0, 1]: how far below the mean a group's baseline may be, relative to a group of two rewards.

    A low baseline adds the same amount to all advantages of a group: it would raise wrong answers whose reward is near
    the mean, because one reward of the group is far below. The share is the smallest distance of a reward to the mean,
    relative to the largest distance on the same side: 1 where a group has two rewards, 0 where a reward is the mean.
    So a reward below the mean loses no larger part of its advantage than the lowest one, and a reward above the mean
    gains no larger part than the highest one.
    """
    distance = reward - group_mean(reward, group)
    highest, lowest = -lowest_of_group(-distance, group), -lowest_of_group(distance, group)
    relative = distance.abs() / torch.where(distance >= 0, highest, lowest)
    return lowest_of_group(relative.nan_to_num(nan=1.0), group)  # 0 / 0: all rewards are equal


def group_std(value: Tensor, group: Tensor) -> Tensor:
    """Return [B], the population standard deviation of `value` [B] over each sequence's group."""
    return group_mean((value - group_mean(value, group)).square(), group).sqrt()


def optimal_off_policy(reward: Tensor, log_weight: Tensor, squared_norm: Tensor, group: Tensor) -> Tensor:
    """Return OPOB, the paper's optimal off-policy baseline: b* = sum_i a_i^2 ||g_i||^2 R_i / sum_i a_i^2 ||g_i||^2.

    b* is the constant that minimises the variance of sum_i a_i (R_i - b) g_i. In a group whose gradients are all zero
    every baseline gives the same update; such a group gets the mean reward.

    Args:
        reward: [B] rewards R_i.
        log_weight: [B] log a_i, a_i being the weight that multiplies g_i in the update.
        squared_norm: [B] ||g_i||^2 of the score gradients.
        group: [B] group indices; all equal for the scope `minibatch`.

    Returns:
        [B] float64 baselines within [min R, max R] of the group.
    """
    log_influence = 2 * log_weight.double() + squared_norm.double().log()  # [B], -inf where the norm is 0
    return weighted_mean(reward, log_influence, group)


def without_optimal(
    reward: Tensor, baseline: Tensor, log_weight: Tensor, squared_norm: Tensor, group: Tensor
) -> Tensor:
    """Return R_i - b* to many digits, even where one sequence, or equally rewarded ones, have almost all the influence.

    There b* rounds to their reward, and R_i - b* is rounding only, which a large a_i multiplies. Measured from the
    reward of the most influential sequence, b* is a sum of the terms of other sequences, however small.

    Args:
        reward: [B] rewards R_i.
        baseline: [B] b* by `optimal_off_policy`, of whole groups.
        log_weight: [B] log a_i, as given to `optimal_off_policy`.
        squared_norm: [B] ||g_i||^2 of the score gradients.
        group: [B] group indices; all equal for the scope `minibatch`.
    """
    reward, log_influence = reward.double(), 2 * log_weight.double() + squared_norm.double().log()
    lowest = reward.new_full((int(group.max()) + 1,), -torch.inf)
    top = lowest.scatter_reduce(0, group, log_influence, "amax")[group]
    first = lowest.scatter_reduce(0, group, torch.where(log_influence == top, reward, -torch.inf), "amax")[group]
    influence = torch.where(torch.isfinite(top), (log_influence - top).exp(), 1.0)
    shifted = reward - first
    exact = shifted - group_sum(influence * shifted, group) / group_sum(influence, group)
    difference, spread = reward - baseline, group_sum(shifted.abs(), group)
    return torch.where((difference.abs() <= _CLOSE * spread) | (spread == 0), exact, difference)


def weighted_mean(reward: Tensor, log_influence: Tensor, group: Tensor) -> Tensor:
    """Return [B], group means of the rewards, weighted by exp(log_influence); plain means if all influences are 0."""
    reward = reward.double()
    groups = int(group.max()) + 1
    top = log_influence.new_full((groups,), -torch.inf).scatter_reduce_(0, group, log_influence, "amax")[group]
    influence = torch.where(torch.isfinite(top), (log_influence - top).exp(), 1.0)  # at most 1, and 1 in each group
    return group_sum(influence * reward, group) / group_sum(influence, group)
