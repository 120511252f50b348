"""A stand-in for TransferQueue in this process."""

from typing import Any

from transfer_queue import BatchMeta
from verl.utils import tensordict_utils as tu


class MemoryQueue:
    """A queue in memory with TransferQueue's key-value calls."""

    def __init__(self) -> None:
        self.tags: dict[str, dict[str, dict[str, Any]]] = {"train": {}}
        self._fields: dict[tuple[str, str], Any] = {}

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        tags = self.tags if partition_id is None else {partition_id: self.tags.get(partition_id, {})}
        return {partition: {k: dict(tag) for k, tag in keys.items()} for partition, keys in tags.items()}

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        for key in keys:
            self.tags[partition_id].pop(key, None)
            self._fields.pop((partition_id, key), None)

    def kv_batch_put(
        self, keys: list[str], partition_id: str, fields: Any = None, tags: list[dict[str, Any]] | None = None
    ) -> None:
        for i, key in enumerate(keys):
            if tags is not None:
                self.tags.setdefault(partition_id, {}).setdefault(key, {}).update(tags[i])
            if fields is not None:
                self._fields[partition_id, key] = fields[i : i + 1]

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str] | None = None) -> Any:
        return tu.concat_tensordict([self._fields[partition_id, key] for key in keys])

    def get_client(self) -> "MemoryQueue":
        return self

    def kv_retrieve_meta(self, keys: list[str], partition_id: str, create: bool) -> BatchMeta:
        """Return the metadata of the stored ones among `keys`, with the key itself in place of an index."""
        stored = [key for key in keys if key in self.tags.get(partition_id, {})]
        tags = [dict(self.tags[partition_id][key]) for key in stored]
        return BatchMeta(stored, [partition_id] * len(stored), custom_meta=tags)

    def kv_retrieve_keys(self, global_indexes: list[str], partition_id: str) -> list[str]:
        return global_indexes

    def copy(self) -> "MemoryQueue":
        """Return a copy, as a checkpoint keeps it."""
        copy = MemoryQueue()
        copy.tags, copy._fields = self.kv_list(), dict(self._fields)
        return copy

    def prompts(self) -> set[str]:
        """Return the uids of all prompts, also of withheld ones."""
        return {uid for tags in self.tags.values() for uid, tag in tags.items() if tag.get("is_prompt")}
