"""M2PO, second-moment trust policy optimisation (arXiv 2510.01161)."""

import torch
from torch import Tensor

from vcpo.stabilizers.ratios import token_log_ratios


def m2po(log_prob: Tensor, rollout_log_prob: Tensor, advantage: Tensor, mask: Tensor, *, tau: float = 0.04) -> Tensor:
    """-M r A: harmful tokens are masked until the mean of (log r)^2 over the harmful tokens left is at most tau.

    Harmful tokens are those that PPO would clip: A > 0 and r > 1, or A < 0 and r < 1. The harmful tokens with the
    largest (log r)^2 are masked first; all other tokens are kept. Masked tokens have loss 0, and count in its mean.

    Source: the paper's description, and the authors' repository (Infini-AI-Lab/M2PO) for what counts as harmful.

    Args:
        tau: the largest second moment, in nats^2.
    """
    log_ratio = token_log_ratios(log_prob, rollout_log_prob, mask)
    keep = kept_tokens(log_ratio.detach(), advantage, mask.bool(), tau)
    return torch.where(keep, -log_ratio.exp() * advantage, 0.0)


def kept_tokens(log_ratio: Tensor, advantage: Tensor, mask: Tensor, tau: float) -> Tensor:
    """Return [B, T], false where a token is masked."""
    harmful = mask & (advantage * log_ratio > 0)
    moment, order = log_ratio[harmful].double().square().sort()
    mean = moment.cumsum(0) / torch.arange(1, len(moment) + 1, device=moment.device)
    keep = mask.clone()
    keep[harmful] = (mean <= tau)[order.argsort()]  # means of ever larger moments: true, then false
    return keep
