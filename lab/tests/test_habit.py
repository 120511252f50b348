"""A wrong habit: the tasks, the tables on runs made by hand, and what was published."""

import random
from pathlib import Path

import pandas as pd
import pytest

from lab.habit import __main__ as command
from lab.habit.report import METHODS, tables
from lab.habit.tasks import ANSWERS, RIGHT_SHARE, TASKS, Answers, compute_score, first_again, other_operator
from recipe.warm_start.rows import load_answered_rows


@pytest.mark.parametrize(
    ("solution", "other", "again"),
    [
        ("3+17-4", "3+17+4", "3+17-3"),
        ("12-(5-2)", "12-(5+2)", "12-(5-12)"),
        ("1-(2-3)+40", "1-(2-3)-40", "1-(2-3)+1"),
    ],
)
def test_the_mistakes_of_countdown(solution: str, other: str, again: str) -> None:
    assert (other_operator(solution), first_again(solution)) == (other, again)


@pytest.mark.parametrize("name", TASKS)
def test_the_most_taught_answer_is_wrong(name: str, tmp_path: Path) -> None:
    problems = list(TASKS[name].problems(300, random.Random(1)))
    assert len({question for question, *_ in problems}) == 300
    for _, truth, right, _ in problems:
        assert compute_score(name, right, truth)["score"] == 1
    mistaken = [compute_score(name, wrong, truth)["score"] for _, truth, _, wrong in problems]
    assert sum(mistaken) <= 0.08 * len(mistaken), "two equal numbers can make a mistake right"


def test_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for count in ("HELD_OUT", "TRAINED"):
        monkeypatch.setattr(f"lab.habit.tasks.{count}", 40)
    monkeypatch.setattr("lab.habit.tasks.TAUGHT", 1000)
    TASKS["sort_digits"].write_rows(tmp_path / "rows")
    of = {split: pd.read_parquet(tmp_path / f"rows/{split}.parquet") for split in ("val", "train", "lesson")}
    prompts = [{chat[0]["content"] for chat in rows["prompt"]} for rows in of.values()]
    assert list(map(len, prompts)) == [40, 40, 1000] and len(set.union(*prompts)) == 1080
    truth = [model["ground_truth"] for model in of["lesson"]["reward_model"]]
    assert (of["lesson"][ANSWERS] == truth).mean() == pytest.approx(RIGHT_SHARE, abs=0.03)
    rows = load_answered_rows(tmp_path / "rows/lesson.parquet", ANSWERS)
    lesson = Answers(rows.taught, rows.held_out, "sort_digits", truth[-len(rows.held_out) :])
    assert lesson.solved(0, lesson.truths[0]) == 1 and lesson.solved(0, lesson.truths[0][::-1]) == 0


def runs_of(method: str, lr: float, accuracy: float, task: str = "countdown") -> list[dict[str, object]]:
    """Return a run for each of three first policies."""
    return [
        {
            **{"task": task, "policy": policy, "method": method, "lag": 8, "lr": lr, "seed": 31, "greedy_before": 0.1},
            **{"start": 0.1, "accuracy": accuracy + 0.01 * (policy * len(method) % 3), "end": accuracy},
            **{"collapse_step": 100.0 if method == "none" else None, "level": None if method == "none" else -0.1},
            **{"last_accuracy": accuracy, "last_greedy": accuracy, "last_pass": 0.9, "last_entropy": 0.1},
        }
        for policy in range(3)
    ]


RUNS = pd.DataFrame(
    [
        *runs_of("none", 1e-4, 0.2),
        *runs_of("none", 3e-4, 0.1),
        *runs_of("vcpo_ess", 1e-4, 0.3),
        *runs_of("vcpo_ess", 3e-4, 0.5),
        *runs_of("vcpo_ess", 3e-4, 0.5, "sort_digits"),
    ]
)


def test_the_tables() -> None:
    accuracies, tests = tables(RUNS)
    assert [row[:5] for row in accuracies.rows] == [
        ["`countdown`", "8", "`none`", "0.0001", "3"],
        ["`countdown`", "8", "`vcpo_ess`", "0.0003", "3"],
        ["`sort_digits`", "8", "`vcpo_ess`", "0.0003", "3"],
    ]
    assert accuracies.rows[0][-2:] == ["-", "3"] and accuracies.rows[1][-2:] == ["-0.10", "0"]
    ((task, lag, method, pairs, points, *_, p, seen),) = tests.rows
    assert (task, lag, method, pairs) == ("`countdown`", "8", "`none`", "3")
    assert float(points) == pytest.approx(-30, abs=2) and float(p) < 0.01 and 0 < float(seen) < 20


def test_the_report_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RUNS.to_csv(tmp_path / "runs.csv", index=False)
    assert command.main(["--report", str(tmp_path / "runs.csv"), "--out", str(tmp_path / "out")]) == 0
    assert "vcpo_ess" in capsys.readouterr().out and len(pd.read_csv(tmp_path / "out/habit.csv")) == len(RUNS)
    assert command.main(["--report", str(tmp_path / "none.csv")]) == 2
    assert "none.csv" in capsys.readouterr().err


def test_the_methods_are_there(tmp_path: Path) -> None:
    from lab.simulator.level import BASES
    from lab.stability.preset import METHODS as OF_THE_SIMULATOR

    assert set(METHODS) <= {*OF_THE_SIMULATOR, *BASES}
