"""P3O for language models, "trust the batch" (arXiv 2605.12380)."""

import torch
from torch import Tensor

from vcpo.ess import ess_ratio
from vcpo.stabilizers.ratios import token_log_ratios

_LARGEST_EXPONENT = 10.0
"""The authors' bound of log(mu / pi) in the KL term: a token that pi has all but lost does not make up the gradient."""


def p3o(log_prob: Tensor, rollout_log_prob: Tensor, advantage: Tensor, mask: Tensor) -> Tensor:
    """-sg(min(r, rho)) A log pi + (1 - rho) KL, with rho the ESS ratio of the batch's token ratios r.

    KL is the k3 estimate log r + 1 / r - 1 of KL(pi || mu). One number replaces the clip range and the weight of the
    KL term: at rho = 1 the loss is REINFORCE's, and the less of the batch counts, the nearer pi is held to mu.

    Source: the authors' code (FeynRL-project/FeynRL, algs/P3O/p3o.py and algs/RL/common.py at 4f7eafe). The paper was
    not available; public notes quote its equations (11), the ESS ratio of all response tokens, and (12), the loss, as
    they are here. Where the code takes rho = 1 for a batch whose sums overflow, rho is computed in log space here.
    """
    log_ratio = token_log_ratios(log_prob, rollout_log_prob, mask)
    log_weight = log_ratio.detach()
    rho = ess_ratio(log_weight[mask.bool()])
    kl = log_ratio + (-log_ratio).clamp(max=_LARGEST_EXPONENT).exp() - 1
    loss = -log_weight.exp().clamp(max=rho) * advantage * log_prob + (1 - rho) * kl
    return torch.where(mask.bool(), loss, 0.0)
