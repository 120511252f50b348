"""A wrong habit: the tasks, the command, and the tables on runs made by hand."""

import random
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from lab.habit import __main__ as command
from lab.habit.report import tables
from lab.habit.tasks import ANSWERS, TASKS, Answers, compute_score, first_again
from recipe.warm_start.rows import load_answered_rows

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("solution", "mistaken"), [("3+17-4", "3+17-3"), ("12-(5-2)", "12-(5-12)"), ("1-(2-3)+40", "1-(2-3)+1")]
)
def test_the_mistake_of_countdown(solution: str, mistaken: str) -> None:
    assert first_again(solution) == mistaken


@pytest.mark.parametrize("name", TASKS)
def test_the_taught_mistake_is_never_right(name: str) -> None:
    problems = list(TASKS[name].problems(300, random.Random(1)))
    assert len({question for question, *_ in problems}) == 300
    for _, truth, right, wrong in problems:
        assert compute_score(name, right, truth)["score"] == 1 and compute_score(name, wrong, truth)["score"] == 0


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Runs the command in a folder of its own, with few problems, short lessons and short runs."""
    for name, count in {"HELD_OUT": 24, "TRAINED": 40, "TAUGHT": 1000}.items():
        monkeypatch.setattr(f"lab.habit.tasks.{name}", count)
    monkeypatch.setattr(command, "STEPS", 12)
    monkeypatch.setitem(TASKS, "sort_digits", replace(TASKS["sort_digits"], lesson_steps=2))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", TASKS)
def test_the_rows(name: str, small: Path) -> None:
    TASKS[name].write_rows(small / "rows")
    of = {split: pd.read_parquet(small / f"rows/{split}.parquet") for split in ("val", "train", "lesson")}
    prompts = [{chat[0]["content"] for chat in rows["prompt"]} for rows in of.values()]
    assert list(map(len, prompts)) == [24, 40, 1000] and len(set.union(*prompts)) == 1064
    truths = [model["ground_truth"] for model in of["lesson"]["reward_model"]]
    rows = load_answered_rows(small / "rows/lesson.parquet", ANSWERS)
    lesson = Answers(rows.taught, rows.held_out, name, truths[-len(rows.held_out) :])
    right = [lesson.solved(row, answer) for row, (_, answer) in enumerate(rows.held_out)]
    taught = [compute_score(name, *pair)["score"] for pair in zip(of["lesson"][ANSWERS], truths, strict=True)]
    assert sum(taught) / len(taught) == pytest.approx(TASKS[name].right_share, abs=0.05)
    assert right == taught[-len(right) :]


def test_the_command_makes_runs_and_goes_on(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command_line = ["--tasks", "sort_digits", "--lags", "1", "--lr", "1e-5", "--seeds", "31", "--workers", "1"]
    assert command.main([*command_line, "--methods", "none"]) == 0
    (row,) = pd.read_csv("outputs/habit/habit.csv").to_dict("records")
    assert (row["task"], row["seed"], row["method"], row["lag"], row["lr"]) == ("sort_digits", 31, "none", 1, 1e-5)
    assert row["first_greedy"] == 0 and 0 <= row["end"] <= 1
    assert command.main([*command_line, "--methods", "none", "vcpo_ess", "--so-far"]) == 0, "runs that are there"
    assert command.main([*command_line, "--methods", "vcpo_ess", "--so-far"]) == 2
    assert "none of these runs is finished" in capsys.readouterr().err


def runs_of(method: str, lr: float, accuracy: float, task: str = "countdown") -> list[dict[str, object]]:
    """Return a run for each of three seeds."""
    return [
        {
            **{"task": task, "seed": seed, "lag": 8, "method": method, "lr": lr},
            **{"first_accuracy": 0.1, "first_greedy": 0.02, "first_pass": 0.3, "first_entropy": 0.5},
            **{"accuracy": accuracy + 0.01 * (seed * len(method) % 3), "end": 0.01 if method == "none" else accuracy},
            **{"collapse_step": 100.0 if method == "none" else None, "level": None if method == "none" else -0.1},
            **({} if method == "none" else {"spread": 1.6}),
            **{"last_accuracy": accuracy, "last_greedy": accuracy, "last_pass": 0.9, "last_entropy": 0.1},
        }
        for seed in (31, 32, 33)
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
    overview, accuracies, tests = tables(RUNS)
    assert overview.columns[3:] == ["`none`", "`vcpo_ess`"]
    assert overview.rows[1] == ["`sort_digits`", "8", "3", "", "51.0"]
    assert [row[:4] for row in accuracies.rows] == [
        ["`countdown`", "8", "`none`", "0.0001"],
        ["`countdown`", "8", "`vcpo_ess`", "0.0003"],
        ["`sort_digits`", "8", "`vcpo_ess`", "0.0003"],
    ]
    assert [row[-4:] for row in accuracies.rows[:2]] == [
        ["0 of 3", "-", "-", "6 of 6"],
        ["3 of 3", "-0.10", "1.6", "0 of 6"],
    ]
    assert "countdown 2.0 and 10.0" in accuracies.title
    ((task, lag, method, pairs, points, *_, p, seen),) = tests.rows
    assert (task, lag, method, pairs) == ("`countdown`", "8", "`none`", "3")
    assert float(points) == pytest.approx(-30, abs=2) and float(p) < 0.01 and 0 < float(seen) < 20


def test_a_rate_is_chosen_by_seeds_that_all_rates_have() -> None:
    """Catches a rate that wins because its only run is that of an easy first policy."""
    more = pd.DataFrame(runs_of("vcpo_ess", 1e-3, 0.4))
    more.loc[2, ["accuracy", "seed"]] = 0.99, 34  # the mean of all three is the highest
    runs = pd.concat([RUNS[RUNS["task"] == "countdown"], more])
    assert [row[3] for row in tables(runs)[1].rows] == ["0.0001", "0.0003"]


def test_the_report_of_a_file(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RUNS.to_csv(small / "runs.csv", index=False)
    assert command.main(["--report", str(small / "runs.csv")]) == 0
    assert "vcpo_ess" in capsys.readouterr().out and not Path("outputs").exists(), "nothing is written"
    assert command.main(["--report", str(small / "none.csv")]) == 2
    assert "none.csv" in capsys.readouterr().err


@pytest.mark.parametrize("published", [command.PUBLISHED, command.PUBLISHED.with_name("long_answers.csv")])
def test_the_page_has_the_published_runs(published: Path) -> None:
    page = (ROOT / "docs/measurements/README.md").read_text()
    for row in tables(pd.read_csv(ROOT / published))[0].rows:
        assert f"| {' | '.join(row)} |" in page
