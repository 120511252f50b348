"""Write the rows of a task: `python -m scripts.prepare_data gsm8k --source raw/gsm8k --out data/gsm8k`.

Writes train.parquet, val.parquet (verl's schema) and meta.json (the settings) into --out. Prompts that are too long for
a run are left out by the run, with data.filter_overlong_prompts=true. Exit status 0, or 2 with one line on stderr if
something is wrong.
"""

import argparse
import contextlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pandas as pd

from recipe.command_line import OneLineParser, run_command
from recipe.tasks import calculate, gsm8k, hendrycks_math, human_eval, own_rows, reasoning_gym, sort_digits
from recipe.tasks.countdown import problems as countdown
from recipe.tasks.rows import Prepared
from recipe.tasks.tool_use import problems as tool_use
from verl_vcpo.common.whole_file import whole_file

# Each has HELP, add_arguments(parser) and build(options) -> Prepared, which raises ValueError for bad settings or data.
TASKS: dict[str, ModuleType] = {
    "calculate": calculate,
    "countdown": countdown,
    "gsm8k": gsm8k,
    "human_eval": human_eval,
    "math": hendrycks_math,
    "reasoning_gym": reasoning_gym,
    "rows": own_rows,
    "sort_digits": sort_digits,
    "tool_use": tool_use,
}
SAMPLES = 3


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="prepare_data", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="task", required=True, metavar="TASK")
    for name, task in TASKS.items():
        command = commands.add_parser(name, help=task.HELP, description=task.__doc__)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        task.add_arguments(command)
        command.add_argument("--out", type=Path, required=True, help="folder to write into")
    args = parser.parse_args(argv)
    try:
        prepared = TASKS[args.task].build(args)
        for split, rows in (("training", prepared.train), ("validation", prepared.val)):
            if not rows:
                raise ValueError(f"no {split} rows are left ({describe(prepared.removed) or 'the source is empty'})")
    except (ValueError, OSError) as error:
        print(f"prepare_data {args.task}: {error}", file=sys.stderr)
        return 2
    try:
        write_dataset(args.out, args.task, prepared)
    except OSError as error:
        print(f"prepare_data {args.task}: cannot write --out {args.out}: {error.strerror}", file=sys.stderr)
        return 2
    print_summary(args.task, args.out, prepared)
    return 0


def write_dataset(out: Path, task: str, prepared: Prepared) -> None:
    """Write the three files, or none: meta.json comes last. Raises OSError if `out` cannot be written."""
    out.mkdir(parents=True, exist_ok=True)
    meta = {"task": task, **prepared.settings, "rows": {"train": len(prepared.train), "val": len(prepared.val)}}
    if prepared.removed:
        meta["removed"] = prepared.removed
    names = ("meta.json", "train.parquet", "val.parquet")
    with contextlib.ExitStack() as files:  # the last to be entered takes its name first
        meta_file, train_file, val_file = (files.enter_context(whole_file(out / name)) for name in names)
        pd.DataFrame(prepared.train).to_parquet(train_file, index=False)
        pd.DataFrame(prepared.val).to_parquet(val_file, index=False)
        meta_file.write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


def describe(removed: dict[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in removed.items() if count)


def print_summary(task: str, out: Path, prepared: Prepared) -> None:
    """What was written, what was removed, and a few rows."""
    print(f"{task}: {len(prepared.train)} training and {len(prepared.val)} held-out rows in {out}")
    if prepared.removed:
        print(f"removed: {describe(prepared.removed) or 'nothing'}")
    for row in prepared.train[:SAMPLES]:
        print(f"- {row['prompt'][0]['content']!r:.300}\n  ground truth: {row['reward_model']['ground_truth']!r:.100}")


if __name__ == "__main__":
    run_command(main)
