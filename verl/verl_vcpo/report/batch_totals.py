"""verl's metrics of a batch from a few numbers per trajectory: the tokens of the batch stay in TransferQueue.

Extends verl/trainer/ppo/v1/trainer_base.py. In each step verl's trainer fetches every token of a batch into the driver
and pads all trajectories to one length, for advantages and for metrics that are sums and lengths: 190 kB for a
trajectory of 8,000 tokens. VCPO's engine computes its own advantages, lengths are in TransferQueue's tags, and the
agent-loop workers store the reward beside the tokens.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import transfer_queue as tq
from tensordict import TensorDict
from torch import Tensor
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import trainer_base

from verl_vcpo.report.trajectory_metrics import RAW_REWARD, FewFields

_OF_ADVANTAGES = ("critic/advantages/", "critic/returns/")


class _Lengths(NamedTuple):
    """A stand-in for a nested tensor of tokens: verl's metrics read only the lengths of its rows."""

    of_rows: Tensor

    def offsets(self) -> Tensor:
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.of_rows.cumsum(0)])

    def placeholder(self) -> Tensor:
        """Return [B, longest row] without memory of its own: verl's metrics read the width."""
        return torch.zeros(1, 1, dtype=torch.bool).expand(len(self.of_rows), int(self.of_rows.max()))


class _Totals(dict[str, Any]):
    """A stand-in for the data that verl's metrics fetch: each trajectory is one token with the sum of all tokens."""

    def to_padded_tensor(self) -> TensorDict:
        rewards = self["rm_scores"]
        nothing = torch.zeros_like(rewards)
        of_tokens = {name: self[name].placeholder() for name in ("prompts", "responses")}
        sums = {"rm_scores": rewards, "response_mask": nothing + 1, "advantages": nothing, "returns": nothing}
        return TensorDict({**of_tokens, **sums}, batch_size=len(rewards))


@contextlib.contextmanager
def in_place_of_tokens(batch: KVBatchMeta, stored: FewFields, metrics: dict[str, Any]) -> Iterator[None]:
    """Have verl's `_compute_metrics` fetch no tokens of `batch` in the block; drop advantages and returns of `metrics`.

    `stored` are the fields beside the batch's tokens.
    """
    upstream = trainer_base.get_metric_data_with_optional_routed_experts
    trainer_base.get_metric_data_with_optional_routed_experts = lambda **_: _totals(batch, stored)
    try:
        yield
    finally:
        trainer_base.get_metric_data_with_optional_routed_experts = upstream
    for name in [name for name in metrics if name.startswith(_OF_ADVANTAGES)]:
        del metrics[name]


def _totals(batch: KVBatchMeta, stored: FewFields) -> _Totals:
    turns, rewards = torch.zeros(len(batch), dtype=torch.int64), torch.zeros(len(batch), 1)
    turns[stored.rows] = torch.tensor(stored.num_turns)
    rewards[stored.rows, 0] = _rewards(batch, stored)
    return _Totals(
        num_turns=turns,
        rm_scores=rewards,
        prompts=_Lengths(torch.tensor([tag["prompt_len"] for tag in batch.tags])),
        responses=_Lengths(torch.tensor([tag["response_len"] for tag in batch.tags])),
    )


def _rewards(batch: KVBatchMeta, stored: FewFields) -> Tensor:
    """Return [len(stored.rows)], the stored rewards; sums of `rm_scores` if one is missing, as a reward model's are."""
    known = [fields[RAW_REWARD] for fields in stored.extra_fields if fields.get(RAW_REWARD) is not None]
    if len(known) == len(stored.rows):
        return torch.tensor(known, dtype=torch.float32)
    keys = [batch.keys[i] for i in stored.rows]
    scores = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["rm_scores"])["rm_scores"]
    return torch.stack([row.sum() for row in scores.unbind()])
