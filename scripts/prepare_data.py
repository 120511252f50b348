"""Write the rows of a task: `python -m scripts.prepare_data gsm8k --source raw/gsm8k --out data/gsm8k`.

Writes train.parquet, val.parquet (verl's schema) and meta.json (the settings) into --out. With --tokenizer, rows whose
prompt is longer than the task's preset allows are removed. Exit status 0, or 2 with one line on stderr if something is
wrong.
"""

import argparse
import contextlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pandas as pd
from tqdm import tqdm

from recipe.command_line import OneLineParser, run_command
from recipe.tasks import gsm8k, hendrycks_math, human_eval, own_rows, reasoning_gym, sort_digits
from recipe.tasks.countdown import problems as countdown
from recipe.tasks.rows import Prepared, Row, prompt_lengths
from recipe.tasks.tool_use import problems as tool_use
from verl_vcpo.common.whole_file import whole_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Each has HELP, add_arguments(parser) and build(options) -> Prepared, which raises ValueError for bad settings or data.
TASKS: dict[str, ModuleType] = {
    "countdown": countdown,
    "gsm8k": gsm8k,
    "human_eval": human_eval,
    "math": hendrycks_math,
    "reasoning_gym": reasoning_gym,
    "rows": own_rows,
    "sort_digits": sort_digits,
    "tool_use": tool_use,
}
PUBLISHED = Path(__file__).resolve().parent.parent / "recipe/fully_async_policy/config/published/gpu"
SAMPLES = 3
_TOKENIZER_BATCH = 512


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="prepare_data", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="task", required=True, metavar="TASK")
    for name, task in TASKS.items():
        command = commands.add_parser(name, help=task.HELP, description=task.__doc__)
        command.formatter_class = argparse.RawDescriptionHelpFormatter
        task.add_arguments(command)
        command.add_argument("--out", type=Path, required=True, help="folder to write into")
        command.add_argument("--tokenizer", metavar="PATH", help="the model's folder: check the prompts' lengths")
        command.add_argument(
            "--max-prompt-length", type=int, metavar="TOKENS", help="default: data.max_prompt_length of the preset"
        )
    args = parser.parse_args(argv)
    try:
        prepared = TASKS[args.task].build(args)
        if args.tokenizer:
            remove_overlong(prepared, args.tokenizer, args.max_prompt_length or preset_length(args.task))
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
    print_summary(args.task, args.out, prepared, checked=bool(args.tokenizer))
    return 0


def preset_length(task: str) -> int:
    """`data.max_prompt_length` of the task's preset on GPUs. Raises ValueError where there is none."""
    from omegaconf import OmegaConf

    preset = PUBLISHED / f"{task}.yaml"
    if not preset.is_file():
        raise ValueError(f"--max-prompt-length is missing: {task} has no preset on GPUs; give a number of tokens")
    return OmegaConf.load(preset).data.max_prompt_length


def remove_overlong(prepared: Prepared, tokenizer_path: str, limit: int) -> None:
    """Remove, in place, the rows whose prompt has more than `limit` tokens in the model's chat template.

    Raises ValueError for a folder without a tokenizer, or a tokenizer without a chat template.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(tokenizer_path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ValueError(f"--tokenizer {tokenizer_path}: no tokenizer ({str(error).splitlines()[0]})") from None
    if not tokenizer.chat_template:
        raise ValueError(f"--tokenizer {tokenizer_path}: has no chat template, and the rows are chat messages")
    for split in ("train", "val"):
        rows = getattr(prepared, split)
        lengths = lengths_of(tokenizer, rows)
        kept = [row for row, length in zip(rows, lengths, strict=True) if length <= limit]
        prepared.removed[f"{split} prompts of more than {limit} tokens"] = len(rows) - len(kept)
        prepared.settings[f"longest_{split}_prompt"] = max((n for n in lengths if n <= limit), default=0)
        setattr(prepared, split, kept)


def lengths_of(tokenizer: "PreTrainedTokenizerBase", rows: list[Row]) -> list[int]:
    """Tokens of each row's prompt, some rows at a time."""
    lengths: list[int] = []
    for start in tqdm(range(0, len(rows), _TOKENIZER_BATCH), desc="prompt lengths", disable=None):
        lengths += prompt_lengths(tokenizer, [row["prompt"] for row in rows[start : start + _TOKENIZER_BATCH]])
    return lengths


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


def print_summary(task: str, out: Path, prepared: Prepared, *, checked: bool) -> None:
    """What was written, what was removed, and a few rows."""
    print(f"{task}: {len(prepared.train)} training and {len(prepared.val)} held-out rows in {out}")
    if prepared.removed:
        print(f"removed: {describe(prepared.removed) or 'nothing'}")
    if not checked:
        print("prompt lengths were not checked (--tokenizer)")
    for row in prepared.train[:SAMPLES]:
        print(f"- {row['prompt'][0]['content']!r:.300}\n  ground truth: {row['reward_model']['ground_truth']!r:.100}")


if __name__ == "__main__":
    run_command(main)
