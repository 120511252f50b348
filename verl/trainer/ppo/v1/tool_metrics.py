"""What tools were used for in a batch: from the counts that an agent loop leaves in `extra_fields["tool_use"]`."""

from collections.abc import Mapping
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu

PREFIX = "tool_use"


def tool_metrics(batch: KVBatchMeta) -> dict[str, float]:
    """Sums over the batch's trajectories, and per trajectory `tool_use/calls/mean`; nothing where no tool was offered.

    Args:
        batch: the trained one, still stored.
    """
    keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]
    stored = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["extra_fields"])
    return summed([fields.get(PREFIX) for fields in tu.get(stored, "extra_fields")])


def summed(counts: list[Mapping[str, Any] | None]) -> dict[str, float]:
    """The metrics of trajectories with these counts; None for one without tools."""
    used = [count for count in counts if count]
    if not used:
        return {}
    metrics = {f"{PREFIX}/{name}": sum(count[name] for count in used) for name in used[0]}
    return metrics | {f"{PREFIX}/calls/mean": metrics[f"{PREFIX}/calls"] / len(used)}
