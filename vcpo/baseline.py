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


def group_std(value: Tensor, group: Tensor) -> Tensor:
    """Return [B], the population standard deviation of `value` [B] over each sequence's group."""
    return group_mean((value - group_mean(value, group)).square(), group).sqrt()


def leave_one_out(reward: Tensor, group: Tensor) -> Tensor:
    """Return [B], the mean reward of the *other* sequences of the group (RLOO); 0 for a group of one."""
    others = group_sum(torch.ones_like(reward), group) - 1
    return (group_sum(reward, group) - reward) / others.clamp(min=1)


def length_weighted(reward: Tensor, length: Tensor, group: Tensor) -> Tensor:
    """Return b = sum_i L_i R_i / sum_i L_i over the group (OPO, arXiv 2505.23585).

    b has the least variance if squared gradient norms grow in proportion to the length.

    Args:
        reward: [B] rewards R_i.
        length: [B] numbers of response tokens L_i; a group without any token gets the mean reward.
        group: [B] group indices.

    Returns:
        [B] float64 baselines within [min R, max R] of the group.
    """
    return weighted_mean(reward, length.double().log(), group)


def optimal_off_policy(
    reward: Tensor, log_weight: Tensor, squared_norm: Tensor, group: Tensor, leave_out_own: bool
) -> Tensor:
    """Return OPOB, the paper's optimal off-policy baseline: b* = sum_i a_i^2 ||g_i||^2 R_i / sum_i a_i^2 ||g_i||^2.

    b* is the constant that minimises the variance of sum_i a_i (R_i - b) g_i. In a group whose gradients are all zero
    every baseline gives the same update; such a group gets the mean reward.

    Args:
        reward: [B] rewards R_i.
        log_weight: [B] log a_i, a_i being the weight that multiplies g_i in the update.
        squared_norm: [B] ||g_i||^2 of the score gradients.
        group: [B] group indices; all equal for the scope `minibatch`.
        leave_out_own: sums run over the *other* sequences of the group; 0 where there are none.

    Returns:
        [B] float64 baselines within [min R, max R] of the group.
    """
    log_influence = 2 * log_weight.double() + squared_norm.double().log()  # [B], -inf where the norm is 0
    if not leave_out_own:
        return weighted_mean(reward, log_influence, group)
    baseline = torch.zeros_like(reward, dtype=torch.float64)
    for index in torch.unique(group):
        rows = group == index
        baseline[rows] = _weighted_mean_of_others(reward[rows].double(), log_influence[rows])
    return baseline


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


def _weighted_mean_of_others(reward: Tensor, log_influence: Tensor) -> Tensor:
    """Return [n] for one group: the mean of the other rewards, weighted by exp(log_influence); 0 in a group of one."""
    if len(reward) == 1:
        return torch.zeros_like(reward)
    low = reward.min()
    total = log_sum_of_others(log_influence)
    weighted = low + (log_sum_of_others(log_influence + (reward - low).log()) - total).exp()
    plain = (reward.sum() - reward) / (len(reward) - 1)
    return torch.where(torch.isfinite(total), weighted, plain).clamp(low, reward.max())


def log_sum_of_others(log_value: Tensor) -> Tensor:
    """Return [n], log sum_{j != i} exp(log_value_j), as the sum before i plus the sum after i.

    Subtracting term i from the sum of all terms would lose all digits where term i is almost the whole sum.
    """
    nothing = log_value.new_full((1,), -torch.inf)
    before = torch.cat([nothing, log_value.logcumsumexp(0)[:-1]])
    after = torch.cat([log_value.flip(0).logcumsumexp(0).flip(0)[1:], nothing])
    return torch.logaddexp(before, after)
