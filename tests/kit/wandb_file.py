"""A reader of the file that W&B writes for an offline run; W&B's package has no reader."""

import json
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_HEADER, _BLOCK, _CHUNK = 7, 32768, struct.Struct("<IHB")  # a chunk's checksum, length, kind
_FULL, _FIRST, _LAST = 1, 2, 4


class OfflineRun(NamedTuple):
    """A run: `history`, step -> name -> value (a path for a table), `alerts`, and the folder `files` of tables."""

    history: dict[int, dict[str, Any]]
    alerts: list[tuple[str, str]]
    files: Path

    def table(self, step: int, name: str) -> list[dict[str, Any]]:
        """Return the rows of a table that was logged at `step`."""
        table = json.loads((self.files / self.history[step][f"{name}/path"]).read_text())
        return [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]


def offline_run(folder: Path) -> OfflineRun:
    """Read the one run below `folder`/wandb, which has ended."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    history: dict[int, dict[str, Any]] = defaultdict(dict)
    alerts = []
    for data in _records(file.read_bytes()):
        record = Record.FromString(data)
        if record.HasField("history"):
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            history[items["_step"]] |= items
        if record.HasField("alert"):
            alerts.append((record.alert.title, record.alert.text))
    return OfflineRun(dict(history), alerts, file.parent / "files")


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records of LevelDB's log format after W&B's own header: no chunk of a record crosses a block."""
    position, record = _HEADER, b""
    while position + _CHUNK.size <= len(data):
        if _BLOCK - position % _BLOCK < _CHUNK.size:
            position += _BLOCK - position % _BLOCK
            continue
        _, length, kind = _CHUNK.unpack_from(data, position)
        position += _CHUNK.size
        record = (b"" if kind in (_FULL, _FIRST) else record) + data[position : position + length]
        position += length
        if kind in (_FULL, _LAST):
            yield record
