"""Importance weights of sequences, which measure how far off policy a sequence is: as logarithms, in float64.

`exp` overflows in float32 above 88.7, which the sum of a long response's log-ratios can exceed. Therefore only bounded
log-weights are exponentiated anywhere in this package.
"""

import math

import torch
from torch import Tensor


def log_ratios(log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> Tensor:
    """Return log pi_theta - log mu of each token: [B, T] float64 without a gradient, 0 outside the mask.

    Arguments: see `sequence_log_weights`.
    """
    return torch.where(mask.bool(), log_prob.detach().double() - rollout_log_prob.double(), 0.0)


def sequence_log_weights(log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> Tensor:
    """Return log w_i = sum_t m_t (log pi_theta(t) - log mu(t)).

    Args:
        log_prob: [B, T] log-probabilities under the policy being trained.
        rollout_log_prob: [B, T] log-probabilities recorded by the sampler when it drew the tokens.
        mask: [B, T] true (or 1) on response tokens; values at other positions are ignored, also NaN.

    Returns:
        [B] float64. NaN or infinite where the log-probability of a response token is NaN or infinite.
    """
    return log_ratios(log_prob, rollout_log_prob, mask).sum(dim=-1)


def truncated_log_weights(log_weight: Tensor, truncation: float | None) -> Tensor:
    """Return log min(w, c), [B]. `truncation` None leaves the weights as they are."""
    return log_weight if truncation is None else log_weight.clamp(max=math.log(truncation))
