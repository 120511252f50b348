"""One method or the pair: whose runs are compared, how differences are averaged, and the published numbers."""

from pathlib import Path

import pandas as pd
import pytest

from lab.stability import decision

ROOT = Path(__file__).parents[3]


def rows(method: str, accuracy: float, lags: tuple[int, ...] = tuple(decision.PAIR), task: str = "a") -> pd.DataFrame:
    """Return a row for each lag, rate and seed: a point more at the better rate, and a tenth more with each seed."""
    of = [
        {"task": f"{task}_lag", "lag": lag, "method": method, "lr": lr, "seed": seed, "collapsed": collapsed}
        | {"accuracy": accuracy + (0.01 if collapsed is None else 0.0) + 0.001 * seed}
        for lag in lags
        for lr, collapsed in ((1e-4, None), (3e-4, 7))
        for seed in decision.SEEDS
    ]
    return pd.DataFrame(of).astype({"collapsed": "Int64"})


def test_a_candidate_is_compared_with_the_method_recommended_for_each_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decision, "TASKS", ("a_lag", "b_lag"))
    guide = [
        *(rows("vcpo_minibatch", 0.40, (8, 32), task) for task in "ab"),
        *(rows("vcpo_minibatch", 0.90, (64, 128), task) for task in "ab"),
        *(rows("topr", 0.30, (8, 32), task) for task in "ab"),
        *(rows("topr", 0.60, (64, 128), task) for task in "ab"),
        *(rows("vcpo_ess", 0.50, task=task) for task in "ab"),
    ]
    monkeypatch.setattr(decision, "published", lambda methods: pd.concat(guide))
    tilted = [rows("vcpo_half_mean", 0.55 if task == "a" else 0.57, task=task) for task in "ab"]
    candidate = pd.concat(tilted)
    candidate["accuracy"] += 0.001 * candidate["seed"] ** 2
    accuracies, differences, at_each_rate = decision.tables(candidate)
    assert [row[:2] for row in accuracies.rows] == [[task, str(lag)] for task in "ab" for lag in decision.PAIR]
    assert accuracies.columns[2:4] == ["`vcpo_half_mean`", "the pair"]
    assert [row[3] for row in accuracies.rows[:4]] == ["41.2", "41.2", "61.2", "61.2"], "at the better rate"
    pair, minibatch, topr, ess = (dict(zip(differences.columns, row, strict=True)) for row in differences.rows)
    mean_square = 0.75  # points: of the four seeds' squares
    for row, points in ((pair, 6.0), (minibatch, -9.0), (topr, 11.0), (ess, 6.0)):
        assert float(row["points"]) == pytest.approx(points + mean_square, abs=0.051)
        assert float(row["b"]) - float(row["a"]) == pytest.approx(2.0, abs=0.11)
    assert pair["less"] == "the pair" and pair["p (Holm)"] and not topr["p (Holm)"]
    assert pair["collapsed runs of both"] == "32, 32"
    assert float(pair["p"]) < 0.01
    columns = ["k", "rate", "runs", "`vcpo_half_mean`", "the pair", "`vcpo_minibatch`", "`topr`", "`vcpo_ess`"]
    assert at_each_rate.columns == columns
    assert at_each_rate.rows[0] == ["8", "1e-4", "8", "58.0, 0", "41.2, 0", "41.2, 0", "31.2, 0", "51.3, 0"]
    assert at_each_rate.rows[-1][:3] == ["128", "3e-4", "8"] and at_each_rate.rows[-1][4] == "60.2, 8"


def test_a_place_without_all_runs_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decision, "TASKS", ("a_lag",))
    monkeypatch.setattr(decision, "before_rivals", lambda: pd.concat([rows(name, 0.4) for name in rivals.others]))
    rivals = decision.COMPARISONS["rivals"]
    made = pd.concat([rows(name, 0.5) for name in rivals.candidates], ignore_index=True)
    last = made[(made["method"] == "p3o") & (made["lag"] == 128) & (made["seed"] == 4)].index[-1]
    assert [row[1] for row in decision.tables(made, rivals)[0].rows] == ["8", "32", "64", "128"]
    assert [row[1] for row in decision.tables(made.drop(last), rivals)[0].rows] == ["8", "32", "64"]
    made[made["seed"] == 1].to_csv(tmp_path / "few.csv")
    assert decision.main(["--of", "rivals", "--report", str(tmp_path / "few.csv")]) == 2
    assert "at no task and lag there are all runs of all candidates" in capsys.readouterr().err


@pytest.mark.parametrize("of", decision.COMPARISONS.values(), ids=lambda of: of.name)
def test_the_published_runs_of_the_others_are_all_there(of: decision.Comparison) -> None:
    places = [(task, lag) for task in decision.TASKS for lag in decision.PAIR]
    assert decision.finished(of.runs_of_others(), of.others) == places


def test_folders_without_a_run_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert decision.main(["--runs", *["nowhere"] * len(decision.TASKS)]) == 2
    assert "no such run" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", [name for name in decision.COMPARISONS if (ROOT / decision.PUBLISHED / f"{name}.csv").is_file()]
)
def test_the_page_has_the_published_runs(name: str) -> None:
    page = (ROOT / f"lab/stability/{name}.md").read_text()
    tables = decision.tables(pd.read_csv(ROOT / decision.PUBLISHED / f"{name}.csv"), decision.COMPARISONS[name])
    for table in tables[:2] if name == "decision" else tables:
        for row in table.rows:
            assert f"| {' | '.join(row)} |" in page
