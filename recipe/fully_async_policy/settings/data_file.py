"""A file of rows, as verl reads it: parquet, JSON lines, or a JSON list."""

import contextlib
import glob
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from recipe.fully_async_policy.settings.errors import SettingError, first_line
from verl_vcpo.common.json_rows import json_rows

SUFFIXES = (".parquet", ".json", ".jsonl")
_PREPARE = "make it with `vcpo data`, or give another file"
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
        self._path, self.columns = Path(path), list[str]()
        with self._readable():
            if self._path.suffix == ".parquet":
                from datasets import Features  # which takes a second to import

                self.columns, self.count = pq.read_schema(path).names, pq.read_metadata(path).num_rows
                try:
                    Features.from_arrow_schema(pq.read_schema(path))
                except ValueError as error:
                    raise ValueError(f"verl cannot read a column ({error}); write it as text or records") from None
            else:
                self.count, names = 0, dict[str, None]()
                for _, row in json_rows(self._path):
                    self.count += 1
                    names |= dict.fromkeys(row)
                self.columns = list(names)
        if self.count == 0:
            raise SettingError(f"{self.name}: holds no rows; {_PREPARE}")

    def rows(self, *columns: str) -> Iterator[dict[str, Any]]:
        """Every row, with these columns as far as the file has them; None where a row has none."""
        wanted = [column for column in columns if column in self.columns]
        with self._readable():
            if self._path.suffix != ".parquet":
                yield from ({column: row.get(column) for column in wanted} for _, row in json_rows(self._path))
            else:
                for batch in pq.ParquetFile(self._path).iter_batches(_BATCH, columns=wanted):
                    yield from batch.to_pylist()

    @contextlib.contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except UnicodeDecodeError:
            raise SettingError(f"{self.name}: holds text that is not in UTF-8; write it as UTF-8") from None
        except (pa.ArrowException, OSError) as error:
            kind = self._path.suffix.removeprefix(".")
            raise SettingError(f"{self.name}: not a readable {kind} file ({first_line(error)}); {_PREPARE}") from None
        except ValueError as error:
            raise SettingError(f"{self.name}: {first_line(error)}") from None
