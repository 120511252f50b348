"""Rows of your own: a CSV, JSON lines or parquet file with a column of questions and a column of answers.

The question becomes the user's message, the answer the ground truth. Each question is used once, so that none is both
trained on and held out.
"""

import argparse
import csv
import math
import random
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

from recipe.tasks.rows import SUFFIXES, Prepared, Row, make_row, numbered_rows
from verl_vcpo.common.json_rows import decoded

HELP = "a file of your own: columns of questions and answers"
SEPARATORS = {".csv": ",", ".tsv": "\t"}
_NAMED = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = ", ".join((*SEPARATORS, *SUFFIXES))
    parser.add_argument("--from", dest="file", type=Path, required=True, metavar="FILE", help=kinds)
    parser.add_argument("--question", required=True, metavar="COLUMN", help="the user's message")
    parser.add_argument("--answer", required=True, metavar="COLUMN", help="the ground truth: text, or a number")
    parser.add_argument("--instruction", metavar="TEXT", help="a line after each question: how to give the answer")
    parser.add_argument(
        "--name", help="data_source: the reward gets it, and accuracy has it (default: the file's name)"
    )
    parser.add_argument("--val-fraction", type=float, default=0.1, help="held out, chosen by chance (default: 0.1)")
    parser.add_argument("--seed", type=int, default=0, help="of that choice (default: %(default)s)")


def build(args: argparse.Namespace) -> Prepared:
    """Distinct questions, none both taught and held out. Raises ValueError naming what is wrong, and the line."""
    if not 0 < args.val_fraction < 1:
        raise ValueError(f"--val-fraction {args.val_fraction}: give a number between 0 and 1")
    if args.question == args.answer:
        raise ValueError(f"--answer {args.answer}: is the column of the questions, too")
    pairs, removed = _distinct(_pairs(args.file, args.question, args.answer))
    if len(pairs) < 2:
        raise ValueError(f"--from {args.file}: {len(pairs)} different questions; give two or more")
    count = min(len(pairs) - 1, max(1, round(args.val_fraction * len(pairs))))
    held_out = set(random.Random(f"rows/{args.seed}").sample(range(len(pairs)), count))
    name = args.name or args.file.stem
    split: dict[str, list[Row]] = {"train": [], "val": []}
    for index, (question, answer) in enumerate(pairs):
        part = "val" if index in held_out else "train"
        message = f"{question}\n{args.instruction}" if args.instruction else question
        # The file's name too: the rows of several files, as data.levels takes them, have numbers of their own.
        split[part].append(make_row(name, message, answer, part, f"{args.file.stem}/{part}/{len(split[part])}"))
    settings = {name: getattr(args, name) for name in ("question", "answer", "instruction")}
    settings["from"] = str(args.file)
    return Prepared(
        **split, settings={**settings, "val_fraction": args.val_fraction, "seed": args.seed}, removed=removed
    )


def _distinct(pairs: list[tuple[str, str]]) -> tuple[list[tuple[str, str]], dict[str, int]]:
    """The first row of each question, and how many others there were. Questions that differ in spaces are the same."""
    kept: dict[str, tuple[str, str]] = {}
    again = other = 0
    for question, answer in pairs:
        key = " ".join(question.split())
        if key not in kept:
            kept[key] = question, answer
        elif kept[key][1] == answer:
            again += 1
        else:
            other += 1
    return list(kept.values()), {"repeated": again, "with a question that an earlier row answers otherwise": other}


def _pairs(file: Path, question: str, answer: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    empty: dict[str, list[int]] = {question: [], answer: []}
    for number, row in _rows(file):
        if missing := [name for name in (question, answer) if name not in row]:
            raise ValueError(f"{file}:{number}: no column {missing[0]!r}; it has {', '.join(map(repr, row))}")
        values = {name: _text(row[name], name, f"{file}:{number}") for name in empty}
        for name in empty:
            if not values[name]:
                empty[name].append(number)
        pairs.append((values[question], values[answer]))
    for name, lines in empty.items():
        if lines:
            others = f" and {len(lines) - _NAMED} more" if len(lines) > _NAMED else ""
            where = ", ".join(map(str, lines[:_NAMED]))
            raise ValueError(f"{file}: column {name!r} is empty in line {where}{others}; fill it, or remove the lines")
    if not pairs:
        raise ValueError(f"--from {file}: has no rows")
    return pairs


def _text(value: Any, name: str, where: str) -> str:
    if value is None:
        return ""
    bad = isinstance(value, bool) or not isinstance(value, str | int | float)
    if bad or (isinstance(value, float) and not math.isfinite(value)):
        raise ValueError(f"{where}: column {name!r} holds {value!r:.80} where text or a number is expected")
    # 0.00001 and not 1e-05: as people and models write it
    return f"{Decimal(repr(value)):f}" if isinstance(value, float) else str(value).strip()


def _rows(file: Path) -> Iterator[tuple[int, Row]]:
    """(line, row) of the file."""
    if file.suffix not in (*SEPARATORS, *SUFFIXES):
        raise ValueError(f"--from {file}: give a file with one of the names {', '.join((*SEPARATORS, *SUFFIXES))}")
    if not file.is_file():
        raise ValueError(f"--from {file}: {'is no file' if file.exists() else 'no such file'}")
    return _table(file, SEPARATORS[file.suffix]) if file.suffix in SEPARATORS else numbered_rows(file)


def _table(file: Path, separator: str) -> Iterator[tuple[int, Row]]:
    """(first line of a row, row) of a CSV file; all values are text. Lines without any text are skipped."""
    with open(file, encoding="utf-8-sig", newline="") as lines:
        rows = csv.reader(lines, delimiter=separator, strict=True)
        line = 1
        try:
            header = next(rows, [])
            if twice := [name for name in header if header.count(name) > 1]:
                raise ValueError(f"{file}:1: column {twice[0]!r} is there twice; give each a name of its own")
            line = rows.line_num + 1
            for fields in rows:
                if fields and len(fields) != len(header):
                    raise ValueError(
                        f"{file}:{line}: {len(fields)} fields, and the first line has {len(header)}; fields are "
                        f"separated by {separator!r}, and one that holds it is written in double quotes"
                    )
                if fields:
                    yield line, dict(zip(header, fields, strict=True))
                line = rows.line_num + 1
        except csv.Error as error:
            raise ValueError(f"{file}:{line}: not readable as CSV from this line on ({error})") from None
        except UnicodeDecodeError:
            for number, text in enumerate(file.read_bytes().split(b"\n"), 1):
                decoded(text, f"{file}:{number}")
            raise
