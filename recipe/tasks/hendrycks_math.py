r"""MATH: competition mathematics, the answer in \boxed{}. Official training split, evaluated on MATH-500.

Raw files, into one folder: `hf download EleutherAI/hendrycks_math --repo-type dataset --local-dir raw/math/hendrycks`
and `hf download HuggingFaceH4/MATH-500 --repo-type dataset --local-dir raw/math/math-500`.
"""

import argparse

from recipe.tasks.boxed import last_boxed
from recipe.tasks.math_reward import compute_score
from recipe.tasks.rows import Prepared, Row, add_source, find_files, make_row, read_rows, text_of
from recipe.tasks.verifier import MAX_ANSWER_CHARS

__all__ = ["add_arguments", "build", "compute_score", "prompt"]

HELP = "competition mathematics (Hendrycks MATH), evaluated on MATH-500"
TRAIN_SOURCE, VAL_SOURCE = "math", "math-500"
_ADVICE = (
    "get them with `hf download EleutherAI/hendrycks_math --repo-type dataset --local-dir DIR/hendrycks` and "
    "`hf download HuggingFaceH4/MATH-500 --repo-type dataset --local-dir DIR/math-500`"
)

add_arguments = add_source


def prompt(problem: str) -> str:
    """The user's message."""
    return f"{problem}\nPlease reason step by step, and put your final answer within \\boxed{{}}."


def build(args: argparse.Namespace) -> Prepared:
    """Training rows without those of MATH-500. Raises ValueError naming the file that is missing or wrong."""
    val: list[Row] = []
    for file in find_files(args.source, "MATH-500", "test", _ADVICE):
        for raw in read_rows(file):
            if "unique_id" not in raw:
                break  # the other 4500 test problems of MATH
            message = prompt(text_of(raw, file, "problem"))
            val.append(make_row(VAL_SOURCE, message, text_of(raw, file, "answer"), "val", len(val)))
    if not val:
        raise ValueError(f"--source {args.source}: no file of MATH-500 (a test file with unique_id); {_ADVICE}")
    held_out = {row["prompt"][0]["content"] for row in val}
    train: list[Row] = []
    removed = {"in MATH-500": 0, "without a \\boxed answer": 0}
    for file in find_files(args.source, "the training split", "train", _ADVICE):
        for raw in read_rows(file):
            message = prompt(text_of(raw, file, "problem"))
            answer = last_boxed(text_of(raw, file, "solution"), MAX_ANSWER_CHARS)
            if message in held_out:
                removed["in MATH-500"] += 1
            elif not answer or not answer.strip():
                removed["without a \\boxed answer"] += 1
            else:
                train.append(make_row(TRAIN_SOURCE, message, answer.strip(), "train", len(train)))
    return Prepared(train, val, removed=removed)
