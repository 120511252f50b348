"""A file of rows, as verl reads it: parquet, JSON lines, or a JSON list."""

import glob
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.json

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
        try:
            self._data = _dataset(Path(path))
            self.count, self.columns = self._data.count_rows(), self._data.schema.names
        except (pa.ArrowException, OSError, ValueError) as error:
            kind = Path(path).suffix.removeprefix(".")
            raise SettingError(f"{self.name}: not a readable {kind} file ({first_line(error)}); {_PREPARE}") from None
        if self.count == 0:
            raise SettingError(f"{self.name}: holds no rows; {_PREPARE}")

    def rows(self, *columns: str) -> Iterator[dict[str, Any]]:
        """Every row, with these columns as far as the file has them."""
        wanted = [column for column in columns if column in self.columns]
        for batch in self._data.to_batches(columns=wanted, batch_size=_BATCH):
            yield from batch.to_pylist()


def _dataset(path: Path) -> ds.Dataset:
    if path.suffix == ".parquet":
        return ds.dataset(path, format="parquet")
    try:
        return ds.dataset(pyarrow.json.read_json(path))
    except pa.ArrowInvalid:
        rows = json.loads(path.read_text())
        return ds.dataset(pa.Table.from_pylist(rows if isinstance(rows, list) else [rows]))
