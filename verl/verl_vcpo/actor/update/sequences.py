"""The sequences of a mini-batch, from their fields in verl's batch to the rows that every rank has.

An update makes one collective of facts, before any forward pass, and one of measured columns after each pass.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id

from vcpo.diagnostics import kl_k3
from vcpo.importance import log_ratios
from vcpo.mismatch import jumps, squared_log_ratios
from verl_vcpo.actor.update.mini_batch import Facts, MiniBatch
from verl_vcpo.actor.update.sequence_weights import sessions
from verl_vcpo.common.token_versions import token_versions
from verl_vcpo.common.truncated import TRUNCATED, Truncated

COMPUTED_AGAIN = "computed_again"
"""The field of a batch with log-probs that samplers computed again with the weights that the update begins with: JSON,
{session: log-probs of the first tokens of the response}, session = uid_number."""


class Sequences:
    """The b sequences of this data-parallel rank, and the facts of all B = D b. Collective over `group`.

    All ranks get the same facts and the same measured rows, and therefore take the same step.

    Args:
        data: this data-parallel rank's sequences: `uid`, `input_ids`, `rollout_log_probs`, `response_mask`,
            `rm_scores`; and, where versions are known, `extra_fields` and the trainer's `policy_version`.
        group: the D data-parallel ranks.

    Raises:
        RuntimeError: other numbers of sequences than verl has told the ranks (`global_token_num`).
    """

    def __init__(self, data: TensorDict, group: Any) -> None:
        self.rank, self.ranks, self.size = dist.get_rank(group), dist.get_world_size(group), len(data)
        padded = data.select("rollout_log_probs", "response_mask", "rm_scores").to_padded_tensor().cpu()
        self._mask = padded["response_mask"].bool()
        """[b, T] true on the tokens that the policy has sampled."""
        self._of_sampler = padded["rollout_log_probs"]
        """[b, T] log-probs as sampled."""
        self._fresh = _fresh(data, self._mask)
        """[b, T] true on the tokens that the trainer's own version sampled."""
        self._again = _again(data)
        self.facts = self._gathered(data, padded["rm_scores"].double().sum(dim=-1), group)

    def _gathered(self, data: TensorDict, reward: Tensor, group: Any) -> Facts:
        of_all = tu.get_non_tensor_data(data, key="global_token_num", default=None)  # verl's: tokens of all sequences
        if of_all is not None and len(of_all) != self.ranks * self.size:
            raise RuntimeError(
                f"{len(of_all)} sequences on {self.ranks} data-parallel ranks, and {self.size} on rank {self.rank}: "
                "not the same on all"
            )
        uids, tokens = [str(uid) for uid in tu.get(data, "uid")], self._mask.sum(dim=-1)
        padding = torch.tensor([_is_padding(uid) for uid in uids])
        finite = torch.where(self._mask, self._of_sampler, 0.0).isfinite().all(dim=-1)
        # A response of 0 tokens is not excluded: it has importance weight 1.
        dropped = (tokens == 0) & (data["response_mask"].offsets().diff().cpu() > 0) & ~padding
        columns = [
            *torch.tensor([_digest(uid) for uid in uids]).unbind(dim=1),
            *(reward.view(torch.int64), _lags(data).view(torch.int64), tokens, self._fresh.sum(dim=-1)),
            *(data["input_ids"].offsets().diff().cpu(), padding, dropped, finite, _truncated(data) & ~padding),
        ]
        own = torch.stack([column.long() for column in columns], dim=1).to(get_device_id())
        of_ranks = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(of_ranks, own, group=group)
        high, low, reward, lag, tokens, fresh, length, *flags = torch.cat(of_ranks).cpu().unbind(dim=1)
        padding, dropped, recorded, truncated = (flag.bool() for flag in flags)
        return Facts(
            rank=torch.arange(self.ranks).repeat_interleave(self.size),
            group=numbered([*zip(high.tolist(), low.tolist(), strict=True)]),
            reward=reward.contiguous().view(torch.float64),
            tokens=tokens.double(),
            length=length,
            padding=padding,
            dropped=dropped,
            recorded=recorded,
            truncated=truncated,
            masked=truncated & masks_truncated(data),
            lag=lag.contiguous().view(torch.float64),
            fresh_tokens=fresh.double(),
        )

    @property
    def mine(self) -> slice:
        """The rows that this data-parallel rank trains on."""
        return slice(self.rank * self.size, (self.rank + 1) * self.size)

    def measured(
        self,
        log_prob: Tensor | None,
        squared_norm: Tensor | None = None,
        rows: Sequence[Sequence[int]] | None = None,
    ) -> MiniBatch:
        """Return n rows after their forward pass, rank after rank. Collective over the whole trainer.

        Args:
            log_prob: [r, T] log-probs of the response tokens of this data-parallel rank's rows under the current
                policy, on exactly one model-parallel rank of each data-parallel rank (the first of the last pipeline
                stage); None on the others.
            squared_norm: [n] this rank's part of ||g_i||^2, or None (then on all ranks).
            rows: for each data-parallel rank the numbers of its sequences; None: all.
        """
        chosen = [range(self.size)] * self.ranks if rows is None else rows
        first = sum(map(len, chosen[: self.rank]))
        columns = torch.zeros(sum(map(len, chosen)), _COLUMNS + 1, dtype=torch.float64)
        if log_prob is not None:
            own = list(chosen[self.rank])
            columns[first : first + len(own), :_COLUMNS] = self._columns(log_prob.cpu(), own)
        columns = columns.to(get_device_id())
        if squared_norm is not None:
            columns[:, _COLUMNS] = squared_norm
        dist.all_reduce(columns)
        log_weight, kl, squares, jump, fresh_squares, *again, norm = columns.cpu().unbind(dim=1)
        facts = self.facts.of(rows_in_mini_batch(chosen, self.size))
        return MiniBatch(
            **vars(facts),
            log_weight=log_weight.masked_fill(facts.padding | facts.dropped, torch.nan),
            kl=kl,
            squares=squares,
            jump=jump,
            fresh_squares=fresh_squares,
            again=torch.stack(again, dim=1).view(-1, 2, 3),
            squared_norm=None if squared_norm is None else norm,
        )

    def _columns(self, log_prob: Tensor, rows: list[int]) -> Tensor:
        """Return [r, columns] of these rows of this rank."""
        mask, of_sampler, fresh = self._mask[rows], self._of_sampler[rows], self._fresh[rows]
        width = mask.shape[1]
        log_prob = torch.nn.functional.pad(log_prob, (0, max(0, width - log_prob.shape[1])))[:, :width]
        log_ratio = log_ratios(log_prob, of_sampler, mask)
        squares = squared_log_ratios(log_ratio)
        again = torch.zeros(len(rows), 2, 3, dtype=torch.float64)
        for i, row in enumerate(rows):
            if (answer := self._again.get(row)) is not None:
                asked = slice(0, len(answer))
                squares_again = squared_log_ratios(log_ratios(log_prob[i, asked], answer, mask[i, asked]))
                for kind, chosen in enumerate((fresh[i, asked], ~fresh[i, asked])):
                    chosen = chosen & mask[i, asked]
                    sums = squares[i, asked][chosen].sum(), squares_again[chosen].sum()
                    again[i, kind] = torch.stack([chosen.sum().double(), *sums])
        columns = [
            log_ratio.sum(dim=-1),
            kl_k3(log_ratio),
            squares.sum(dim=-1),
            jumps(log_ratio),
            torch.stack([row[of_row].sum() for row, of_row in zip(squares, fresh, strict=True)]),
        ]
        return torch.cat([torch.stack(columns, dim=1), again.flatten(1)], dim=1)


_COLUMNS = 5 + 2 * 3
"""The columns that a forward pass measures: weight, KL divergence, squares, jump, fresh squares, and `again`."""


def rows_in_mini_batch(rows: Sequence[Sequence[int]], size: int) -> Tensor:
    """Return [n] rows of the global mini-batch, from each data-parallel rank's among its `size` sequences."""
    return torch.tensor([rank * size + row for rank, of_rank in enumerate(rows) for row in of_rank], dtype=torch.long)


def numbered(names: list[Any]) -> Tensor:
    """Return [B] integers, equal for equal names: 0, 1, ... in the order in which the names appear."""
    number = {name: i for i, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([number[name] for name in names])


def masks_truncated(data: TensorDict) -> bool:
    """Return True where truncated responses of an update have no gradient, but a part in baselines."""
    return tu.get_non_tensor_data(data, key=TRUNCATED, default=None) == Truncated.MASK


def _digest(uid: str) -> tuple[int, int]:
    """Return 128 bits of a prompt's uid, as two numbers of 64 bits: collectives carry numbers."""
    digest = hashlib.blake2b(uid.encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], signed=True), int.from_bytes(digest[8:], signed=True)


def _is_padding(uid: str) -> bool:
    return uid.startswith("pad")  # verl/trainer/ppo/padding_utils.py; a prompt's uid is a UUID, hexadecimal


def _truncated(data: TensorDict) -> Tensor:
    """Return [b] bool: responses that a limit ended; padding has the `extra_fields` of another sequence."""
    fields = tu.get(data, "extra_fields") if "extra_fields" in data else [{}] * len(data)
    return torch.tensor([bool(extra.get(TRUNCATED)) for extra in fields])


def _again(data: TensorDict) -> dict[int, Tensor]:
    """Return, by row, the log-probs of a response's first tokens that a sampler computed again."""
    known = json.loads(tu.get_non_tensor_data(data, key=COMPUTED_AGAIN, default="{}"))
    names = [f"{uid}_{number}" for uid, number in sessions(data)] if known else []  # agent loops have made them
    return {row: torch.tensor(known[name], dtype=torch.float64) for row, name in enumerate(names) if name in known}


def _versions(data: TensorDict) -> tuple[int | None, list[dict[str, Any]]]:
    """Return the trainer's policy version, and each sequence's fields with its own; (None, []) where one is missing."""
    version, fields = tu.get_non_tensor_data(data, key="policy_version", default=None), tu.get(data, "extra_fields")
    return (None, []) if version is None or fields is None else (version, fields)


def _lags(data: TensorDict) -> Tensor:
    """Return [b] float64 updates between the version of the oldest token and the trainer's; NaN if unknown."""
    version, fields = _versions(data)
    oldest = [of_sequence.get("min_global_steps") for of_sequence in fields] or [None] * len(data)
    known = [math.nan if version is None or first is None else version - first for first in oldest]
    return torch.tensor(known, dtype=torch.float64)


def _fresh(data: TensorDict, mask: Tensor) -> Tensor:
    """Return [b, T] bool: tokens that the trainer's own version sampled; none where versions are unknown."""
    fresh = torch.zeros_like(mask)
    version, fields = _versions(data)
    for row, (of_sequence, sampled) in enumerate(zip(fields, mask, strict=version is not None)):
        runs = token_versions(of_sequence, int(sampled.sum()))
        own = torch.tensor([run == version for run, _ in runs])
        fresh[row, sampled] = own.repeat_interleave(torch.tensor([tokens for _, tokens in runs]))
    return fresh
