"""What the comparison prints and draws, on runs made by hand."""

import json
from pathlib import Path

import pandas as pd
import pytest

from lab.simulator.grid import Folder, GridRun
from lab.stability import __main__ as comparison
from lab.stability import report as stability_report
from lab.stability.published import publish, read_curves
from lab.stability.report import ALL, contrasts_of, make_report, of_tasks, shifts_of, write
from lab.stability.tables import SYNCHRONOUS, Table, all_contrasts, shift_table
from lab.tests.stability.curves import curve

STEPS = 80


_OF_SEEDS = {"vcpo": (2, 1, 3), "ppo": (1, 3, 2), "none": (3, 2, 1)}
"""Points that each seed adds, in another order for each method: (1, 2, 3) for others."""


@pytest.fixture(scope="module")
def curves() -> pd.DataFrame:
    def run(method: str, lag: int, seed: int, end: float, lr: float = 1e-3) -> pd.DataFrame:
        end += 0.01 * _OF_SEEDS.get(method, (1, 2, 3))[seed - 1]
        return curve([0.2, 0.3, 0.3, 0.3, *[end] * 5], method=method, lag=lag, seed=seed, lr=lr)

    ends = {("none", 0): 0.5, ("none", 32): 0.0, ("vcpo_ess", 32): 0.45, ("vcpo", 32): 0.44, ("ppo", 32): 0.40}
    runs = [run(method, lag, seed, end) for (method, lag), end in ends.items() for seed in (1, 2, 3)]
    runs += [
        run(method, 32, seed, end, 3e-3) for method, end in (("vcpo_ess", 0.4), ("vcpo", 0.2)) for seed in (1, 2, 3)
    ]
    return pd.concat(runs, ignore_index=True)


def test_the_table(curves: pd.DataFrame) -> None:
    (table,) = of_tasks({"countdown_lag": make_report(curves, STEPS)})
    synchronous, *methods = [list(row) for row in table.rows]
    assert table.columns[:4] == ["method", "k = 0", "k = 32", "less `vcpo_ess`"], "no lag twice"
    assert synchronous[:4] == [SYNCHRONOUS, "43.8 %", "52.0 %", "+5.0 (+2.7 to +7.3)"]
    assert [row[0] for row in methods] == ["`vcpo_ess`", "`vcpo`", "`ppo`", "`none`"], "the best first"
    # six tests: of three methods the accuracy, paired by seed, and the collapses
    assert methods[1][2:] == ["46.0 %", "-1.0 (-3.5 to +1.5)", "0.676", "0 of 3 (0 to 71 %)"]
    assert methods[2][4] == "0.060" and methods[3][4:] == ["0.004", "3 of 3 (29 to 100 %)"]


def test_the_numbers_and_the_figures(curves: pd.DataFrame, tmp_path: Path) -> None:
    files = write({"countdown_lag": make_report(curves, STEPS)}, tmp_path)
    assert [file.name for file in files] == ["predictors.png", "contrasts.csv", "tables.csv"]
    assert files[0].stat().st_size > 10_000
    rows = pd.read_csv(files[-1]).set_index(["method", "lag", "lr", "number"])
    assert set(rows["task"]) == {"countdown"} and set(rows["runs"]) == {3}
    of = ["chosen", "value", "low", "high"]
    assert list(rows.loc[("vcpo", 32, 1e-3, "after step k"), of]) == [1, 46.0, 43.5, 48.5]
    assert list(rows.loc[("none", 32, 1e-3, "collapsed"), of]) == [1, 100.0, 29.2, 100.0]
    assert list(rows.loc[("vcpo", 32, 3e-3, "collapsed"), of]) == [0, 0.0, 0.0, 70.8]


def test_tasks_are_compared_one_by_one(
    curves: pd.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [published(curves, tmp_path / f"{task}.parquet", task=task) for task in ("countdown_lag", "sort_lag")]
    assert stability_report.main([*map(str, files), "--out", str(tmp_path / "out")]) == 0
    page = capsys.readouterr().out
    assert "Points ahead" in page and "countdown_lag: Accuracy after step k" in page
    reports = {task: make_report(of, STEPS) for task, of in read_curves(files).items()}
    *_, overview = of_tasks(reports)
    ahead = {row[0]: row[1:] for row in overview.rows}
    assert ahead["`vcpo_ess`"] == ["0", "0", "0 of 12"] and ahead["`vcpo`"] == ["(-1.0)", "(-1.0)", "0 of 12"]
    assert ahead["`none`"] == ["-45.0", "-45.0", "6 of 6"]


def test_every_contrast_has_its_power(curves: pd.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = all_contrasts(contrasts_of({"countdown_lag": make_report(curves, STEPS)})).set_index(["compared", "method"])
    vcpo = rows.loc[("accuracy at the best rate", "vcpo")]
    assert list(vcpo[["task", "lags", "less", "seeds", "points"]]) == ["countdown", "32", "vcpo_ess", 3, -1.0]
    assert vcpo["seen_at_power_80"] == pytest.approx(3.3, abs=0.1) and vcpo["verdict"] == "not significantly different"
    assert list(rows.loc[("collapsed runs", "none"), ["task", "points", "p"]]) == [ALL, 100.0, 0.012]
    file = published(curves, tmp_path / "curves.parquet", task="countdown_lag")
    assert stability_report.main([str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])[0]["task"] == "countdown"


def test_the_level_of_a_baseline_and_its_gain(curves: pd.DataFrame, tmp_path: Path) -> None:
    """From the steps of new runs, and from the one number that is published of each run."""
    level = curves["lag"].map({0: 0.0, 32: 0.1}) - 0.01 * curves["seed"]
    measured = curves.assign(reward=0.5, baseline=0.5 + level)
    file = published(measured, tmp_path / "curves.parquet", task="countdown_lag")
    for made in (measured, read_curves([file])["countdown_lag"]):
        points = shifts_of({"countdown_lag": make_report(made, STEPS)})
        assert list(points["method"]) == ["vcpo", "vcpo"] and list(points["lag"]) == [32, 32]
        assert list(points["shift"]) == pytest.approx([0.08, 0.08])
        assert list(points["gain"]) == pytest.approx([-1.0, -20.0])
        assert isinstance(shift_table(points), Table)
    files = write({"countdown_lag": make_report(measured, STEPS)}, tmp_path)
    assert tmp_path / "shift.png" in files and (tmp_path / "shift.png").stat().st_size > 10_000


def test_runs_that_cannot_be_compared_are_refused(
    curves: pd.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = published(curves, tmp_path / "ours.parquet", task="countdown_lag", first_policy="ab")
    for name, settings, said in (
        ("other_policy", {"first_policy": "cd"}, "another first policy: its weights are cd, those here ab"),
        ("other_steps", {"first_policy": "ab", "overrides": ["x=1"]}, "holds runs of other settings"),
    ):
        theirs = published(curves.assign(seed=9), tmp_path / f"{name}.parquet", task="countdown_lag", **settings)
        assert stability_report.main([str(ours), str(theirs)]) == 2
        assert said in capsys.readouterr().err


def test_some_lags_are_reported_by_themselves(
    curves: pd.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = published(curves, tmp_path / "both.parquet", task="countdown_lag")
    assert set(read_curves([file], [32])["countdown_lag"]["lag"]) == {32}
    assert stability_report.main([str(file), "--lags", "32", "64"]) == 2
    assert "--lags 64: the files have runs at 0, 32 only" in capsys.readouterr().err


def published(curves: pd.DataFrame, file: Path, task: str, **settings: object) -> Path:
    """As lab.stability writes them."""
    table = curves.copy()
    table.attrs["settings"] = {"task": task} | settings
    publish({task: table}, file)
    return file


def test_the_command_reads_files(
    curves: pd.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = published(curves, tmp_path / "curves.parquet", task="countdown_lag")
    assert stability_report.main([str(file), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "tables.csv").is_file() and "Accuracy after step k" in capsys.readouterr().out
    assert stability_report.main([str(file), str(file)]) == 2
    assert "the same run twice" in capsys.readouterr().err
    (tmp_path / "broken.parquet").write_text("no table")
    assert stability_report.main([str(tmp_path / "broken.parquet")]) == 2
    assert "broken.parquet: cannot be read" in capsys.readouterr().err
    pd.read_parquet(file).drop(columns="seed").to_parquet(file)
    assert stability_report.main([str(file)]) == 2
    assert "no column seed" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert stability_report.main([]) == 2


def test_the_comparison_reports_what_is_there(
    curves: pd.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "models" / "countdown-lag"
    model.mkdir(parents=True)
    (model / "warm_start.json").write_text('{"settings": {"seed": 0}}')
    (model / "model.safetensors").write_bytes(b"weights")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparison, "prepare", lambda *_: None)
    command = ["--so-far", "--steps", str(STEPS), "--lags", "0", "32", "--seeds", "1", "2", "3", "--lr", "1e-3", "3e-3"]
    assert comparison.main(command) == 2
    assert "has no finished run" in capsys.readouterr().err
    for (method, lag, lr, seed), steps in curves.groupby(["method", "lag", "lr", "seed"]):
        Folder(Path("outputs/stability"), "countdown_lag").write(GridRun(method, lag, seed, lr), steps)
    assert comparison.main(command) == 0
    assert "Accuracy after step k" in capsys.readouterr().out
    (published,) = read_curves([Path("outputs/stability/curves.parquet")]).values()
    assert len(published) == len(curves)


def test_a_lag_as_long_as_a_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        comparison.main(["--lags", "0", "200", "--steps", "200"])
    assert ended.value.code == 2
    assert "--lags 200: a run of 200 steps has no evaluation after that step" in capsys.readouterr().err
