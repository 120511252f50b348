"""Questions that a short Python program answers, and a small policy cannot: with the agent loop `simpletir`. Generated.

A program's parts, a prompt and an answer are made of few PHRASES and digits, so that a policy of half a million
parameters can write them.
"""

import argparse
import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from recipe.tasks.math_reward import compute_score
from recipe.tasks.rows import Prepared, Row, make_row

__all__ = ["add_arguments", "build", "compute_score"]

HELP = "questions that a short Python program answers, for a small policy with the code sandbox"
DATA_SOURCE = "calculate"
MOST = 30000
"""The most questions of a data set: there are 9,000 about divisors, and few are drawn twice."""
BEGIN, END = "What is ", "? Run a Python program, and give the answer within \\boxed{}."
PHRASES = (
    *(BEGIN, END, " mod ", " and ", "the greatest common divisor of ", "the sum of the divisors of "),
    *("the sum of the squares of the digits of ", "```python\n", "\n```\n", "import math\n", "math.gcd(", "math.lcm("),
    *("print(", "sum(", "int(d)", " ** 2", " for d in ", "str(", " * ", " % ", " // ", ", ", "n = ", "range(1, n + 1)"),
    *("range(1, n)", " if n % d == 0", ")))", "))", "\nCode execution result: ", "no output", "\\boxed{", "}"),
)
"""The parts of prompts, programs, observations and answers that are one token each in a policy of this task."""


@dataclass(frozen=True)
class Kind:
    """A kind of question about the numbers a, b, c.

    words, program, mistake: the question's middle, the program that answers it, and one that looks like that program.
    numbers: draws the numbers.
    value: the answer.
    """

    words: str
    program: str
    mistake: str
    numbers: Callable[[random.Random], tuple[int, ...]]
    value: Callable[..., int]


def _multiples(rng: random.Random) -> tuple[int, int]:
    shared = rng.randrange(11, 100)
    return shared * rng.randrange(11, 100), shared * rng.randrange(11, 100)


KINDS = {
    "squares": Kind(
        words="the sum of the squares of the digits of {}",
        program="print(sum(int(d) ** 2 for d in str({})))",
        mistake="print(sum(int(d) for d in str({})))",
        numbers=lambda rng: (rng.randrange(10000, 100000),),
        value=lambda a: sum(int(digit) ** 2 for digit in str(a)),
    ),
    "product": Kind(
        words="{} * {} mod {}",
        program="print({} * {} % {})",
        mistake="print({} * {} // {})",
        numbers=lambda rng: (rng.randrange(100, 1000), rng.randrange(100, 1000), rng.randrange(100, 1000)),
        value=lambda a, b, c: a * b % c,
    ),
    "gcd": Kind(
        words="the greatest common divisor of {} and {}",
        program="import math\nprint(math.gcd({}, {}))",
        mistake="import math\nprint(math.lcm({}, {}))",
        numbers=_multiples,
        value=math.gcd,
    ),
    "divisors": Kind(
        words="the sum of the divisors of {}",
        program="n = {}\nprint(sum(d for d in range(1, n + 1) if n % d == 0))",
        mistake="n = {}\nprint(sum(d for d in range(1, n) if n % d == 0))",
        numbers=lambda rng: (rng.randrange(1000, 10000),),
        value=lambda a: sum(d for d in range(1, a + 1) if a % d == 0),
    ),
}


@dataclass(frozen=True)
class Question:
    """A question. Equal questions have equal prompts."""

    kind: str
    numbers: tuple[int, ...]

    @property
    def prompt(self) -> str:
        return BEGIN + KINDS[self.kind].words.format(*self.numbers) + END

    @property
    def program(self) -> str:
        """The program that prints the answer."""
        return KINDS[self.kind].program.format(*self.numbers)

    @property
    def mistake(self) -> str:
        """A program that prints something else, most often."""
        return KINDS[self.kind].mistake.format(*self.numbers)

    @property
    def answer(self) -> str:
        return str(KINDS[self.kind].value(*self.numbers))


def random_question(rng: random.Random) -> Question:
    """Draw a question of any kind."""
    kind = rng.choice(list(KINDS))
    return Question(kind, KINDS[kind].numbers(rng))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--train", type=int, default=4096, help="training questions (default: %(default)s)")
    parser.add_argument("--val", type=int, default=256, help="held-out questions (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")


def build(args: argparse.Namespace) -> Prepared:
    """Distinct questions, none both taught and held out. Raises ValueError for bad settings."""
    if min(args.train, args.val) < 1 or args.train + args.val > MOST:
        raise ValueError(f"train={args.train} and val={args.val}: use 1 or more of each, and {MOST} at most together")
    rng, questions = random.Random(f"calculate/{args.seed}"), dict[Question, None]()
    while len(questions) < args.train + args.val:
        questions[random_question(rng)] = None
    drawn = list(questions)
    return Prepared(
        [_row(question, "train", index) for index, question in enumerate(drawn[args.val :])],
        [_row(question, "val", index) for index, question in enumerate(drawn[: args.val])],
        {"seed": args.seed},
    )


def _row(question: Question, split: str, index: int) -> Row:
    row = make_row(DATA_SOURCE, question.prompt, question.answer, split, index)
    row["extra_info"]["program"] = question.program
    return row
