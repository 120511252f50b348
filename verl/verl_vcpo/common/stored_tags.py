"""Tags of chosen keys in TransferQueue.

`tq.kv_list` sends the tags of all keys of a partition: seconds at the 140,000 keys of a large run, at every poll.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import transfer_queue as tq
from tensordict import TensorDict

Tag = dict[str, Any]


@dataclass(frozen=True)
class Failure:
    """The reason why a prompt was not sampled."""

    reason: str
    """The reason in one line."""
    final: bool = False
    """True: another attempt must not be made, because it would harm the samplers."""


def prompt_of(key: str) -> str:
    """Return the uid of the prompt whose trajectory is stored under `key`: {uid}_{session}_{index}, or the uid."""
    return key.split("_")[0]


def session_of(key: str) -> str:
    """Return {uid}_{session}, which all trajectories of a session share, of the key {uid}_{session}_{index}."""
    return key.rpartition("_")[0]


def tags_of(keys: list[str], partition_id: str) -> dict[str, Tag]:
    """Return the tags of the stored ones among `keys`, in the order of `keys`."""
    if not keys:
        return {}
    client = tq.get_client()
    meta = client.kv_retrieve_meta(keys=keys, partition_id=partition_id, create=False)
    if meta.size == 0:
        return {}
    if meta.size < len(keys):
        keys = client.kv_retrieve_keys(global_indexes=meta.global_indexes, partition_id=partition_id)
    return dict(zip(keys, meta.custom_meta, strict=True))


def sessions_of(prompts: TensorDict, samples: int) -> dict[str, int]:
    """Return each prompt's number of sessions, by uid: verl's field `__rollout_n__`, or else `samples`."""
    uids = [str(uid) for uid in prompts["uid"]]
    if "__rollout_n__" not in prompts:
        return dict.fromkeys(uids, samples)
    return {uid: int(count) for uid, count in zip(uids, prompts["__rollout_n__"], strict=True)}


def trajectories_of(sessions: dict[str, int], partition_id: str) -> dict[str, Tag]:
    """Return the stored trajectories of prompts: key {uid}_{session}_{index} -> tag, prompt by prompt.

    Args:
        sessions: a prompt's uid -> the number of its sessions. A session has trajectories 0, 1, ...: one, or as many as
            the agent loop returned.
        partition_id: TransferQueue's partition.
    """
    found: dict[str, Tag] = {}
    keys, index = [f"{uid}_{session}" for uid, count in sessions.items() for session in range(count)], 0
    while keys:
        tags = tags_of([f"{key}_{index}" for key in keys], partition_id)
        found |= tags
        keys, index = [key.rsplit("_", 1)[0] for key in tags], index + 1
    return found


def clear_trajectories(sessions: dict[str, int], partition_id: str) -> None:
    """Remove the stored trajectories of prompts; arguments: see `trajectories_of`."""
    if stored := list(trajectories_of(sessions, partition_id)):
        tq.kv_clear(keys=stored, partition_id=partition_id)


class PromptTags:
    """The tags of a run's prompts; a tag is fetched again only while it can change."""

    def __init__(self) -> None:
        self._known: dict[str, Tag] = {}

    def add(self, uids: Iterable[str]) -> None:
        """Follow more prompts, which are about to be stored."""
        self._known.update((uid, {}) for uid in uids)

    def remove(self, uids: Iterable[str]) -> None:
        """Follow these prompts no more."""
        for uid in uids:
            self._known.pop(uid, None)

    def current(self, partition_id: str) -> dict[str, Tag]:
        """Return the current tags of all stored prompts. A finished prompt stays finished."""
        unsettled = [uid for uid, tag in self._known.items() if tag.get("status") != "finished"]
        tags = tags_of(unsettled, partition_id)
        self._known.update(tags)
        return {uid: tag for uid, tag in self._known.items() if tag}
