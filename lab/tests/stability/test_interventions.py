"""The share of OPOB's gain that its level has, on runs made by hand."""

import statistics
from pathlib import Path

import pandas as pd
import pytest

from lab.stability import interventions

ROOT = Path(__file__).parents[3]
AHEAD = {
    ("sort_digits_lag", 8): {
        "vcpo_ess": 0.0,
        "vcpo": 0.04,
        "mean_with_level": 0.03,
        "opob_without_level": 0.001,
        "vcpo_half_mean": 0.02,
        "vcpo_published": 0.05,
    },
    ("countdown_lag", 128): {"vcpo_ess": 0.0, "vcpo": -0.08, "mean_with_level": -0.08, "opob_without_level": 0.02},
    ("countdown_lag", 0): {"vcpo_ess": 0.0, "vcpo": 0.0001, "mean_with_level": 0.3},
}
SEEDS = range(21, 29)


@pytest.fixture
def runs() -> pd.DataFrame:
    """Return eight seeds of each method, whose differences vary by half a point."""
    rows = [
        {
            "task": task,
            "lag": lag,
            "method": method,
            "seed": seed,
            "accuracy": 0.4 + ahead + 0.01 * (seed % 3) + 0.003 * (seed * (i + 1) % 7 - 3),
            "collapsed": None,
            "level": ahead / 2,
        }
        for (task, lag), of in AHEAD.items()
        for i, (method, ahead) in enumerate(of.items())
        for seed in SEEDS
    ]
    return pd.DataFrame(rows).astype({"collapsed": "Int64"})


def test_only_places_with_an_effect_decide(runs: pd.DataFrame) -> None:
    sort, late, fresh = interventions.places(runs)
    assert (sort.has_effect, late.has_effect, fresh.has_effect) == (True, True, False)
    table, shares = interventions.tables([sort, late, fresh])
    assert [row[:2] for row in table.rows] == [["sort_digits", "8"], ["countdown", "128"], ["countdown", "0"]]
    assert table.rows[0][3].endswith("*") and table.rows[2][5] == "-"
    of = {row[0]: row[1:] for row in shares.rows}
    assert of["`mean_with_level`"][0] == "2" and 0.8 < float(of["`mean_with_level`"][1]) < 1
    assert -0.2 < float(of["`opob_without_level`"][1]) < 0 and of["`opob_without_level`"][3:] == ["1", "1"]
    assert of["`vcpo_half_mean`"][0] == "1"


def test_places_that_are_not_finished_are_left_out(runs: pd.DataFrame) -> None:
    """Without one seed of `vcpo`, without `vcpo_ess`, and with both but one seed of an intervention."""
    at = runs["task"] + runs["lag"].astype(str)
    partly = runs[
        ~((at == "sort_digits_lag8") & (runs["method"] == "vcpo") & (runs["seed"] == 28))
        & ~((at == "countdown_lag128") & (runs["method"] == "vcpo_ess"))
        & ~((at == "countdown_lag0") & (runs["method"] == "mean_with_level") & (runs["seed"] == 21))
    ]
    (place,) = interventions.places(partly)
    assert (place.task, place.lag) == ("countdown_lag", 0) and place.differences.keys() == {"vcpo"}


def test_a_run_that_ended_early_has_failed_the_rest(tmp_path: Path) -> None:
    steps = range(0, 150, 10)
    curve = pd.DataFrame({"step": steps, "val_accuracy": 0.4, "finite": 1, "method": "vcpo", "lag": 8, "seed": 21})
    for lr, task in ((1e-4, "a"), (3e-4, "b")):
        (tmp_path / task / "runs").mkdir(parents=True)
        curve.assign(lr=lr, baseline=0.3, reward=0.4).to_parquet(tmp_path / task / "runs/one.parquet")
    (run,) = interventions.collected([tmp_path / task for task in "abc"], [21]).to_dict("records")
    assert run["task"] == "countdown_lag" and run["accuracy"] == pytest.approx(0.4 * 14 / 30, abs=1e-4)


def test_the_report_of_a_file(runs: pd.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs.to_csv(tmp_path / "runs.csv", index=False)
    assert interventions.main(["--report", str(tmp_path / "runs.csv"), "--out", str(tmp_path / "out")]) == 0
    assert "sort_digits" in capsys.readouterr().out
    assert (tmp_path / "out/interventions.png").stat().st_size > 10_000
    written = pd.read_csv(tmp_path / "out/interventions.csv").astype({"collapsed": "Int64"})
    pd.testing.assert_frame_equal(written, runs)
    assert interventions.main(["--runs", *[str(tmp_path / name) for name in "abc"]]) == 2
    assert "predictions.md" in capsys.readouterr().err


def test_what_the_pages_say_follows_from_the_runs() -> None:
    found = interventions.places(pd.read_csv(ROOT / interventions.PUBLISHED).astype({"collapsed": "Int64"}))
    assert len(found) == 12 and all(len(place.differences) == len(interventions.COMPARED) for place in found)
    share = statistics.mean(place.share(interventions.MEAN_WITH_LEVEL) for place in found if place.has_effect)
    most = max(place.differences[interventions.OPOB_WITHOUT_LEVEL].mean for place in found)
    page = " ".join((ROOT / "docs/measurements/stability.md").read_text().split())
    assert f"has {100 * share:.0f} % of OPOB's gain or loss" in page and f"nowhere more than {most:.1f} points" in page
    half = [place.differences[interventions.HALF_MEAN].mean for place in found]
    assert f"at all 12 tasks and lags, by {min(half):.1f} to {max(half):.1f} points" in page
    predictions = (ROOT / "lab/stability/predictions.md").read_text()
    for row in interventions.tables(found)[0].rows:
        assert f"| {' | '.join(row)} |".replace("*", r"\*") in predictions
