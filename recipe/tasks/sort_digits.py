"""Sorting digits: short answers, right or wrong, that a small policy gets right most of the time. Generated."""

import argparse
import random
from collections.abc import Mapping
from typing import Any

from recipe.tasks.rows import Prepared, Row, make_row

HELP = "sort the digits of a number"
DATA_SOURCE = "sort_digits"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--train", type=int, default=4096, help="training problems (default: %(default)s)")
    parser.add_argument("--val", type=int, default=512, help="held-out problems (default: %(default)s)")
    parser.add_argument("--digits", type=int, default=6, help="per problem (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")


def build(args: argparse.Namespace) -> Prepared:
    """Distinct problems, none both taught and held out. Raises ValueError for bad settings."""
    if min(args.train, args.val, args.digits) < 1 or args.train + args.val > 10**args.digits:
        raise ValueError(
            f"train={args.train} and val={args.val} distinct problems of digits={args.digits}: use 1 or more of each, "
            f"and ask for fewer than {10**args.digits} problems, or raise digits"
        )
    numbers = random.Random(f"sort digits/{args.seed}").sample(range(10**args.digits), args.val + args.train)
    texts = [f"{number:0{args.digits}}" for number in numbers]
    val, train = texts[: args.val], texts[args.val :]
    train_rows = [_row(text, "train", index) for index, text in enumerate(train)]
    val_rows = [_row(text, "val", index) for index, text in enumerate(val)]
    return Prepared(train_rows, val_rows, {"digits": args.digits, "seed": args.seed})


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, **kwargs: Any
) -> dict[str, float]:
    """1 for the sorted digits and nothing else, but for spaces around them; otherwise 0. `acc` is the same."""
    score = float(solution_str.strip() == ground_truth)
    return {"score": score, "acc": score}


def _row(text: str, split: str, index: int) -> Row:
    return make_row(DATA_SOURCE, f"Sort the digits {text}.", "".join(sorted(text)), split, index)
