"""The global mini-batch, with one row per sequence: the same numbers on every rank of the trainer."""

import json
import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from vcpo.diagnostics import kl_k3
from vcpo.importance import sequence_log_weights
from vcpo.mismatch import Again, Span, jumps, squared_log_ratios
from verl_vcpo.actor.sequence_weights import sessions
from verl_vcpo.common.token_versions import token_versions
from verl_vcpo.common.truncated import TRUNCATED, Truncated

COMPUTED_AGAIN = "computed_again"
"""The field of a batch with log-probs that samplers computed again with the weights that the update begins with: JSON,
{session: log-probs of the first tokens of the response}, session = uid_number."""


@dataclass(frozen=True)
class MiniBatch:
    """B sequences of all data-parallel ranks, in rank order; a prompt's group may lie on several ranks."""

    log_weight: Tensor
    """[B] float64 log importance weights; NaN for `padding` and `dropped`, so that the estimator excludes them."""
    reward: Tensor
    """[B] float64 raw rewards."""
    group: Tensor
    """[B] integers, equal for the sequences of one prompt."""
    kl: Tensor
    """[B] float64 k3 sums over the response tokens, in nats."""
    tokens: Tensor
    """[B] float64 numbers of response tokens."""
    padding: Tensor
    """[B] bool: rows without a real sequence."""
    dropped: Tensor
    """[B] bool: sequences that are excluded by a response mask of zeros."""
    truncated: Tensor
    """[B] bool: responses that a limit ended."""
    masked: Tensor
    """[B] bool: truncated responses without a gradient in the update (`async.truncated=mask`)."""
    squared_norm: Tensor | None
    """[B] float64 ||g_i||^2; None where norms are not needed."""
    mine: slice
    """The rows that this data-parallel rank trains on."""
    squares: Tensor
    """[B] float64 sums of `vcpo.mismatch.squared_log_ratios`."""
    jump: Tensor
    """[B] float64 sums of `vcpo.mismatch.jumps`."""
    spans: list[list[Span]]
    """For each sequence, the tokens whose policy version is known."""
    lag: Tensor
    """[B] float64 updates since the oldest token; NaN where the version is unknown."""
    again: list[Again]
    """The tokens of some sequences whose log-probs were computed again."""

    @property
    def spoils(self) -> Tensor:
        """[B] bool: real sequences whose weight or norm is NaN or infinite: their pass may spoil any gradient."""
        finite = self.log_weight.isfinite() | self.padding | self.dropped
        return ~finite if self.squared_norm is None else ~(finite & self.squared_norm.isfinite())


@dataclass(frozen=True)
class SequencesBeforeForward:
    """The facts about B sequences that are known before a forward pass."""

    reward: Tensor
    """[B] float64 raw rewards."""
    group: Tensor
    """[B] integers, equal for the sequences of one prompt."""
    tokens: Tensor
    """[B] float64 numbers of response tokens."""
    length: Tensor
    """[B] numbers of all tokens."""
    usable: Tensor
    """[B] bool: false for padding, excluded sequences, and log-probs recorded as not finite."""
    masked: Tensor
    """[B] bool: truncated responses without a gradient in the update (`async.truncated=mask`)."""
    rank: Tensor
    """[B] data-parallel ranks."""
    mine: slice
    """The rows that this data-parallel rank trains on."""


def gather_sequences(data: TensorDict, data_parallel_rank: int) -> SequencesBeforeForward:
    """Gather on all ranks the facts known before a forward pass. Collective over the whole trainer.

    Raises:
        RuntimeError: data-parallel ranks with different numbers of sequences.
    """
    fields = data.select("rollout_log_probs", "response_mask", "rm_scores").to_padded_tensor().cpu()
    mask = fields["response_mask"].bool()
    uids = [str(uid) for uid in tu.get(data, "uid")]
    finite = torch.where(mask, fields["rollout_log_probs"], 0.0).isfinite().all(dim=-1)
    usable = finite & ~_taken_out(mask.sum(dim=-1), data["response_mask"].offsets().diff().cpu())
    rows = {
        "rank": data_parallel_rank,
        "uid": uids,
        "reward": fields["rm_scores"].double().sum(dim=-1).tolist(),
        "tokens": mask.sum(dim=-1).tolist(),
        "length": data["input_ids"].offsets().diff().tolist(),
        "usable": [ok and not _is_padding(uid) for ok, uid in zip(usable.tolist(), uids, strict=True)],
        "truncated": _truncated(data),
    }
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, rows)
    by_rank = {part["rank"]: part for part in gathered}
    ranks = [by_rank[rank] for rank in sorted(by_rank)]
    _check_sizes(ranks, equal=True)
    return SequencesBeforeForward(
        reward=_column(ranks, "reward", torch.float64),
        group=numbered([uid for part in ranks for uid in part["uid"]]),
        tokens=_column(ranks, "tokens", torch.float64),
        length=_column(ranks, "length", torch.int64),
        usable=_column(ranks, "usable", torch.bool),
        masked=_column(ranks, "truncated", torch.bool) & masks_truncated(data),
        rank=torch.arange(len(ranks)).repeat_interleave(len(data)),
        mine=slice(data_parallel_rank * len(data), (data_parallel_rank + 1) * len(data)),
    )


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


def _column(ranks: list[dict[str, Any]], name: str, dtype: torch.dtype) -> Tensor:
    return torch.tensor([x for part in ranks for x in part[name]], dtype=dtype)


def numbered(names: list[Any]) -> Tensor:
    """Return [B] integers, equal for equal names: 0, 1, ... in the order in which the names appear."""
    number = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([number[name] for name in names])


def _check_sizes(ranks: list[dict[str, Any]], equal: bool) -> list[int]:
    sizes = [len(part["uid"]) for part in ranks]
    if equal and len(set(sizes)) != 1:
        raise RuntimeError(f"data-parallel ranks hold {sizes} sequences, not all the same")
    return sizes


def _is_padding(uid: str) -> bool:
    return uid.startswith("pad")  # verl/trainer/ppo/padding_utils.py; a prompt's uid is a UUID, hexadecimal


def _taken_out(tokens: Tensor, length: Tensor) -> Tensor:
    """Return [B] bool: all tokens are masked. A response of 0 tokens is another case: it has importance weight 1."""
    return (tokens == 0) & (length > 0)


def _truncated(data: TensorDict) -> list[bool]:
    """Return which responses are truncated; padding has the `extra_fields` of another sequence."""
    if "extra_fields" not in data:
        return [False] * len(data)
    fields = zip(tu.get(data, "extra_fields"), map(str, tu.get(data, "uid")), strict=True)
    return [bool(extra.get(TRUNCATED)) and not _is_padding(uid) for extra, uid in fields]


def masks_truncated(data: TensorDict) -> bool:
    """Return True where truncated responses of an update have no gradient, but a part in baselines."""
    return tu.get_non_tensor_data(data, key=TRUNCATED, default=None) == Truncated.MASK


def gather_mini_batch(
    data: TensorDict,
    data_parallel_rank: int,
    log_prob: Tensor | None,
    squared_norm: Tensor | None,
    *,
    equal: bool = True,
) -> MiniBatch:
    """Gather all sequences on all ranks; one model-parallel rank of each data-parallel rank has the log-probs.

    Collective over the whole trainer. All ranks get the same numbers, and therefore take the same step.

    Args:
        data: this data-parallel rank's b sequences: `uid`, `rollout_log_probs`, `response_mask`, `rm_scores`; and,
            where versions are known, `extra_fields` and the trainer's `policy_version`.
        data_parallel_rank: d.
        log_prob: [b, T] log-probs of the response tokens under the current policy, on exactly one model-parallel rank
            of each data-parallel rank (the first of the last pipeline stage); None on the others.
        squared_norm: [D, b] this rank's part of ||g_i||^2 of all sequences, or None (then on all ranks).
        equal: whether all data-parallel ranks must have the same number of sequences.

    Raises:
        RuntimeError: data-parallel ranks with different numbers of sequences.
    """
    rows = None if log_prob is None else {"rank": data_parallel_rank, **_rows(data, log_prob.cpu())}
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, rows)
    ranks = sorted((part for part in gathered if part is not None), key=lambda part: part["rank"])
    sizes = _check_sizes(ranks, equal)
    if squared_norm is not None:
        dist.all_reduce(squared_norm)
        squared_norm = torch.cat([row[:size] for row, size in zip(squared_norm.cpu(), sizes, strict=True)])

    uids = [uid for part in ranks for uid in part["uid"]]
    padding = torch.tensor([_is_padding(uid) for uid in uids])
    names = ("log_weight", "reward", "kl", "tokens", "length", "squares", "jump", "lag")
    columns = {name: _column(ranks, name, torch.float64) for name in names}
    dropped = _taken_out(columns["tokens"], columns["length"]) & ~padding
    truncated = _column(ranks, "truncated", torch.bool)
    begins = [sum(sizes[:rank]) for rank in range(len(sizes))]
    start = begins[data_parallel_rank]
    return MiniBatch(
        log_weight=columns["log_weight"].masked_fill(padding | dropped, torch.nan),
        reward=columns["reward"],
        group=numbered(uids),
        kl=columns["kl"],
        tokens=columns["tokens"],
        padding=padding,
        dropped=dropped,
        truncated=truncated,
        masked=truncated & masks_truncated(data),
        squared_norm=squared_norm,
        mine=slice(start, start + sizes[data_parallel_rank]),
        squares=columns["squares"],
        jump=columns["jump"],
        spans=[spans for part in ranks for spans in part["spans"]],
        lag=columns["lag"],
        again=[(before + row, *of) for before, part in zip(begins, ranks, strict=True) for row, *of in part["again"]],
    )


def _rows(data: TensorDict, log_prob: Tensor) -> dict[str, list[Any]]:
    """Return the numbers about these sequences that all ranks need: a list of b values per name."""
    fields = data.select("rollout_log_probs", "response_mask", "rm_scores").to_padded_tensor().cpu()
    mask = fields["response_mask"].bool()
    log_prob = torch.nn.functional.pad(log_prob, (0, max(0, mask.shape[1] - log_prob.shape[1])))[:, : mask.shape[1]]
    squares = squared_log_ratios(log_prob, fields["rollout_log_probs"], mask)
    return {
        "uid": [str(uid) for uid in tu.get(data, "uid")],
        "log_weight": sequence_log_weights(log_prob, fields["rollout_log_probs"], mask).tolist(),
        "reward": fields["rm_scores"].double().sum(dim=-1).tolist(),
        "kl": kl_k3(log_prob, fields["rollout_log_probs"], mask).tolist(),
        "tokens": mask.sum(dim=-1).tolist(),
        "length": data["response_mask"].offsets().diff().tolist(),
        "truncated": _truncated(data),
        "squares": squares.sum(dim=-1).tolist(),
        "jump": jumps(log_prob, fields["rollout_log_probs"], mask).tolist(),
        "spans": _spans(data, squares, mask),
        "lag": _lags(data),
        "again": _again(data, log_prob, squares, mask),
    }


def _again(data: TensorDict, log_prob: Tensor, squares: Tensor, mask: Tensor) -> list[Again]:
    """Return the tokens of the sequences whose log-probs were computed again: the fresh ones apart from the others.

    Args:
        data: b sequences.
        log_prob: [b, T] under the policy that the update begins with.
        squares: [b, T] squared log-ratios to the log-probs as sampled.
        mask: [b, T] true on the tokens that the policy has sampled.
    """
    known = json.loads(tu.get_non_tensor_data(data, key=COMPUTED_AGAIN, default="{}"))
    found = []
    for row, (uid, number) in enumerate(sessions(data) if known else ()):  # agent loops have made the sequences
        if (answer := known.get(f"{uid}_{number}")) is None:
            continue
        of_sampler = torch.tensor(answer, dtype=torch.float64)
        asked = slice(0, len(of_sampler))
        again = squared_log_ratios(log_prob[row, asked], of_sampler, mask[row, asked])
        lags = _lags_of_tokens(data, row, mask[row])[asked]
        for is_fresh, chosen in ((True, lags == 0), (False, lags != 0)):
            chosen &= mask[row, asked]
            if chosen.any():
                sums = squares[row, asked][chosen].sum().item(), again[chosen].sum().item()
                found.append((row, is_fresh, int(chosen.sum()), *sums))
    return found


def _lags_of_tokens(data: TensorDict, row: int, mask: Tensor) -> Tensor:
    """Return [T] the lag of each sampled token of a sequence; -1 where it is unknown."""
    lags = torch.full(mask.shape, -1)
    version, fields = _versions(data)
    if version is not None:
        runs = token_versions(fields[row], int(mask.sum()))
        of_runs = torch.tensor([-1 if run is None else version - run for run, _ in runs])
        lags[mask] = of_runs.repeat_interleave(torch.tensor([tokens for _, tokens in runs]))
    return lags


def _versions(data: TensorDict) -> tuple[int | None, list[dict[str, Any]]]:
    """Return the trainer's policy version, and each sequence's fields with its own; (None, []) where one is missing."""
    version, fields = tu.get_non_tensor_data(data, key="policy_version", default=None), tu.get(data, "extra_fields")
    return (None, []) if version is None or fields is None else (version, fields)


def _lags(data: TensorDict) -> list[float]:
    """Return each sequence's updates between the version of its oldest token and the trainer's; NaN if unknown."""
    version, fields = _versions(data)
    if version is None:
        return [math.nan] * len(data)
    oldest = (of_sequence.get("min_global_steps") for of_sequence in fields)
    return [math.nan if first is None else float(version - first) for first in oldest]


def _spans(data: TensorDict, squares: Tensor, mask: Tensor) -> list[list[Span]]:
    """Return each sequence's response tokens by the lag of the version that sampled them; empty where it is unknown.

    Args:
        data: b sequences.
        squares: [b, T] squared log-ratios.
        mask: [b, T] true on the tokens that the policy has sampled.
    """
    version, fields = _versions(data)
    if version is None:
        return [[] for _ in range(len(data))]
    spans = []
    for of_sequence, row, sampled in zip(fields, squares, mask, strict=True):
        runs = token_versions(of_sequence, int(sampled.sum()))
        parts = row[sampled].split([tokens for _, tokens in runs])
        known = ((run, part) for (run, _), part in zip(runs, parts, strict=True) if run is not None)
        spans.append([(version - run, len(part), part.sum().item()) for run, part in known])
    return spans
