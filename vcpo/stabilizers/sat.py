"""SAT, staleness-adaptive trust region (arXiv 2607.18722)."""

import math

import torch
from torch import Tensor

from vcpo.stabilizers.ratios import token_log_ratios

# 0.7 * 10 is above 7 in floating point, and the quantile would be the eighth of ten values.
_ROUNDING = 1e-9


def sat(
    log_prob: Tensor,
    rollout_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    quantile: float = 0.9,
    lower: float = 0.2,
    upper: float = 0.2,
) -> Tensor:
    """PPO's clip, with a narrower interval for tokens whose |log r| is above a quantile of the batch.

    With d = log r, detached, and q the quantile of |d|, a token with |d| > q has the clip bound on the side of d at
    1 / (1 + (d / q)^2) of its distance from 1: below a half. The other bound, and all other tokens, are PPO's.

    Source: equations (3.1) to (3.6) of the authors' project page, with the quantile 0.9; `lower` and `upper` 0.2 from a
    description of the paper's table of settings. The paper itself and the authors' code were not available. SAT-GRPO:
    the ratio is that of a token. SAT-GSPO, with the ratio of a sequence, is not here.

    Args:
        quantile: the quantile, in [0, 1], of |log r| over the batch's response tokens.
        lower: PPO's clip range below 1.
        upper: the same above 1.
    """
    log_ratio = token_log_ratios(log_prob, rollout_log_prob, mask)
    distance = log_ratio.detach()
    above, below = contraction(distance, mask.bool(), quantile)
    ratio = log_ratio.exp()
    clipped = torch.minimum(torch.maximum(ratio, 1 - lower * below), 1 + upper * above)
    return torch.where(mask.bool(), -torch.minimum(ratio * advantage, clipped * advantage), 0.0)


def contraction(distance: Tensor, mask: Tensor, quantile: float) -> tuple[Tensor, Tensor]:
    """Return the factors in (0, 1] of the clip range above and below 1, each [B, T].

    Args:
        distance: [B, T] log r, detached.
        mask: [B, T] bool, true on response tokens.
        quantile: a share q; the q-quantile is the smallest |log r| that this share of the tokens does not exceed.
    """
    size = distance.abs()
    active = size[mask]
    rank = max(1, math.ceil(quantile * active.numel() - _ROUNDING))
    scale = active.kthvalue(rank).values if active.numel() else size.new_zeros(())
    factor = torch.where(size > scale, 1 / (1 + (size / scale).square()), 1.0)
    factor = torch.where(scale > 0, factor, 1.0)
    return torch.where(distance > 0, factor, 1.0), torch.where(distance < 0, factor, 1.0)
