"""Right and wrong answers, scored by our rewards and by verl's: `python -m tests.tasks.scores [--json]`.

answers.jsonl has, for each, the data source, the ground truth, the response and the score that is right.
"""

import argparse
import contextlib
import io
import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from recipe.tasks import reward

Row = dict[str, Any]
_FILE = Path(__file__).with_name("answers.jsonl")
OURS = "ours"


def read_rows() -> list[Row]:
    """All rows. `reported`: from public reports of faults; the others are further forms of the same kinds."""
    return [json.loads(line) for line in _FILE.read_text(encoding="utf-8").splitlines()]


def score(row: Row) -> float:
    """Our reward's score of a row."""
    return reward.compute_score(row["data_source"], row["response"], row["truth"])["score"]


def scorers(task: str) -> dict[str, Callable[[Row], float]]:
    """verl's scorers of a task's answers: what each gives for a row. A scorer that raises gives nothing."""
    from verl.utils.reward_score import gsm8k, math_dapo, math_reward, math_verify, prime_math

    if task == "gsm8k":
        return {
            "gsm8k, strict": lambda row: gsm8k.compute_score(row["response"], row["truth"]),
            "gsm8k, flexible": lambda row: gsm8k.compute_score(row["response"], row["truth"], method="flexible"),
        }
    if task == "math":
        return {
            "math_reward": lambda row: math_reward.compute_score(row["response"], row["truth"]),
            "math_dapo": lambda row: math_dapo.compute_score(row["response"], row["truth"], True)["acc"],
            "math_verify": lambda row: math_verify.compute_score(row["response"], row["truth"]),
            "prime_math": lambda row: prime_math.compute_score(row["response"], row["truth"])[0],
        }
    return {}


def counts(rows: list[Row], scored: Callable[[Row], float]) -> dict[str, list[int]]:
    """{"right": [scored 1, all], "wrong": [scored 0, all]}."""

    def quiet(row: Row) -> float:
        """Return the score of another scorer; an answer that the scorer raises for has no reward."""
        try:
            return float(scored(row))
        except Exception:
            return 0.0

    with ThreadPoolExecutor(4 if scored is score else 1) as threads, contextlib.redirect_stdout(io.StringIO()):
        given = list(threads.map(scored if scored is score else quiet, rows))
    found: dict[str, list[int]] = {}
    for word, right in (("right", 1), ("wrong", 0)):
        of = [value for row, value in zip(rows, given, strict=True) if row["right"] == right]
        found[word] = [sum(value == right for value in of), len(of)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.tasks.scores", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the counts as one JSON line, last")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    table = []
    print("| answers | task | scorer | right, scored 1 | wrong, scored 0 |\n| -- | -- | -- | -- | -- |")
    for reported in (True, False):
        for task in ("gsm8k", "math", "countdown"):
            rows = [
                r for r in read_rows() if r["data_source"].startswith(task) and r.get("reported", False) == reported
            ]
            for name, scored in {OURS: score, **scorers(task)}.items():
                found = counts(rows, scored)
                table.append({"reported": reported, "task": task, "scorer": name, **found})
                right, wrong = (" of ".join(map(str, found[word])) for word in ("right", "wrong"))
                print(f"| {'reported' if reported else 'added'} | {task} | {name} | {right} | {wrong} |", flush=True)
    if arguments.json:
        print(json.dumps(table))


if __name__ == "__main__":
    main()
