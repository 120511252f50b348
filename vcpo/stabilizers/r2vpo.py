"""R2VPO, ratio-variance regularised policy optimisation (arXiv 2605.26784), with a multiplier that stands still."""

import torch
from torch import Tensor

from vcpo.stabilizers.ratios import token_log_ratios


def r2vpo(
    log_prob: Tensor, rollout_log_prob: Tensor, advantage: Tensor, mask: Tensor, *, multiplier: float = 0.5
) -> Tensor:
    """-(r A - multiplier (r - 1)^2): the Lagrangian of the mean of r A under a bound of the mean of (r - 1)^2.

    Tokens are not clipped: the penalty lowers the advantage of a token by 2 multiplier (r - 1).

    Source: the abstract, which has the constraint (the variance of the ratio, its second central moment) and that it is
    solved by primal and dual steps; a third party's code for the penalty on the ratio of a token. The paper's own
    equations, its bound and its dual step were not available. A policy loss keeps nothing from one batch to the next:
    the dual variable is the setting `multiplier`. Its default is ours: about the mean of the one that
    lab/stability/rivals.md moved.

    Args:
        multiplier: the dual variable, at least 0.
    """
    ratio = token_log_ratios(log_prob, rollout_log_prob, mask).exp()
    return torch.where(mask.bool(), multiplier * (ratio - 1).square() - ratio * advantage, 0.0)
