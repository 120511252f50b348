"""Write a task's training and validation rows: `python -m scripts.prepare_data countdown --out data/countdown`.

Writes train.parquet, val.parquet (verl's schema) and meta.json (the settings) into --out. Exit status 0, or 2 with
one line on stderr if a setting is wrong.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import pandas as pd

from recipe.tasks.countdown import problems as countdown

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Task:
    """A task's command line: its options, and how they become rows."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    # options -> (training rows, validation rows, the settings to record); raises ValueError for bad settings
    build: Callable[[argparse.Namespace], tuple[Rows, Rows, dict[str, Any]]]


class OneLineParser(argparse.ArgumentParser):
    """argparse, with the error alone on stderr instead of after the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def add_countdown_arguments(parser: argparse.ArgumentParser) -> None:
    default = countdown.Difficulty()
    parser.add_argument("--train", type=int, default=4096, help="training problems (default: %(default)s)")
    parser.add_argument("--val", type=int, default=512, help="held-out problems (default: %(default)s)")
    parser.add_argument("--numbers", type=int, default=default.numbers, help="per problem (default: %(default)s)")
    parser.add_argument("--max-number", type=int, default=default.max_number, help="default: %(default)s")
    parser.add_argument("--max-target", type=int, default=default.max_target, help="default: %(default)s")
    parser.add_argument(
        "--operators", default=default.operators, help="what solutions are made of (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")


def build_countdown(args: argparse.Namespace) -> tuple[Rows, Rows, dict[str, Any]]:
    difficulty = countdown.Difficulty(args.numbers, args.max_number, args.max_target, args.operators)
    train, val = countdown.make_split(difficulty, args.train, args.val, args.seed)
    train_rows = [countdown.to_row(problem, "train", index) for index, problem in enumerate(train)]
    val_rows = [countdown.to_row(problem, "val", index) for index, problem in enumerate(val)]
    return train_rows, val_rows, {"difficulty": asdict(difficulty), "seed": args.seed}


TASKS = {"countdown": Task("reach a target with given numbers", add_countdown_arguments, build_countdown)}


def write_dataset(out: Path, task: str, train: Rows, val: Rows, settings: dict[str, Any]) -> None:
    """Write the three files under temporary names, then rename them: a reader never sees half a file.

    meta.json comes last. Raises OSError if `out` cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    meta = {"task": task, **settings, "rows": {"train": len(train), "val": len(val)}}
    staged = {name: out / f".{name}.{os.getpid()}.tmp" for name in ("train.parquet", "val.parquet", "meta.json")}
    try:
        pd.DataFrame(train).to_parquet(staged["train.parquet"], index=False)
        pd.DataFrame(val).to_parquet(staged["val.parquet"], index=False)
        staged["meta.json"].write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
        for name, temporary in staged.items():
            os.replace(temporary, out / name)
    finally:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="prepare_data", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="task", required=True, metavar="TASK")
    for name, task in TASKS.items():
        command = commands.add_parser(name, help=task.help, description=task.help)
        command.add_argument("--out", type=Path, required=True, help="folder to write into")
        task.add_arguments(command)
    args = parser.parse_args(argv)
    try:
        train, val, settings = TASKS[args.task].build(args)
    except ValueError as error:
        print(f"prepare_data {args.task}: {error}", file=sys.stderr)
        return 2
    try:
        write_dataset(args.out, args.task, train, val, settings)
    except OSError as error:
        print(f"prepare_data {args.task}: cannot write --out {args.out}: {error.strerror}", file=sys.stderr)
        return 2
    print(f"{args.task}: {len(train)} training and {len(val)} held-out rows in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
