"""Seeded, always solvable Countdown problems, and the parquet rows verl trains on; nothing is downloaded."""

import argparse
import random
from collections.abc import Container
from dataclasses import asdict, dataclass
from typing import Any

from recipe.tasks.rows import Prepared

HELP = "reach a target with given numbers"
DATA_SOURCE = "countdown"
OPERATORS = "+-*/"
MAX_NUMBERS = 6
# After so many draws in a row that bring nothing new, the settings are taken to be exhausted (about half a second).
STALLED_DRAWS = 20_000

_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}
_ATOM = 3

ProblemKey = tuple[tuple[int, ...], int]


@dataclass(frozen=True)
class Difficulty:
    """How hard the problems are. Raises ValueError naming the setting that is out of range.

    numbers: how many numbers a problem gives (2 to 6).
    max_number: the largest number given; they are drawn uniformly from 1..max_number.
    max_target: the largest target; targets are positive integers.
    operators: the operators that solutions are made of. This only sets the difficulty: the prompt always
        offers, and the reward always accepts, all of + - * /.
    """

    numbers: int = 3
    max_number: int = 20
    max_target: int = 99
    operators: str = "+-"

    def __post_init__(self) -> None:
        if not 2 <= self.numbers <= MAX_NUMBERS:
            raise ValueError(f"numbers={self.numbers} is out of range: use 2 to {MAX_NUMBERS}")
        if self.max_number < 1:
            raise ValueError(f"max_number={self.max_number} is out of range: use 1 or more")
        if self.max_target < 1:
            raise ValueError(f"max_target={self.max_target} is out of range: use 1 or more")
        unique = set(self.operators)
        if not unique or not unique <= set(OPERATORS) or len(unique) != len(self.operators):
            raise ValueError(f"operators={self.operators!r} is not valid: use some of {OPERATORS!r}, each once")


@dataclass(frozen=True)
class Problem:
    """Numbers in the order they are shown, the target, and one solution (only the warm start reads it)."""

    numbers: tuple[int, ...]
    target: int
    solution: str

    @property
    def key(self) -> ProblemKey:
        """Two problems are the same if they have the same target and, in any order, the same numbers."""
        return problem_key(self.numbers, self.target)

    @property
    def prompt(self) -> str:
        """The user's message."""
        *head, last = map(str, self.numbers)
        return (
            f"Using the numbers {', '.join(head)} and {last}, write an expression that equals {self.target}. "
            "Use each number exactly once, with + - * / and parentheses. Answer as <answer>expression</answer>."
        )


@dataclass(frozen=True)
class _Term:
    text: str
    value: int
    precedence: int


def problem_key(numbers: tuple[int, ...] | list[int], target: int) -> ProblemKey:
    """The identity of a problem, whatever the order of its numbers."""
    return tuple(sorted(numbers)), target


def random_expression(numbers: tuple[int, ...], operators: str, rng: random.Random) -> str:
    """A random well-formed expression that uses each number once; its value may be anything, or undefined."""
    term = _grow(numbers, operators, rng, exact=False)
    assert term is not None  # without `exact` it never is
    return term.text


def random_problem(difficulty: Difficulty, rng: random.Random) -> Problem | None:
    """One draw of numbers and an expression over them; None if that expression is no valid solution.

    Valid means, as in the game, that every intermediate value is a positive integer, and the target small enough.
    """
    numbers = tuple(rng.randint(1, difficulty.max_number) for _ in range(difficulty.numbers))
    term = _grow(numbers, difficulty.operators, rng, exact=True)
    if term is None or term.value > difficulty.max_target:
        return None
    return Problem(numbers, term.value, term.text)


def generate(
    difficulty: Difficulty, count: int, rng: random.Random, exclude: Container[ProblemKey] = frozenset()
) -> list[Problem]:
    """`count` distinct problems, none of them in `exclude`, in the order drawn.

    Raises ValueError if the settings do not hold that many.
    """
    found: dict[ProblemKey, Problem] = {}
    stalled = 0
    while len(found) < count:
        problem = random_problem(difficulty, rng)
        if problem is None or problem.key in found or problem.key in exclude:
            stalled += 1
            if stalled > STALLED_DRAWS:
                raise ValueError(
                    f"count={count} distinct problems asked for, but only {len(found)} found with numbers="
                    f"{difficulty.numbers}, max_number={difficulty.max_number}, max_target={difficulty.max_target}, "
                    f"operators={difficulty.operators!r}: ask for fewer (train, val), or raise max_number or max_target"
                )
        else:
            found[problem.key] = problem
            stalled = 0
    return list(found.values())


def make_split(difficulty: Difficulty, train: int, val: int, seed: int) -> tuple[list[Problem], list[Problem]]:
    """Training and validation problems with no problem in common; the same for the same arguments.

    The validation problems are drawn first, from a stream of their own, so they do not change with `train`.
    Raises ValueError for sizes below 1, or larger than the settings can fill.
    """
    for name, size in (("train", train), ("val", val)):
        if size < 1:
            raise ValueError(f"{name}={size} is out of range: use 1 or more")
    val_problems = generate(difficulty, val, random.Random(f"countdown/val/{seed}"))
    held_out = {problem.key for problem in val_problems}
    train_problems = generate(difficulty, train, random.Random(f"countdown/train/{seed}"), exclude=held_out)
    return train_problems, val_problems


def to_row(problem: Problem, split: str, index: int) -> dict[str, Any]:
    """The row of verl's parquet schema. The solution is left out on purpose: RL must not see it."""
    numbers = list(problem.numbers)
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": problem.prompt}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": {"target": problem.target, "numbers": numbers}},
        "extra_info": {"split": split, "index": index, "numbers": numbers, "target": problem.target},
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    default = Difficulty()
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
    difficulty = Difficulty(args.numbers, args.max_number, args.max_target, args.operators)
    train, val = make_split(difficulty, args.train, args.val, args.seed)
    train_rows = [to_row(problem, "train", index) for index, problem in enumerate(train)]
    val_rows = [to_row(problem, "val", index) for index, problem in enumerate(val)]
    return Prepared(train_rows, val_rows, {"difficulty": asdict(difficulty), "seed": args.seed})


def _grow(numbers: tuple[int, ...], operators: str, rng: random.Random, *, exact: bool) -> _Term | None:
    """Join two random terms with a random operator until one is left.

    With `exact`, None as soon as a value is not a positive integer; without, values are not computed and None
    is never returned.
    """
    terms = [_Term(str(number), number, _ATOM) for number in numbers]
    while len(terms) > 1:
        left = terms.pop(rng.randrange(len(terms)))
        right = terms.pop(rng.randrange(len(terms)))
        operator = rng.choice(operators)
        value = _positive_integer(operator, left.value, right.value) if exact else 0
        if value is None:
            return None
        terms.append(_Term(_write(operator, left, right), value, _PRECEDENCE[operator]))
    return terms[0]


def _positive_integer(operator: str, left: int, right: int) -> int | None:
    """left operator right for positive integers, or None if that is not a positive integer."""
    if operator == "+":
        return left + right
    if operator == "*":
        return left * right
    if operator == "-":
        return left - right if left > right else None
    return left // right if left % right == 0 else None


def _write(operator: str, left: _Term, right: _Term) -> str:
    """The joined text with no more parentheses than needed, and no spaces: fewer tokens to learn."""
    level = _PRECEDENCE[operator]
    left_text = f"({left.text})" if left.precedence < level else left.text
    # a-(b-c) and a/(b*c) need them; a+(b-c) and a*(b/c) do not.
    tight = right.precedence < level or (right.precedence == level and operator in "-/")
    return f"{left_text}{operator}({right.text})" if tight else f"{left_text}{operator}{right.text}"
