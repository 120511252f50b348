"""The loss of a VCPO update, in the signature of verl's engines (verl/workers/utils/losses.py)."""

from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

from vcpo import VCPOConfig
from vcpo.estimator import coefficients, log_packed_weights
from vcpo.importance import sequence_log_weights

TOKEN_MEAN, TOKEN_SUM, TOKEN_SUM_NORM = "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"
LOSS_AGG_MODES = (TOKEN_MEAN, TOKEN_SUM, TOKEN_SUM_NORM)
"""A sequence's score is the mean of the log-probabilities of its response tokens, or their sum, or their sum divided by
the constant `loss_scale_factor`."""


def padded_responses(log_probs: Tensor, data: TensorDict) -> Tensor:
    """Return the log-probs of the response tokens, [B, T], from those of whole sequences (nested)."""
    return no_padding_2_padding(log_probs, data)


def note_longest_response(data: TensorDict) -> None:
    """Store the longest response's length in `data`, for the losses and verl's padding, while `data` is on the host."""
    tu.assign_non_tensor(data, max_response_len=int(data["responses"].offsets().diff().max()))


def response_rows(log_probs: Tensor, data: TensorDict, *fields: str) -> list[Tensor]:
    """Return the response tokens' log-probs, then their `fields` of `data`: [n, T] each, 0 beyond the end.

    T is read from the batch (`note_longest_response`), so no device-to-host copy is needed; verl's own padding
    synchronises once per sequence.

    Args:
        log_probs: nested, over whole sequences: at position t the log-prob of token t + 1.
        data: a micro-batch of n sequences, with `prompts`, `responses` and `fields`, all nested.

    Raises:
        RuntimeError: `log_probs` and `data` have different numbers of tokens.
    """
    prompt, response = (data[name].offsets().diff() for name in ("prompts", "responses"))
    if len(log_probs.values()) != len(data["prompts"].values()) + len(data["responses"].values()):
        raise RuntimeError("log-probs of other sequences than those of the micro-batch")
    at = torch.arange(data["max_response_len"], device=response.device)
    inside = at < response[:, None]  # [n, T]

    def rows(values: Tensor, start: Tensor) -> Tensor:
        index = (start[:, None] + at).masked_fill(~inside, 0)
        return torch.where(inside, values[index], 0) if len(values) else values.new_zeros(index.shape)

    of_policy = rows(log_probs.values(), (prompt + response).cumsum(0) - response - 1)
    return [of_policy, *(rows(data[name].values(), data[name].offsets()[:-1]) for name in fields)]


def aggregated(log_prob: Tensor, mask: Tensor, loss_agg_mode: str, loss_scale_factor: float | None) -> Tensor:
    """Return [B] scores (1/L_i) sum_t m_t log pi_theta(t) of [B, T] log-probs and mask; 0 for an empty response.

    `seq-mean-token-sum` has the factor 1, `seq-mean-token-sum-norm` 1 / `loss_scale_factor`, in place of 1/L_i.
    """
    total = torch.where(mask, log_prob, 0.0).sum(dim=-1)
    if loss_agg_mode == TOKEN_MEAN:
        return total / mask.sum(dim=-1).clamp(min=1)
    if loss_agg_mode == TOKEN_SUM_NORM:
        return total / float(loss_scale_factor or 0)  # VCPOActorConfig refuses None
    return total


def loss_of_trained(
    loss: Callable[..., tuple[Tensor, dict[str, Any]]],
    model_output: dict[str, Tensor],
    data: TensorDict,
    dp_group: Any = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Return verl's `loss` of a micro-batch; 0, without metrics, if all its tokens are masked, which verl's refuse."""
    if data["response_mask"].values().any():
        return loss(model_output=model_output, data=data, dp_group=dp_group)
    return model_output["log_probs"].values().sum() * 0.0, {}


def weighted_score_loss(
    model_output: dict[str, Tensor],
    data: TensorDict,
    dp_group: Any = None,
    *,
    loss_agg_mode: str,
    loss_scale_factor: float | None = None,
    importance: VCPOConfig | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Return the loss -sum_i coefficient_i score_i, whose gradient summed over the global mini-batch is -G.

    The coefficients contain 1/B of the global mini-batch. The loss is multiplied by the data-parallel size, because
    Megatron averages gradients over data-parallel ranks.

    Args:
        importance: `vcpo_coefficient` are factors, which become coefficients by the weights a_i of the same forward
            pass under these settings. A sequence with weight NaN gets weight 0, and so no gradient of its score; the
            caller sees the NaN in the gathered weights.
    """
    fields = ["response_mask"] if importance is None else ["response_mask", "rollout_log_probs"]
    log_prob, mask, *of_sampler = response_rows(model_output["log_probs"], data, *fields)
    coefficient = data["vcpo_coefficient"]
    if importance is not None:
        log_weight = log_packed_weights(importance, sequence_log_weights(log_prob, of_sampler[0], mask))
        coefficient = coefficients(torch.where(log_weight.isnan(), 0.0, log_weight.exp()), coefficient).float()
    score = aggregated(log_prob, mask.bool(), loss_agg_mode, loss_scale_factor)
    # A coefficient of 0 excludes a sequence even where its score is not finite.
    return -(coefficient * torch.where(coefficient != 0, score, 0.0)).sum() * data["dp_size"], {}
