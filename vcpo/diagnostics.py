"""Collapse predictors: what to watch before accuracy falls."""

import torch
from torch import Tensor


def kl_k3(log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> Tensor:
    """Sum over each sequence's tokens of the k3 estimate of KL(rollout || policy).

    k3 = r - 1 - log r with r = pi_theta / mu: never negative, unbiased for tokens drawn from mu
    (J. Schulman, "Approximating KL divergence", 2020). Divide the sum by the number of tokens for the mean.

    Args:
        log_prob: [B, T] under the policy being trained.
        rollout_log_prob: [B, T] recorded by the sampler.
        mask: [B, T] true on response tokens.

    Returns:
        [B] float64, in nats.
    """
    keep = mask.bool()
    log_ratio = torch.where(keep, log_prob.detach().double() - rollout_log_prob.double(), 0.0)
    return (log_ratio.exp() - 1 - log_ratio).sum(dim=-1)
