"""Off-policy sequence masking (DeepSeek-V3.2 technical report, arXiv 2512.02556)."""

import torch
from torch import Tensor

from vcpo.stabilizers.ratios import token_log_ratios


def off_policy_mask(
    log_prob: Tensor,
    rollout_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    delta: float = 0.5,
    clip: float = 0.2,
) -> Tensor:
    """PPO's clipped loss without sequences with A < 0 that are far off policy: mean log(mu/pi) > delta.

    Source: descriptions of the report in TRL (`off_policy_mask_threshold`, whose example is 0.5) and slime; the report
    was not available and gives no delta.

    Args:
        delta: nats per token.
        clip: PPO's clip range of the ratio.

    Returns:
        [B, T] losses; a masked sequence has loss 0, and counts in the mean.
    """
    log_ratio = token_log_ratios(log_prob, rollout_log_prob, mask)
    distance = -log_ratio.detach().sum(dim=-1) / mask.sum(dim=-1).clamp(min=1)  # [B]
    keep = mask.bool() & ((advantage >= 0) | (distance <= delta)[:, None])
    ratio = log_ratio.exp()
    surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    return torch.where(keep, -surrogate, 0.0)
