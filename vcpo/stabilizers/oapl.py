"""OAPL, optimal advantage-based policy optimisation with lagged inference policy (arXiv 2602.19362)."""

import torch
from torch import Tensor

from vcpo.baseline import group_mean
from vcpo.importance import sequence_log_weights

VALUE_BETA = 1.0
"""beta_1 of the paper: how far V* is from the group's mean reward (infinite) towards its largest reward (0)."""


def optimal_advantages(reward: Tensor, group: Tensor, beta: float = VALUE_BETA) -> Tensor:
    """Return the KL-penalised optimum's advantage A*_i = R_i - V*, V* = beta log mean_j exp(R_j / beta) over the group.

    Args:
        reward: [B].
        group: [B] integers in [0, G), equal for the sequences of one prompt.
        beta: the reward that one nat of KL costs.
    """
    scaled = reward / beta
    top = scaled.new_full((int(group.max()) + 1,), -torch.inf).scatter_reduce(0, group, scaled, "amax")[group]
    return reward - beta * (top + group_mean((scaled - top).exp(), group).log())


def oapl(log_prob: Tensor, rollout_log_prob: Tensor, advantage: Tensor, mask: Tensor, *, beta: float = 1e-3) -> Tensor:
    """Return token losses with the gradient of (beta log w - A*)^2 / (2 beta), w the ratio of the whole response.

    The loss is a regression: the minimum is pi = mu exp(A* / beta) whichever policy mu drew the responses, so no weight
    is needed. Divided by 2 beta, the gradient at w = 1 is REINFORCE's; the paper's loss is without this factor.

    Source: equations (2) and (3) as descriptions of the paper and other implementations agree on them, with beta_1 = 1
    and beta_2 = 1e-3 (here `beta`) for responses of thousands of tokens; the paper itself was not available. For
    responses of a few tokens log w is smaller in proportion, and `beta` has to be larger to matter. The paper keeps the
    samplers' policy for many updates and then empties the buffer; in a lag-k run mu is the policy that drew each token.

    Args:
        advantage: [B, T] on every token A*, from `optimal_advantages`.
        beta: the reward that one nat of KL to the samplers' policy costs.
    """
    log_weight = sequence_log_weights(log_prob, rollout_log_prob, mask).to(log_prob.dtype)[:, None]
    return torch.where(mask.bool(), -(advantage - beta * log_weight) * log_prob, 0.0)
