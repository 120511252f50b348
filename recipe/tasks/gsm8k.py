"""GSM8K: grade-school word problems whose answer is a number, after ####. Official split.

Raw files: `hf download openai/gsm8k --repo-type dataset --local-dir raw/gsm8k`, or the JSON lines of its repository.
"""

import argparse
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipe.tasks.boxed import after_mark, last_boxed
from recipe.tasks.math_reward import score_answer
from recipe.tasks.rows import Prepared, Row, add_source, find_files, make_row, read_rows, text_of

HELP = "grade-school word problems (openai/gsm8k)"
DATA_SOURCE = "gsm8k"
MAX_ANSWER_CHARS = 64
# No part of a unit can be split in two ways: words as `(?:\s*[a-zA-Z]+)*` take twice as long for every further letter.
_NUMBER_AND_UNIT = re.compile(r"\$?\s*(-?[\d,]*\.?\d+)\.?(?:[a-zA-Z\s]*[a-zA-Z])?\.?")
_ADVICE = "get them with `hf download openai/gsm8k --repo-type dataset --local-dir DIR`"

add_arguments = add_source


def prompt(question: str) -> str:
    """The user's message."""
    return f"{question}\nReason step by step, and write the final number on the last line after ####."


def build(args: argparse.Namespace) -> Prepared:
    """Rows of the official split. Raises ValueError naming the file that is missing or wrong."""
    train, val = (_read(args.source, word, split) for word, split in (("train", "train"), ("test", "val")))
    return Prepared(train, val)


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> dict[str, float]:
    r"""Score one response by what follows its last ####; by its last \boxed{...} if there is no ####.

    Returns and raises what `recipe.tasks.math_reward.compute_score` does.
    """
    answer = after_mark(solution_str, MAX_ANSWER_CHARS) if "####" in solution_str else None
    if "####" not in solution_str:
        answer = last_boxed(solution_str, MAX_ANSWER_CHARS)
    if answer and (number := _NUMBER_AND_UNIT.fullmatch(answer)):
        answer = number[1]  # "$18", "18 dollars": math-verify reads a word as a product of letters
    return score_answer(answer, ground_truth)


def _read(source: Path, word: str, split: str) -> list[Row]:
    # the hub's other configuration has the same questions with other solutions
    files = [f for f in find_files(source, f"the {split} split", word, _ADVICE) if "socratic" not in f.as_posix()]
    rows: list[Row] = []
    for file in files:
        for raw in read_rows(file):
            answer = after_mark(text_of(raw, file, "answer"), MAX_ANSWER_CHARS)
            if answer is None:
                raise ValueError(f"{file}: an answer without its '#### number': {raw['answer']!r:.80}")
            message = prompt(text_of(raw, file, "question"))
            rows.append(make_row(DATA_SOURCE, message, answer.replace(",", ""), split, len(rows)))
    return rows
