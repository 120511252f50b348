"""VESPO, variational sequence-level soft policy optimisation (arXiv 2602.10693v3)."""

import torch
from torch import Tensor

from vcpo.stabilizers.ratios import sequence_ratios


def vespo(
    log_prob: Tensor,
    rollout_log_prob: Tensor,
    advantage: Tensor,
    mask: Tensor,
    *,
    positive: tuple[float, float] = (2.0, 3.0),
    negative: tuple[float, float] = (3.0, 2.0),
) -> Tensor:
    """-sg(w^k e^{lambda (1 - w)}) A log pi: the weight is 1 at w = 1, and falls to 0 as w goes to 0 or grows.

    Source: equation (20) and section 4.1 of the paper's third version. The authors' code has the same numbers.

    Args:
        positive: (k, lambda) for A >= 0.
        negative: (k, lambda) for A < 0.
    """
    w = sequence_ratios(log_prob, rollout_log_prob, mask)[:, None]  # [B, 1]
    k, decay = (torch.where(advantage >= 0, p, n) for p, n in zip(positive, negative, strict=True))
    weight = (k * w.log() + decay * (1 - w)).exp()
    return torch.where(mask.bool(), -weight * advantage * log_prob, 0.0)
