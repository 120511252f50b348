"""How far off policy a sequence is: its importance weight, kept in log space and float64.

A sum of per-token log-ratios over a long response overflows `exp` in float32 at 88.7; nothing here ever
exponentiates an unbounded number.
"""

import math

import torch
from torch import Tensor


def sequence_log_weights(log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> Tensor:
    """log w_i = sum_t m_t (log pi_theta(t) - log mu(t)).

    Args:
        log_prob: [B, T] log-probabilities under the policy being trained.
        rollout_log_prob: [B, T] log-probabilities recorded by the sampler when it drew the tokens.
        mask: [B, T] true (or 1) on response tokens; what the other positions hold is ignored, NaN included.

    Returns:
        [B] float64. NaN or infinite where a response token's log-probability is.
    """
    keep = mask.bool()
    log_ratio = log_prob.detach().double() - rollout_log_prob.double()  # [B, T]
    return torch.where(keep, log_ratio, 0.0).sum(dim=-1)


def truncated_log_weights(log_weight: Tensor, truncation: float | None) -> Tensor:
    """log min(w, c): [B] -> [B]. `truncation` None leaves the weights as they are."""
    return log_weight if truncation is None else log_weight.clamp(max=math.log(truncation))
