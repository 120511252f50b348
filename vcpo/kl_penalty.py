"""A KL penalty to the samplers' policy mu, which a lag-k update has all numbers for already.

With f = log w = log(pi / mu), the gradient of J(pi) - tau KL(pi || mu) is E_mu[w (A - tau f) g]: where the policy has
moved away from the samplers' policy, the penalty pulls it back, also in a prompt group whose rewards are all equal. The
policy at which the expected update is 0 is pi = mu exp(A / tau) / Z, so tau bounds how far the policy runs ahead of its
data, whatever the learning rate and the lag are.

Source: the KL-regularised objective of behaviour-regularised reinforcement learning (Y. Wu, G. Tucker, O. Nachum,
arXiv 1911.11361) with the lagged policy in place of a fixed one. E_mu[w g] = 0, so a constant of the group may be
subtracted from f; its weighted mean is.
"""

import torch
from torch import Tensor

from vcpo.baseline import group_sum


def centred_log_ratios(log_weight: Tensor, log_used: Tensor, group: Tensor) -> Tensor:
    """log w_i less its mean over the prompt group, weighted by the weights in use: the penalty of a sequence, in nats.

    Args:
        log_weight: [B] log w_i, finite.
        log_used: [B] the logarithm of the weight that multiplies g_i in the update, -inf for 0.
        group: [B] group indices in [0, G).

    Returns:
        [B] float64; 0 in a group of one, and where all of a group are equal.
    """
    log_weight, log_used = log_weight.double(), log_used.double()
    top = log_used.new_full((int(group.max()) + 1,), -torch.inf).scatter_reduce(0, group, log_used, "amax")[group]
    weight = torch.where(torch.isfinite(top), (log_used - top).exp(), 1.0)  # at most 1, and 1 in each group
    return log_weight - group_sum(weight * log_weight, group) / group_sum(weight, group)
