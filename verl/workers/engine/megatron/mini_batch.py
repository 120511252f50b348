"""The global mini-batch as VCPO sees it: one row per sequence, the same on every data-parallel rank."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from vcpo.diagnostics import kl_k3
from vcpo.importance import sequence_log_weights


@dataclass(frozen=True)
class MiniBatch:
    """B sequences of all data-parallel ranks, in rank order; a prompt's group may lie on several ranks."""

    log_weight: Tensor
    """[B] float64 log importance weights; NaN for the rows that verl pads a batch with."""
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
    squared_norm: Tensor | None
    """[B] float64 ||g_i||^2, where it was measured."""
    mine: slice
    """This rank's rows."""


def _is_padding(uid: str) -> bool:
    return uid.startswith("pad")  # verl/trainer/ppo/padding_utils.py; a prompt's uid is a UUID, hexadecimal


def gather_mini_batch(
    data: TensorDict, log_prob: Tensor, squared_norm: Tensor | None, process_group: dist.ProcessGroup
) -> MiniBatch:
    """Put every data-parallel rank's sequences together.

    Args:
        data: this rank's sequences, with `uid`, `rollout_log_probs`, `response_mask`, `rm_scores`.
        log_prob: [b, T] log-probs of their response tokens under the current policy.
        squared_norm: [b] ||g_i||^2, or None.
        process_group: the data-parallel group.
    """
    fields = data.select("rollout_log_probs", "response_mask", "rm_scores").to_padded_tensor()
    mask = fields["response_mask"].bool()
    log_prob = log_prob[:, : mask.shape[1]]
    local: dict[str, Any] = {
        "uid": [str(uid) for uid in tu.get(data, "uid")],
        "log_weight": sequence_log_weights(log_prob, fields["rollout_log_probs"], mask).tolist(),
        "reward": fields["rm_scores"].double().sum(dim=-1).tolist(),
        "kl": kl_k3(log_prob, fields["rollout_log_probs"], mask).tolist(),
        "tokens": mask.sum(dim=-1).tolist(),
        "squared_norm": [] if squared_norm is None else squared_norm.tolist(),
    }
    ranks: list[dict[str, Any]] = [{} for _ in range(dist.get_world_size(process_group))]
    dist.all_gather_object(ranks, local, group=process_group)

    uids = [uid for rank in ranks for uid in rank["uid"]]
    number = {uid: i for i, uid in enumerate(dict.fromkeys(uids))}
    padding = torch.tensor([_is_padding(uid) for uid in uids])
    rows = {
        name: torch.tensor([x for rank in ranks for x in rank[name]], dtype=torch.float64)
        for name in ("log_weight", "reward", "kl", "tokens", "squared_norm")
    }
    start = sum(len(rank["uid"]) for rank in ranks[: dist.get_rank(process_group)])
    return MiniBatch(
        log_weight=rows["log_weight"].masked_fill(padding, torch.nan),
        reward=rows["reward"],
        group=torch.tensor([number[uid] for uid in uids]),
        kl=rows["kl"],
        tokens=rows["tokens"],
        padding=padding,
        squared_norm=None if squared_norm is None else rows["squared_norm"],
        mine=slice(start, start + len(local["uid"])),
    )
