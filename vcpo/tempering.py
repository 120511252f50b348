"""Tempered importance weights w^alpha, with alpha as large as an effective sample size allows.

w^alpha are, up to a constant, the weights of the policy pi^alpha mu^(1 - alpha): a bridge between the samplers' policy
mu (alpha = 0) and the policy pi (alpha = 1). Choosing alpha by the effective sample size is the rule of adaptive
sequential Monte Carlo (A. Jasra et al., "Inference for Levy-driven stochastic volatility models via adaptive sequential
Monte Carlo", 2011; P. Del Moral, A. Doucet, A. Jasra, 2012).
"""

import torch
from torch import Tensor

from vcpo.ess import ess_ratio

# Each halves the interval in which alpha is known to be; after 60 it is narrower than the rounding of float64 at 1.
_BISECTIONS = 60


def tempering_exponent(log_weight: Tensor, target: float) -> float:
    """The largest alpha <= 1 with which w^alpha has an ESS ratio of at least `target`.

    The ESS ratio of w^alpha never rises with alpha, and is 1 at alpha = 0. Therefore bisection finds alpha.

    Args:
        log_weight: [B] log w of the *global* mini-batch; values that are not finite are ignored.
        target: the ESS ratio wanted, in (0, 1].

    Returns:
        alpha in [0, 1]: 1 where the weights have the ESS ratio already, and where no weight is finite.
    """
    log_weight = log_weight[torch.isfinite(log_weight)].double()
    if log_weight.numel() == 0 or ess_ratio(log_weight) >= target:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if ess_ratio(middle * log_weight) >= target:
            low = middle
        else:
            high = middle
    return low
