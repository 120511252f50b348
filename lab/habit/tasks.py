"""Tasks whose first policy has a wrong habit: most answers that it is taught have the same mistake.

Its most likely answer is then wrong (greedy accuracy below 15 %), so sharpening alone teaches nothing. A right answer
is drawn now and then, because some of the taught ones are right.

sort_digits  sorts, but writes the largest digit first
countdown    reaches a number with three numbers, of which it takes the first in the place of the last, too
countdown4   does the same with four numbers
tries        does the same with three, after some tries at random: answers of 64 to 100 tokens
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from recipe.tasks import sort_digits
from recipe.tasks.countdown import reward
from recipe.tasks.countdown.problems import Difficulty, generate
from recipe.tasks.rows import Row, make_row
from recipe.warm_start.rows import AnsweredRows, load_answered_rows
from recipe.warm_start.train import Settings
from recipe.warm_start.train import run as teach
from verl_vcpo.common.whole_file import whole_folder

HELD_OUT, TRAINED, TAUGHT = 512, 4096, 20_000
"""Problems that are tested, that RL trains on, and that the first policy is taught; none is in two of them."""
ANSWERS = "taught"
"""The column with the taught answer."""
MOST_GREEDY = 0.15
"""A first policy whose most likely answers are right more often has no wrong habit."""
TRIES, END_OF_TRIES = 5, ": "
"""How many tries at random a response of the task `tries` begins with, and the text between them and the answer."""


@dataclass(frozen=True)
class HabitTask:
    """A task, and the lesson of its first policies."""

    name: str
    response: int
    """The most tokens of a response."""
    lesson_steps: int
    right_share: float
    """The share of taught answers that are right: so many that 2 to 10 % of drawn answers are."""
    problems: Callable[[int, random.Random], Iterator[tuple[str, Any, str, str]]]
    """Yields the question, the ground truth, a right answer and a wrong one of so many problems."""

    @property
    def data(self) -> Path:
        """The folder of the rows."""
        return Path("data/habit") / self.name

    def model(self, seed: int) -> Path:
        """The folder of the first policy that runs with a seed begin with."""
        return Path("models/habit") / f"{self.name}-{seed}"

    def prepare(self, seeds: Sequence[int]) -> None:
        """Write the rows and train a first policy for each seed, unless they are there."""
        if not self.data.exists():
            self.write_rows(self.data)
        rows = load_answered_rows(self.data / "lesson.parquet", ANSWERS)
        truths = pd.read_parquet(self.data / "lesson.parquet")["reward_model"].iloc[-len(rows.held_out) :]
        lesson = Answers(rows.taught, rows.held_out, self.name, [truth["ground_truth"] for truth in truths])
        for seed in seeds:
            sizes: dict[str, Any] = {"layers": 2, "heads": 2, "samples": 4, "correct_fraction": 1.0}
            settings = Settings.model_validate(sizes | {"steps": self.lesson_steps, "seed": seed})
            teach(lesson, self.model(seed), settings)

    def write_rows(self, folder: Path) -> None:
        """Write val.parquet, train.parquet and lesson.parquet into a new folder."""
        rng = random.Random(f"habit/{self.name}")
        problems = list(self.problems(HELD_OUT + TRAINED + TAUGHT, rng))
        folder.parent.mkdir(parents=True, exist_ok=True)
        with whole_folder(folder) as partial:
            for split, start, count in (
                ("val", 0, HELD_OUT),
                ("train", HELD_OUT, TRAINED),
                ("lesson", HELD_OUT + TRAINED, TAUGHT),
            ):
                rows = [self._row(*problems[start + i], split, i, rng) for i in range(count)]
                pd.DataFrame(rows).to_parquet(partial / f"{split}.parquet")

    def _row(self, question: str, truth: Any, right: str, wrong: str, split: str, i: int, rng: random.Random) -> Row:
        taught = right if rng.random() < self.right_share else wrong
        return make_row(self.name, question, truth, split, i) | {ANSWERS: taught}


@dataclass(frozen=True)
class Answers(AnsweredRows):
    """The rows that teach a first policy; a response is right if the task's reward says so, not if it is the row's."""

    task: str
    truths: list[Any]
    """The ground truths of the held-out rows."""

    def solved(self, row: int, response: str) -> float:
        return compute_score(self.task, response, self.truths[row])["score"]


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, **more: Any
) -> dict[str, float]:
    """Return the reward of the task `data_source`; the arguments are verl's. A Countdown response is an expression."""
    if data_source == "sort_digits":
        return sort_digits.compute_score(data_source, solution_str, ground_truth)
    if data_source == "tries":
        solution_str = solution_str.partition(END_OF_TRIES)[2]
    return reward.compute_score(data_source, f"<answer>{solution_str}</answer>", ground_truth)


def _sorted_digits(count: int, rng: random.Random) -> Iterator[tuple[str, Any, str, str]]:
    numbers = (f"{number:06}" for number in rng.sample(range(10**6), count + 100))
    texts = [text for text in numbers if len(set(text)) > 1][:count]  # equal digits would make the mistake right
    for text in texts:
        right = "".join(sorted(text))
        yield f"Sort {text}.", right, right, right[-1] + right[:-1]


def _countdown(difficulty: Difficulty) -> Callable[[int, random.Random], Iterator[tuple[str, Any, str, str]]]:
    def problems(count: int, rng: random.Random) -> Iterator[tuple[str, Any, str, str]]:
        found = 0
        for problem in generate(difficulty, count + count // 5, rng):
            wrong = first_again(problem.solution)
            if wrong != problem.solution and found < count:
                found += 1
                truth = {"target": problem.target, "numbers": list(problem.numbers)}
                question = f"{' '.join(map(str, problem.numbers))} to {problem.target}."
                yield question, truth, problem.solution, wrong

    return problems


def _tries(count: int, rng: random.Random) -> Iterator[tuple[str, Any, str, str]]:
    for question, truth, right, wrong in TASKS["countdown"].problems(count, rng):
        texts = []
        for _ in range(TRIES):
            a, b, c = rng.sample(truth["numbers"], 3)
            first, second = rng.choices((1, -1), k=2)
            texts.append(f"{a}{first * b:+}{second * c:+}={a + first * b + second * c}")
        tries = " ".join(texts) + END_OF_TRIES
        yield question, truth, tries + right, tries + wrong


def first_again(solution: str) -> str:
    """Return the solution with its first number in the place of its last, too."""
    first, *_, last = re.finditer(r"\d+", solution)
    return solution[: last.start()] + first[0] + solution[last.end() :]


TASKS = {
    task.name: task
    for task in (
        HabitTask("sort_digits", 8, 600, 0.1, _sorted_digits),
        HabitTask("countdown", 16, 900, 0.1, _countdown(Difficulty(numbers=3, max_number=50))),
        HabitTask("countdown4", 20, 900, 0.35, _countdown(Difficulty(numbers=4))),
        HabitTask("tries", 104, 900, 0.1, _tries),
    )
}
SHORT = tuple(name for name, task in TASKS.items() if task.response <= 20)
"""The tasks with answers of at most 20 tokens."""
