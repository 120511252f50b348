"""Countdown's rows for scripts.prepare_data: generated, nothing is downloaded."""

import argparse
from dataclasses import asdict

from recipe.tasks.countdown import problems
from recipe.tasks.rows import Prepared

HELP = "reach a target with given numbers"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = problems.Difficulty()
    parser.add_argument("--train", type=int, default=4096, help="training problems (default: %(default)s)")
    parser.add_argument("--val", type=int, default=512, help="held-out problems (default: %(default)s)")
    parser.add_argument("--numbers", type=int, default=default.numbers, help="per problem (default: %(default)s)")
    parser.add_argument("--max-number", type=int, default=default.max_number, help="default: %(default)s")
    parser.add_argument("--max-target", type=int, default=default.max_target, help="default: %(default)s")
    parser.add_argument(
        "--operators", default=default.operators, help="what solutions are made of (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")


def build(args: argparse.Namespace) -> Prepared:
    """Raises ValueError for bad settings."""
    difficulty = problems.Difficulty(args.numbers, args.max_number, args.max_target, args.operators)
    train, val = problems.make_split(difficulty, args.train, args.val, args.seed)
    train_rows = [problems.to_row(problem, "train", index) for index, problem in enumerate(train)]
    val_rows = [problems.to_row(problem, "val", index) for index, problem in enumerate(val)]
    return Prepared(train_rows, val_rows, {"difficulty": asdict(difficulty), "seed": args.seed})
