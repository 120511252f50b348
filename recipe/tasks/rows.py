"""Rows: from the files that a hub publishes to the schema that verl trains on."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl_vcpo.common.json_rows import json_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Row = dict[str, Any]
SUFFIXES = (".parquet", ".jsonl", ".json")
SINGLE_TURN = "single_turn_agent"
"""verl's agent loop of one response to one prompt."""


@dataclass
class Prepared:
    """A task's rows in verl's schema, the settings that made them, and what was removed on the way (what: count)."""

    train: list[Row]
    val: list[Row]
    settings: dict[str, Any] = field(default_factory=dict)
    removed: dict[str, int] = field(default_factory=dict)


def make_row(data_source: str, message: str, ground_truth: Any, split: str, index: int | str) -> Row:
    """One row of verl's schema. `data_source` decides the reward: recipe/tasks/reward.py."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": message}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index},
    }


def add_source(parser: argparse.ArgumentParser) -> None:
    """The option of every task that is made from raw files."""
    parser.add_argument(
        "--source", type=Path, required=True, help="folder with the raw files (parquet or JSON lines), as downloaded"
    )


def find_files(source: Path, part: str, word: str, advice: str, *, any_folder: bool = False) -> list[Path]:
    """The data files below `source` with `word` in their name (`any_folder`: or in that of a folder), sorted.

    Raises ValueError naming `part` of the data where there are none; `advice` says where they come from.
    """
    if not source.is_dir():
        raise ValueError(f"--source {source}: no such folder; {advice}")
    files = [file for file in sorted(source.rglob("*")) if file.suffix in SUFFIXES and not file.name.startswith(".")]
    found = [f for f in files if word in (f.relative_to(source).as_posix() if any_folder else f.name).lower()]
    if not found:
        where = "path" if any_folder else "name"
        raise ValueError(
            f"--source {source}: no parquet or JSON lines file of {part} ('{word}' in its {where}); {advice}"
        )
    return found


def read_rows(file: Path) -> Iterator[Row]:
    """The rows of a parquet or JSON file, a batch in memory at a time.

    Raises ValueError naming the file, and the line, that cannot be read.
    """
    return (row for _, row in numbered_rows(file))


def numbered_rows(file: Path) -> Iterator[tuple[int, Row]]:
    """The same, each with the number of its line; of a parquet file or a JSON list, with that of the row, from 1."""
    try:
        if file.suffix == ".parquet":
            yield from enumerate((row for b in pq.ParquetFile(file).iter_batches(8192) for row in _as_written(b)), 1)
        else:
            yield from json_rows(file)
    except pa.ArrowException as error:
        raise ValueError(f"{file}: not a readable parquet file ({str(error).splitlines()[0]})") from None
    except UnicodeDecodeError:
        raise ValueError(f"{file}: holds text that is not in UTF-8; write it as UTF-8") from None
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None


def _as_written(batch: pa.RecordBatch) -> list[Row]:
    """Rows, whose numbers of half and single precision have the digits that these have: 0.1, not 0.10000000149."""
    short = {f.name: f.type.to_pandas_dtype() for f in batch.schema if f.type in (pa.float16(), pa.float32())}
    return [
        row | {name: float(str(kind(row[name]))) for name, kind in short.items() if row[name] is not None}
        for row in batch.to_pylist()
    ]


def text_of(row: Row, file: Path, *names: str) -> str:
    """The text of the first of the columns `names` that the row has; numbers are accepted as text.

    Raises ValueError where it has none of them, or where it is empty.
    """
    for name in names:
        if name in row:
            value = row[name]
            if isinstance(value, str | int) and str(value).strip():
                return str(value).strip()
            raise ValueError(f"{file}: column {name!r} holds {value!r} where text is expected")
    raise ValueError(f"{file}: column {names[0]!r} is missing; the row has {', '.join(map(repr, row)) or 'nothing'}")


def prompt_lengths(tokenizer: "PreTrainedTokenizerBase", chats: list[Any], **template: Any) -> list[int]:
    """Tokens of each prompt in the model's chat template, with its arguments `template`, as the sampler gets it."""
    if not chats:
        return []
    texts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False, **template)
    return [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
