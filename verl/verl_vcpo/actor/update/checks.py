"""What a mini-batch must have before its update, and what it gets where a sequence spoils the gradient."""

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu


def check_lengths(data: TensorDict) -> None:
    """Refuse sequences without one recorded log-prob, or without one value of the mask, for each response token.

    Args:
        data: this data-parallel rank's sequences, on the host, with `responses`, `rollout_log_probs`,
            `response_mask` and `uid`.

    Raises:
        ValueError: naming the first such sequence.
    """
    tokens = data["responses"].offsets().diff()
    for name in ("rollout_log_probs", "response_mask"):
        given = data[name].offsets().diff()
        wrong = (given != tokens).nonzero().flatten().tolist()
        if wrong:
            raise ValueError(
                f"{name}: {int(given[wrong[0]])} values for the {int(tokens[wrong[0]])} response tokens of a sample of "
                f"prompt {tu.get(data, 'uid')[wrong[0]]}, and {len(wrong)} samples of {len(data)} like that; an agent "
                "loop has to return one for every token, of a tool's output too"
            )


def check_experts(data: TensorDict) -> None:
    """Refuse sequences without experts for a token that the update replays: verl stores expert 0 in their place.

    All tokens are replayed but the last, and none of a sequence without a token in the loss. A dense layer has expert 0
    at every token, so a token lacks its experts where all its layers have expert 0.

    Args:
        data: as for `check_lengths`; with `routed_experts` [B, tokens, layers, chosen], if experts are replayed.

    Raises:
        ValueError: naming the first such sequence.
    """
    if not tu.get_non_tensor_data(data, key="enable_routing_replay", default=False):
        return
    rows = zip(data["routed_experts"].unbind(), data["response_mask"].unbind(), tu.get(data, "uid"), strict=True)
    for experts, mask, uid in rows:
        if mask.any() and experts.shape[-1] > 1 and (experts[:-1].amax(dim=(-1, -2)) == 0).any():
            raise ValueError(f"routed_experts: samplers returned no experts for a token of a sample of prompt {uid}")


def with_harmless_tokens(data: TensorDict, spoils: Tensor) -> TensorDict:
    """Replace all tokens of some sequences by the first token of another one, whose pass is finite.

    The activations of a sequence that are NaN make the gradient of every weight NaN, whatever the coefficient: 0 * NaN.
    A repeated token has the same activations at each position, because causal attention averages equal values.

    Args:
        data: this data-parallel rank's b sequences.
        spoils: [b] bool: sequences without a finite log-prob or gradient, and with a coefficient of 0.
    """
    if not spoils.any():
        return data
    ids, offsets = data["input_ids"].values(), data["input_ids"].offsets()
    spoils = spoils.to(ids.device)
    harmless = ids[offsets[int((~spoils).int().argmax())]]
    data = data.copy()
    data["input_ids"] = torch.nested.nested_tensor_from_jagged(
        torch.where(spoils.repeat_interleave(offsets.diff()), harmless, ids), offsets
    )
    return data
