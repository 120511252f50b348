"""Answers that grow: the task, the tables on runs made by hand, and what was published."""

from pathlib import Path

import pandas as pd
import pytest

from lab.truncated import __main__ as command
from lab.truncated import search
from lab.truncated.report import CASES, TIGHT, WIDE, Case, tables
from recipe.warm_start.rows import load_answered_rows

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("response", "score"),
    [("3 17 .", 1), (" 17 .", 1), ("17", 0), ("17 3", 0), ("1 7 .", 0), ("17 . 3", 0), (".", 0), ("", 0)],
)
def test_a_finished_list_with_the_solution_is_right(response: str, score: float) -> None:
    assert search.compute_score("search", response, "17") == {"score": score, "acc": score}


def test_the_rows(tmp_path: Path) -> None:
    search.write_rows(tmp_path / "search")
    of = {split: pd.read_parquet(tmp_path / f"search/{split}.parquet") for split in ("train", "val")}
    prompts = {split: {chat[0]["content"] for chat in rows["prompt"]} for split, rows in of.items()}
    assert len(prompts["val"]) == search.HELD_OUT and not prompts["val"] & prompts["train"]
    assert len(of["train"]) == search.LISTS * len(prompts["train"])
    rows = load_answered_rows(tmp_path / "search/train.parquet", search.ANSWERS)
    lists = search.Lists(rows.taught, rows.held_out)
    right = of["train"]["reward_model"].iloc[-len(rows.held_out)]["ground_truth"]
    assert lists.solved(0, f"{right} .") == 1 and lists.solved(0, f"{int(right) % 40 + 1} .") == 0


def runs_of(case: Case, last: float, truncated: float, seeds: tuple[int, ...] = (11, 12, 13)) -> pd.DataFrame:
    """Return runs of 200 steps whose accuracy is 0.1 up to step 100 and `last` afterwards."""
    rows = [
        {
            "seed": seed,
            "step": step,
            "val_accuracy": 0.1 if step <= 100 else last and last + 0.01 * (seed * len(case.method) % 5),
            "finite": 1,
            "response_length": 20.0 + step / 10,
            "truncated_share": truncated if step == 150 else 0.0,
            "ess_ratio": 1.0,
            "limit": case.limit,
            "truncated": case.truncated,
            "method": case.method,
            "lag": case.lag,
        }
        for seed in seeds
        for step in range(0, 201, 10)
    ]
    return pd.DataFrame(rows)


RUNS = pd.concat(
    [
        runs_of(Case(TIGHT, "train", "none"), 0.0, 0.98),
        runs_of(Case(TIGHT, "train", "vcpo"), 0.2, 0.1),
        runs_of(Case(WIDE, "train", "none"), 0.5, 0.0),
    ]
)


def test_the_tables() -> None:
    cases, tests = tables(RUNS)
    assert cases.rows[0] == ["`none`", "8", "48", "`train`", "0.0", "3 of 3", "38", "98"]
    assert [row[5] for row in cases.rows] == ["3 of 3", "0 of 3", "0 of 3"]
    assert [row[:2] for row in tests.rows] == [
        ["none, lag 8, limit 256, train", "none, lag 8, limit 48, train"],
        ["vcpo, lag 8, limit 48, train", "none, lag 8, limit 48, train"],
    ]
    assert float(tests.rows[0][2]) == pytest.approx(53.0, abs=0.1) and float(tests.rows[0][5]) < 0.01


def test_the_report_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RUNS.to_csv(tmp_path / "runs.csv", index=False)
    assert command.main(["--report", str(tmp_path / "runs.csv"), "--out", str(tmp_path / "out")]) == 0
    assert "3 of 3" in capsys.readouterr().out and (tmp_path / "out/truncated.png").stat().st_size > 10_000
    assert command.main(["--report", str(tmp_path / "none.csv"), "--out", str(tmp_path / "out")]) == 2
    assert "none.csv" in capsys.readouterr().err


def test_every_case_has_settings_that_are_accepted(tmp_path: Path) -> None:
    assert len(CASES) == len(set(map(str, CASES))) == 11
    assert {command.folder_of(case, tmp_path).path.name for case in CASES} == {
        *(f"limit{TIGHT}-{how}" for how in ("train", "mask", "drop", "penalty")),
        f"limit{WIDE}-train",
    }


def test_the_page_has_the_published_runs() -> None:
    page = (ROOT / "docs/measurements/README.md").read_text()
    for row in tables(pd.read_csv(ROOT / command.PUBLISHED))[0].rows:
        assert f"| {' | '.join(row)} |" in page
