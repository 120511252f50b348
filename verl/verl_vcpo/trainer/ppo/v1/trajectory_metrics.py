"""What a batch's trajectories tell besides their tokens: what tools were used for, and which rewards met a limit."""

from collections.abc import Mapping
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu

TOOLS = "tool_use"
OVER_LIMIT = "over_limit"
"""What a reward returns beside its score: 1 where computing it was cut short by a limit, else 0."""


def trajectory_metrics(batch: KVBatchMeta) -> dict[str, float]:
    """`tool_use/*` where tools were offered, and `reward/over_limit` where the reward has a limit of its own.

    Args:
        batch: the trained one, still stored.
    """
    keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]
    stored = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
    told = list(tu.get(stored, "extra_fields"))
    return tool_counts([fields.get(TOOLS) for fields in told]) | over_limit([f.get("reward_extra_info") for f in told])


def tool_counts(counts: list[Mapping[str, Any] | None]) -> dict[str, float]:
    """Sums over trajectories with these counts (None: without tools), and per trajectory `tool_use/calls/mean`.

    Args:
        counts: what the agent loop leaves in `extra_fields["tool_use"]`.
    """
    used = [count for count in counts if count]
    if not used:
        return {}
    metrics = {f"{TOOLS}/{name}": sum(count[name] for count in used) for name in used[0]}
    return metrics | {f"{TOOLS}/calls/mean": metrics[f"{TOOLS}/calls"] / len(used)}


def over_limit(told: list[Mapping[str, Any] | None]) -> dict[str, float]:
    """How many of these rewards met their limit; nothing where none of them says.

    Args:
        told: what the rewards returned besides their scores.
    """
    says = [info[OVER_LIMIT] for info in told if info and OVER_LIMIT in info]
    return {f"reward/{OVER_LIMIT}": sum(says)} if says else {}
