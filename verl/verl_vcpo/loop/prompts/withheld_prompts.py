"""The prompts of a checkpoint beyond those that the resumed run's settings allow in flight.

A checkpoint holds the prompts that were in flight: `async.lag` batches. With a smaller lag, or smaller batches, these
are more than the bound can keep. The surplus is withheld in a partition of TransferQueue, which checkpoints store too,
and is submitted before new prompts of the data: no prompt is lost, and the order of the prompts stays.
"""

from collections.abc import Callable

import transfer_queue as tq
from tensordict import NonTensorData, TensorDict

_PARTITION = "withheld"
_POSITION = "position"


def count() -> int:
    """Return the number of withheld prompts."""
    return len(_positions())


def withhold(prompts: TensorDict) -> None:
    """Put prompts, with the fields of a submitted prompt, behind those that are withheld already."""
    first = max(_positions().values(), default=-1) + 1
    fields = prompts.select(
        *[name for name in sorted(prompts.keys()) if not isinstance(prompts.get(name), NonTensorData)]
    )
    tags = [
        {"is_prompt": True, "status": "pending", "global_steps": 0, _POSITION: first + i} for i in range(len(prompts))
    ]
    tq.kv_batch_put(keys=[str(uid) for uid in prompts["uid"]], partition_id=_PARTITION, tags=tags, fields=fields)


def next_batch(size: int, fetch: Callable[[], TensorDict]) -> TensorDict:
    """Return the next `size` prompts to submit: withheld ones first, then prompts of the data; withhold the surplus.

    Args:
        fetch: a function that takes some prompts, at least one, from the data.
    """
    while count() < size:
        withhold(fetch())
    positions = _positions()
    uids = sorted(positions, key=positions.__getitem__)[:size]
    prompts = tq.kv_batch_get(keys=uids, partition_id=_PARTITION)
    tq.kv_clear(keys=uids, partition_id=_PARTITION)
    return prompts


def _positions() -> dict[str, int]:
    tags = (tq.kv_list(_PARTITION) or {}).get(_PARTITION, {})
    return {uid: tag[_POSITION] for uid, tag in tags.items()}
