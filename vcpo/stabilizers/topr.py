"""TOPR, tapered off-policy REINFORCE (arXiv 2503.14286)."""

import torch
from torch import Tensor

from vcpo.stabilizers.ratios import sequence_ratios


def topr(log_prob: Tensor, rollout_log_prob: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """-A log pi for A > 0; -sg(clip(w, 0, 1)) A log pi otherwise: a bad response counts less the less likely it is.

    w is the ratio of the whole response, pi(tau)/mu(tau), as in the paper.
    """
    tapered = sequence_ratios(log_prob, rollout_log_prob, mask).clamp(max=1.0)[:, None]
    weight = torch.where(advantage > 0, 1.0, tapered)
    return torch.where(mask.bool(), -weight * advantage * log_prob, 0.0)
