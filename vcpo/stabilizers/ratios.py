"""Importance ratios, bounded so that float32 can represent them."""

import torch
from torch import Tensor

from vcpo.importance import sequence_log_weights

# The same bound as in verl's losses: e^20 is 5e8, whose square float32 can represent.
LARGEST_LOG_RATIO = 20.0


def token_log_ratios(log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> Tensor:
    """Return [B, T] log r = log pi - log mu, with the gradient of log pi; 0 outside the mask."""
    log_ratio = torch.where(mask.bool(), log_prob - rollout_log_prob, 0.0)
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def sequence_ratios(log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> Tensor:
    """Return [B] w, the product of a sequence's token ratios; detached."""
    log_weight = sequence_log_weights(log_prob, rollout_log_prob, mask)
    return log_weight.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp().to(log_prob.dtype)
