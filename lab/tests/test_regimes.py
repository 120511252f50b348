"""The chart of regimes, on runs made by hand, and what its command makes."""

from pathlib import Path

import pandas as pd
import pytest

from lab.regimes import __main__ as command
from lab.regimes.chart import chart, judged, regimes
from lab.simulator.arithmetic import Arithmetic
from lab.simulator.grid import LAG_PART

ROOT = Path(__file__).parents[2]
LONG = Arithmetic(0.03, 2048)
TAILS = Arithmetic(0.03, 2048, "tails")


def made(accuracies: dict[tuple[Arithmetic | None, str], float]) -> pd.DataFrame:
    rows = [
        {
            "rms": of.rms if of else 0.0,
            "tokens": of.tokens if of else 0,
            "kind": of.kind if of else "normal",
            "lag": 8,
            "method": method,
            "seed": seed,
            "accuracy": accuracy + 0.01 * seed + 0.001 * (seed * len(method) % 3),
            "collapsed": 40 if accuracy < 0.1 else None,
            "lr_multiplier": 0.72 if method == LAG_PART else 0.5,
            "right": 0.8 if of else None,
        }
        for (of, method), accuracy in accuracies.items()
        for seed in (1, 2, 3, 4)
    ]
    return pd.DataFrame(rows).astype({"collapsed": "Int64"})


RUNS = made(
    {
        (None, "none"): 0.05,
        (None, "tis_seq"): 0.79,
        (None, "vcpo"): 0.80,
        (LONG, "tis_seq"): 0.40,
        (LONG, "vcpo"): 0.50,
        (LONG, LAG_PART): 0.70,
        (TAILS, LAG_PART): 0.70,
    }
)


def test_who_keeps_up() -> None:
    exact, long, tails = regimes(RUNS)
    assert tails.kind == "tails" and tails.of["none"] == exact.of["none"]
    assert (exact.rms, long.rms, long.tokens) == (0, 0.03, 2048)
    assert exact.of[LAG_PART] == exact.of["vcpo"] and long.of["none"] == exact.of["none"]
    up = {(test.regime.rms, test.method): test.keeps_up for test in judged([exact, long])}
    assert [name for (rms, name), keeps in up.items() if keeps and not rms] == ["tis_seq", "vcpo", LAG_PART]
    assert [name for (rms, name), keeps in up.items() if keeps and rms] == [LAG_PART]


def test_the_tables() -> None:
    table, factors, power = chart(RUNS)
    exact, long, tails = table.rows
    assert tails[1] == factors.rows[1][1] == "0.03 at 2,048, tails" and factors.rows[0][2:] == ["0.80", "0.72", "0.90"]
    assert exact[:3] == ["8", "exact", "1"] and long[1:3] == ["0.03 at 2,048", "0.16"]
    assert exact[3] == "7.6, 4 of 4 collapsed" and long[-1] == "lag part"
    assert power.rows[0][1] == "4" and float(power.rows[0][2]) < 3


def test_the_same_runs_are_made_once() -> None:
    wanted = command.regimes((0.003, 0.03), (32, 2048))
    assert wanted == [None, LONG], "the others hardly differ from exact arithmetic"
    assert command.methods_of(None) == ("none", "tis_seq", "vcpo")
    assert command.methods_of(LONG) == ("tis_seq", "vcpo", LAG_PART)


def test_the_report_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RUNS.to_csv(tmp_path / "runs.csv", index=False)
    out = tmp_path / "out"
    assert command.main(["--report", str(tmp_path / "runs.csv"), "--out", str(out)]) == 0
    assert "0.03 at 2,048" in capsys.readouterr().out
    assert (out / "regimes.png").stat().st_size > 10_000
    pd.testing.assert_frame_equal(pd.read_csv(out / "regimes.csv"), pd.read_csv(tmp_path / "runs.csv"))
    assert command.main(["--report", str(tmp_path / "none.csv"), "--out", str(out)]) == 2
    assert "none.csv" in capsys.readouterr().err


def test_the_page_has_the_published_runs() -> None:
    page = (ROOT / "docs/measurements/long-responses.md").read_text()
    runs = pd.read_csv(ROOT / command.PUBLISHED / "regimes.csv").astype({"collapsed": "Int64"})
    for row in chart(runs)[0].rows:
        assert f"| {row[1]} | {' | '.join(row[3:-1])} |" in page
    assert f"{len(runs)} of 144 runs" in page
