"""The two losses of a VCPO update, in the signature of verl's engines (verl/workers/utils/losses.py)."""

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.workers.utils.padding import no_padding_2_padding

TOKEN_MEAN, TOKEN_SUM = "seq-mean-token-mean", "seq-mean-token-sum"
LOSS_AGG_MODES = (TOKEN_MEAN, TOKEN_SUM)
"""What a sequence's score is: the mean, or the sum, of its response tokens' log-probabilities."""


def padded_responses(log_probs: Tensor, data: TensorDict) -> Tensor:
    """The model's log-probs over whole sequences (nested) -> those of the response tokens, [B, T]."""
    return no_padding_2_padding(log_probs, data)


def scores(log_probs: Tensor, data: TensorDict, loss_agg_mode: str) -> Tensor:
    """[B] scores (1/L_i) sum_t m_t log pi_theta(t), without 1/L_i for seq-mean-token-sum. 0 for an empty response."""
    mask = data["response_mask"]
    mask = (mask.to_padded_tensor(0) if mask.is_nested else mask).bool()  # [B, T]
    log_prob = padded_responses(log_probs, data)[:, : mask.shape[1]]
    total = torch.where(mask, log_prob, 0.0).sum(dim=-1)
    return total / mask.sum(dim=-1).clamp(min=1) if loss_agg_mode == TOKEN_MEAN else total


def score_loss(
    model_output: dict[str, Tensor], data: TensorDict, dp_group: Any = None, *, loss_agg_mode: str
) -> tuple[Tensor, dict[str, Any]]:
    """The sum of the scores: with one sequence per backward its gradient is g_i."""
    return scores(model_output["log_probs"], data, loss_agg_mode).sum(), {}


def weighted_score_loss(
    model_output: dict[str, Tensor], data: TensorDict, dp_group: Any = None, *, loss_agg_mode: str
) -> tuple[Tensor, dict[str, Any]]:
    """-sum_i coefficient_i score_i, whose gradient summed over the global mini-batch is -G.

    The coefficients contain 1/B of the global mini-batch. Times the data-parallel size, because Megatron
    averages gradients over data-parallel ranks.
    """
    score = scores(model_output["log_probs"], data, loss_agg_mode)
    # A coefficient of 0 excludes a sequence even where its score is not finite.
    used = torch.where(data["vcpo_coefficient"] != 0, score, 0.0)
    return -(data["vcpo_coefficient"] * used).sum() * data["dp_size"], {}
