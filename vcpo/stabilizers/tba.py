"""TBA, trajectory balance with asynchrony (arXiv 2503.18929): the loss, and a loss of the same gradient for verl."""

import torch
from torch import Tensor

from vcpo.baseline import group_mean


def tba(
    log_prob: Tensor, reference_log_prob: Tensor, reward: Tensor, group: Tensor, mask: Tensor, *, beta: float = 0.05
) -> Tensor:
    """(log Z + log pi - log pi_ref - R / beta)^2 with log Z the detached mean over the group (VarGrad).

    The minimum is pi = pi_ref e^{R / beta} / Z whichever policy drew the responses, so no importance weight is needed.
    The gradient is REINFORCE's, times 2 / beta, with reward R - beta log(pi / pi_ref) and the group's mean as baseline.

    Source: the paper's description of its objective; beta 0.05 is not checked against its tables.

    Args:
        log_prob: [B, T] under the policy being trained.
        reference_log_prob: [B, T] under the policy that training began with.
        reward: [B].
        group: [B] integers, equal for the sequences of one prompt.
        mask: [B, T] true on response tokens.
        beta: the reward that one nat of KL costs.

    Returns:
        [B] losses.
    """
    keep = mask.bool()
    log_ratio = torch.where(keep, log_prob - reference_log_prob, 0.0).sum(dim=-1)
    gap = log_ratio - reward.to(log_ratio.dtype) / beta
    return (gap - group_mean(gap.detach(), group)).square()


def tba_tokens(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, mask: Tensor, *, beta: float = 0.05
) -> Tensor:
    """[B, T] token losses with `tba`'s gradient, where `advantages` hold the reward less the penalty and the mean.

    Args:
        log_prob: [B, T] under the policy being trained.
        old_log_prob: [B, T]; unused, an argument of all policy losses.
        advantages: [B, T] on every token R_i - beta sum_t log(pi / pi_ref) less its mean over the group, with pi the
            policy being trained: verl's KL penalty in the reward, and GRPO without the standard deviation.
        mask: [B, T] true on response tokens.
        beta: the reward that one nat of KL costs.
    """
    return torch.where(mask.bool(), -2 / beta * advantages * log_prob, 0.0)
