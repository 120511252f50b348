"""A task whose responses grow in training: lists of candidates, of which one has to be the solution.

The problem is `Find x with 17 x = 23.`, modulo 41. A tiny model cannot divide modulo 41, so only a longer list has a
better chance. A list ends with a full stop; a list that the limit cuts has none, and is never right.
"""

import random
import re
from pathlib import Path
from typing import Any

import pandas as pd

from recipe.tasks.rows import make_row
from recipe.warm_start.rows import AnsweredRows
from verl_vcpo.common.whole_file import whole_folder

MODULUS, HELD_OUT, LISTS, LONGEST = 41, 256, 6, 6
"""Held-out problems; lists that the first policy is taught for each of the other problems, of 1 to LONGEST numbers."""
ANSWERS = "list"
"""The column with a list for the first policy, most often a wrong one."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> dict[str, float]:
    """Return 1 for a finished list that has the solution, else 0; the arguments are verl's."""
    *candidates, end = solution_str.split() or [""]
    right = float(end == "." and ground_truth in candidates)
    return {"score": right, "acc": right}


class Lists(AnsweredRows):
    """The rows that teach the first policy; a response is right if its list has the solution, not if it is the row's
    list."""

    def solved(self, row: int, response: str) -> float:
        factor, product = map(int, re.findall(r"\d+", self.held_out[row][0][0]["content"]))
        return compute_score("", response, str(pow(factor, -1, MODULUS) * product % MODULUS))["score"]


def write_rows(folder: Path) -> None:
    """Write train.parquet and val.parquet, which share no problem, into a new folder."""
    rng = random.Random(0)
    problems = [(factor, x) for factor in range(1, MODULUS) for x in range(1, MODULUS)]
    rng.shuffle(problems)
    splits = {"val": problems[:HELD_OUT], "train": problems[HELD_OUT:] * LISTS}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with whole_folder(folder) as partial:
        for split, of in splits.items():
            rows = [
                make_row("search", f"Find x with {factor} x = {factor * x % MODULUS}.", str(x), split, i)
                | {ANSWERS: _random_list(rng)}
                for i, (factor, x) in enumerate(of)
            ]
            pd.DataFrame(rows).to_parquet(partial / f"{split}.parquet")


def _random_list(rng: random.Random) -> str:
    return " ".join(str(rng.randrange(1, MODULUS)) for _ in range(rng.randint(1, LONGEST))) + " ."
