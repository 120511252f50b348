"""A file of rows, as verl reads it: parquet, JSON lines, or a JSON list."""

import glob
import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet as pq

from recipe.fully_async_policy.settings.errors import SettingError, first_line

SUFFIXES = (".parquet", ".json", ".jsonl")
_PREPARE = "make it with `python -m scripts.prepare_data`, or give another file"
_BATCH = 8192


def expanded(files: str | list[str] | None) -> str | list[str] | None:
    """The files that a setting names: globs and ~ replaced by the files that they match, where they match any."""
    if files is None or isinstance(files, str):
        found = _matches(files)
        return files if not found else found[0] if len(found) == 1 else found
    return [match for file in files for match in _matches(file) or [file]]


def _matches(pattern: str | None) -> list[str]:
    path = str(Path(str(pattern)).expanduser()) if str(pattern).startswith("~") else str(pattern)
    return [path] if Path(path).exists() else sorted(glob.glob(path, recursive=True))


class DataFile:
    """One file of `setting`. Refused is one that is not there, has no rows, or that verl does not read."""

    def __init__(self, setting: str, path: str | None) -> None:
        self.name = f"{setting}={path}"
        if not path or not Path(path).exists():
            matching = "no file matches" if path and glob.has_magic(path) else "no such file"
            raise SettingError(f"{self.name}: {matching}; {_PREPARE}")
        if Path(path).is_dir():
            raise SettingError(f"{self.name}: is a folder; name its files, such as '{path.rstrip('/')}/*.parquet'")
        if Path(path).suffix not in SUFFIXES:
            raise SettingError(f"{self.name}: verl reads files named {', '.join(SUFFIXES)}; rename it, or convert it")
        self._path = Path(path)
        try:
            self.count, self.columns = self._size()
        except (pa.ArrowException, OSError, ValueError) as error:
            kind = self._path.suffix.removeprefix(".")
            raise SettingError(f"{self.name}: not a readable {kind} file ({first_line(error)}); {_PREPARE}") from None
        if self.count == 0:
            raise SettingError(f"{self.name}: holds no rows; {_PREPARE}")

    def _size(self) -> tuple[int, list[str]]:
        if self._path.suffix == ".parquet":
            parquet = pq.ParquetFile(self._path)
            return parquet.metadata.num_rows, parquet.schema_arrow.names
        return self._table.num_rows, self._table.schema.names

    @cached_property
    def _table(self) -> pa.Table:
        """The rows of a JSON file."""
        try:
            return pyarrow.json.read_json(self._path)
        except pa.ArrowInvalid:
            rows = json.loads(self._path.read_text())
            return pa.Table.from_pylist(rows if isinstance(rows, list) else [rows])

    def rows(self, *columns: str) -> Iterator[dict[str, Any]]:
        """Every row, with these columns as far as the file has them."""
        wanted = [column for column in columns if column in self.columns]
        if self._path.suffix == ".parquet":
            batches = pq.ParquetFile(self._path).iter_batches(_BATCH, columns=wanted)
        else:
            batches = iter(self._table.select(wanted).to_batches(_BATCH))
        for batch in batches:
            yield from batch.to_pylist()
