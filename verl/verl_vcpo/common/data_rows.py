"""The row of the data that a prompt comes from: `extra_info.index`, which is a number, or any name, such as a UUID."""

import zlib
from collections.abc import Iterable
from typing import Any

DataRow = int | str


def data_row(index: Any) -> DataRow:
    """Return the row as `metrics.jsonl` has it."""
    try:
        return int(index)
    except (TypeError, ValueError):
        return str(index)


def row_number(index: Any) -> int:
    """Return a number for the row, the same in every process: a hash for a name, which two names rarely share."""
    row = data_row(index)
    return row if isinstance(row, int) else zlib.crc32(row.encode())


def in_order(rows: Iterable[DataRow]) -> list[DataRow]:
    """Sort rows: numbers first, then names."""
    return sorted(rows, key=lambda row: (isinstance(row, str), row))
