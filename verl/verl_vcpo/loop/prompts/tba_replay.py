"""TBA's replay buffer in the lag-k trainer: remembered prompt groups in TransferQueue (`GroupReplay` draws them).

The groups lie in the partition "replay" of TransferQueue, which a checkpoint contains. A group that is trained on again
gets a new uid, and keeps its log-probs and its policy version.
"""

import uuid
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu

from vcpo.stabilizers.group_replay import GroupReplay
from verl_vcpo.common.stored_tags import prompt_of

PARTITION = "replay"
_ORDER, _REWARD = "remembered", "mean_reward"


class TBAReplay:
    """A memory of prompt groups: exchanges some groups of a batch for remembered ones, and remembers the whole batch.

    Args:
        seed, of_replay: arguments of `GroupReplay`.
    """

    def __init__(self, seed: int, **of_replay: Any) -> None:
        self._replay: GroupReplay[str] = GroupReplay(seed, **of_replay)  # of uids
        self._count = 0

    def resume(self) -> None:
        """Take over the groups that a checkpoint has brought back into TransferQueue."""
        tags = (tq.kv_list(PARTITION) or {}).get(PARTITION, {})
        groups = {prompt_of(key): (tag[_ORDER], tag[_REWARD]) for key, tag in tags.items()}
        for uid, (order, reward) in sorted(groups.items(), key=lambda item: item[1]):
            self._replay.remember([uid], [reward])
            self._count = order + 1

    def mix(self, batch: KVBatchMeta) -> KVBatchMeta:
        """Return the batch to train on, with as many groups as `batch`: some groups of `batch`, and remembered ones."""
        fresh: dict[str, list[int]] = {}
        for row, key in enumerate(batch.keys):
            fresh.setdefault(prompt_of(key), []).append(row)
        drawn = self._replay.draw(len(fresh))
        forgotten = self._remember(batch, fresh)
        stored = tq.kv_list(PARTITION)[PARTITION]

        keys: list[str] = []
        tags: list[dict[str, Any]] = []
        for rows, uid in zip(fresh.values(), drawn, strict=True):
            own = [batch.keys[row] for row in rows]
            if uid is None:
                keys += own
                tags += [batch.tags[row] for row in rows]
            else:
                back = self._bring_back(uid, stored, batch.partition_id)
                keys += back.keys
                tags += back.tags
                tq.kv_clear(keys=own, partition_id=batch.partition_id)
        if forgotten:  # after the loop above, which may have copied one of the forgotten groups
            tq.kv_clear(keys=[key for key in stored if prompt_of(key) in forgotten], partition_id=PARTITION)
        return KVBatchMeta(keys, tags, batch.partition_id, batch.fields, batch.extra_info)

    def _remember(self, batch: KVBatchMeta, fresh: dict[str, list[int]]) -> set[str]:
        """Store the groups of the batch. Return the uids of the groups to forget instead, which are still stored."""
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id)
        rewards = [float(row.sum()) for row in data["rm_scores"].unbind()]
        means = {uid: sum(rewards[row] for row in rows) / len(rows) for uid, rows in fresh.items()}
        tags = [
            tag | {_ORDER: self._count, _REWARD: means[prompt_of(key)]}
            for key, tag in zip(batch.keys, batch.tags, strict=True)
        ]
        tq.kv_batch_put(keys=batch.keys, partition_id=PARTITION, fields=data, tags=tags)
        self._count += 1
        return set(self._replay.remember(list(fresh), means.values()))

    def _bring_back(self, uid: str, stored: dict[str, dict[str, Any]], partition_id: str | None) -> KVBatchMeta:
        """Copy a remembered group, whose tags are in `stored`, into the trainer's partition, under a new uid."""
        keys = sorted(key for key in stored if prompt_of(key) == uid)
        data = tq.kv_batch_get(keys=keys, partition_id=PARTITION)
        new = str(uuid.uuid4())
        tu.assign_non_tensor_stack(data, "uid", [new] * len(keys))
        new_keys = [new + key.removeprefix(uid) for key in keys]
        tags = [{name: value for name, value in stored[key].items() if name not in (_ORDER, _REWARD)} for key in keys]
        tq.kv_batch_put(keys=new_keys, partition_id=partition_id, fields=data, tags=tags)
        return KVBatchMeta(new_keys, tags, partition_id)
