"""The share of OPOB's gain that its level has, on runs made by hand."""

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
        "half_mean": 0.02,
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
    assert of["`half_mean`"][0] == "1"


def test_the_report_of_a_file(runs: pd.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs.to_csv(tmp_path / "runs.csv", index=False)
    assert interventions.main(["--report", str(tmp_path / "runs.csv"), "--out", str(tmp_path / "out")]) == 0
    assert "sort_digits" in capsys.readouterr().out
    assert (tmp_path / "out/interventions.png").stat().st_size > 10_000
    written = pd.read_csv(tmp_path / "out/interventions.csv").astype({"collapsed": "Int64"})
    pd.testing.assert_frame_equal(written, runs)
    assert interventions.main(["--runs", *[str(tmp_path / name) for name in "abc"]]) == 2
    assert "predictions.md" in capsys.readouterr().err
