"""Leverage: the share h_i of sequence i in its group's sum of a^2 ||g||^2.

OPOB of a group leaves R_i - b* = (1 - h_i) (R_i - b*_-i), b*_-i being the OPOB of the other sequences. So its update is
that of the others' OPOB with weights a_i (1 - h_i). These weights with another baseline (`method=vcpo_leverage`) show
which effect of group OPOB comes from the weights. The name is that of the diagonal of the hat matrix in regression,
where 1 - h_i takes the same place in the residual of a point that is left out.
"""

import torch
from torch import Tensor

from vcpo.baseline import log_sum_of_others


def log_unleveraged(log_weight: Tensor, squared_norm: Tensor, group: Tensor) -> Tensor:
    """log(1 - h_i), h_i = a_i^2 ||g_i||^2 / sum_j a_j^2 ||g_j||^2 over the group.

    Args:
        log_weight: [B] log a_i.
        squared_norm: [B] ||g_i||^2.
        group: [B] group indices.

    Returns:
        [B] float64: -inf for a sequence that has all the influence of its group. In a group of n whose gradients are
        all zero, every share is 1/n.
    """
    log_influence = 2 * log_weight.double() + squared_norm.double().log()
    result = torch.zeros_like(log_influence)
    for index in torch.unique(group):
        rows = group == index
        mine = log_influence[rows]
        mine = mine if torch.isfinite(mine.max()) else torch.zeros_like(mine)
        result[rows] = log_sum_of_others(mine) - mine.logsumexp(0)
    return result.clamp(max=0.0)
