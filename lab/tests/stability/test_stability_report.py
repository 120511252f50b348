"""What the comparison prints and draws, on runs made by hand."""

import json
from pathlib import Path

import pandas as pd
import pytest

from lab import stability_report
from lab.simulator.grid import GridRun, write_run
from lab.stability import __main__ as comparison
from lab.stability.figures import beside
from lab.stability.real_stack import outcomes, table
from lab.stability.report import as_json, make_report, markdown, of_all_tasks, read_curves, write
from lab.stability.tables import SYNCHRONOUS, across
from lab.tests.stability.curves import curve

STEPS = 80


@pytest.fixture(scope="module")
def curves() -> pd.DataFrame:
    def run(method: str, lag: int, seed: int, end: float, lr: float = 1e-3) -> pd.DataFrame:
        return curve([0.2, 0.3, 0.3, 0.3, *[end + 0.01 * seed] * 5], method=method, lag=lag, seed=seed, lr=lr)

    ends = {("none", 0): 0.5, ("none", 32): 0.0, ("vcpo_ess", 32): 0.45, ("vcpo", 32): 0.44, ("ppo", 32): 0.40}
    runs = [run(method, lag, seed, end) for (method, lag), end in ends.items() for seed in (1, 2, 3)]
    runs += [
        run(method, 32, seed, end, 3e-3) for method, end in (("vcpo_ess", 0.4), ("vcpo", 0.2)) for seed in (1, 2, 3)
    ]
    return pd.concat(runs, ignore_index=True)


def test_the_tables(curves: pd.DataFrame) -> None:
    report = make_report(curves, STEPS)
    tables = {table.title: [list(row) for row in table.rows] for table in report.tables}
    synchronous, *methods = tables["Accuracy after step k"]
    assert report.tables[0].columns[:4] == ["method", "k = 0", "k = 32", "less `vcpo_ess`"], "no lag twice"
    assert synchronous[:4] == [SYNCHRONOUS, "43.8 %", "52.0 %", "+5.0 (+2.7 to +7.3)"]
    assert [row[0] for row in methods] == ["`vcpo_ess`", "`vcpo`", "`ppo`", "`none`"], "the best first"
    assert methods[1][2:6] == ["46.0 %", "-1.0 (-3.3 to +1.3)", "0.288", "cannot be told apart"]
    assert methods[2][4:6] == ["0.007", "worse"] and methods[3][5:] == ["worse", "3 of 3 (29 to 100 %)"]
    best, other = tables["Robustness at k = 32: the mean over the learning rates"]
    assert best[:4] == ["`vcpo_ess`", "47.0 %", "42.0 %", "44.5 %"] and other[:4] == [
        "`vcpo`",
        "46.0 %",
        "22.0 %",
        "34.0 %",
    ]
    power = {row[0]: row[1:5] for row in tables["Power, in points of accuracy"]}
    assert power["k = 32"] == ["1.00", "17", "6", "3"], "seeds 1, 2 and 3 are a point apart"
    stars = [row[2] for row in tables["All numbers"] if row[0] == "vcpo_ess"]
    assert stars == ["0.001*", "0.003"]


def test_the_page_and_the_figures(curves: pd.DataFrame, tmp_path: Path) -> None:
    report = make_report(curves, STEPS)
    files = write({"countdown_lag": report}, tmp_path)
    assert [file.name for file in files] == ["methods.png", "predictors.png", "tables.md"]
    assert all(file.stat().st_size > 10_000 for file in files[:-1])
    assert files[-1].read_text() == markdown({"countdown_lag": report})
    told = json.loads(as_json(report))
    assert told["learning_rates"]["vcpo"] == {"32": 1e-3} and told["steps"] == STEPS
    assert {row["method"] for row in told["comparisons"][0]["contrasts"]} == {"none", "vcpo", "vcpo_ess", "ppo"}


def test_tasks_are_compared_one_by_one(
    curves: pd.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [published(curves, tmp_path / f"{task}.parquet", task=task) for task in ("countdown_lag", "sort_lag")]
    assert stability_report.main([*map(str, files), "--out", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "tables.md").read_text()
    assert page in markdown({task: make_report(of, STEPS) for task, of in read_curves(files).items()})
    assert "## The planned contrast at k = 32, on every task" in page and "| sort | 1.00 | 17 | 6 | 3 |" in page
    assert "## `countdown_lag`: Accuracy after step k" in page and "## `sort_lag`: All numbers" in page
    table = across(
        "both", {task: make_report(curves, STEPS).comparisons[0].contrasts for task in ("countdown_lag", "sort_lag")}
    )
    assert table.columns == ["method", *("countdown", "less `vcpo_ess`", "p (Holm)"), "sort", *table.columns[5:]]
    ahead = {
        row[0]: row[1:]
        for row in of_all_tasks({"a": make_report(curves, STEPS), "b": make_report(curves, STEPS)})[0].rows
    }
    assert ahead["`vcpo_ess`"] == ["0", "0", "0 of 12"] and ahead["`vcpo`"] == ["(-1.0)", "(-1.0)", "0 of 12"]
    assert ahead["`none`"][:2] == ["-45.0", "-45.0"] and ahead["`none`"][2] == "-", "no run at another rate"
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["`vcpo_ess`"] == ["47.0 %", "-", "-"] * 2 + ["0 of 6 (0 to 46 %)"]
    assert rows["`vcpo`"] == ["46.0 %", "-1.0 (-3.3 to +1.3)", "0.288"] * 2 + ["0 of 6 (0 to 46 %)"]
    assert rows["`none`"][-1].startswith("6 of 6")


def test_runs_that_cannot_be_compared_are_refused(
    curves: pd.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = published(curves, tmp_path / "ours.parquet", task="countdown_lag", first_policy="ab")
    for name, settings, said in (
        ("other_policy", {"first_policy": "cd"}, "another first policy: its weights are cd, those here ab"),
        ("older", {}, "a first policy whose weights are not known"),
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


def test_the_figure_by_lag_leaves_out_methods_that_were_run_at_lag_0_only(curves: pd.DataFrame, tmp_path: Path) -> None:
    at_zero = curve([0.2, 0.3, 0.3, 0.3, *[0.4] * 5], method="topr", lag=0, seed=1, lr=1e-3)
    smaller = curves[curves["lag"] == 32].assign(lag=8)
    files = write({"countdown_lag": make_report(pd.concat([curves, smaller, at_zero]), STEPS)}, tmp_path)
    assert (tmp_path / "lags.png") in files and (tmp_path / "lags.png").stat().st_size > 10_000


def published(curves: pd.DataFrame, file: Path, **settings: object) -> Path:
    """As lab.stability writes them."""
    table = curves.copy()
    table.attrs["settings"] = settings
    table.to_parquet(file)
    return file


def test_one_method_is_reported_too(tmp_path: Path) -> None:
    runs = curve([0.2, 0.3, 0.4], lag=0)
    report = make_report(runs, 20)
    assert report.comparisons == []
    assert list(report.tables[0].rows[0]) == ["`tis_seq`", "35.0 %"]
    assert write({"countdown_lag": report}, tmp_path)


def test_the_real_stack_beside_the_simulator(tmp_path: Path) -> None:
    accuracies = {"simulator": (0.30, 0.34), "real stack": (0.31, 0.05)}
    curves = pd.concat(
        [
            curve([0.2, 0.3, last], method="vcpo_ess", stack=stack, seed=seed)
            for stack, of in accuracies.items()
            for seed, last in enumerate(of, start=1)
        ]
    )
    real, simulated = table(outcomes(curves, 20, 10), lag=10).rows
    assert simulated[:3] == ["`vcpo_ess`", "simulator", "30.0 %, 34.0 %"] and simulated[4] == "-"
    assert real[1:3] == ["real stack", "31.0 %, 5.0 %"] and real[4].startswith("-14.0 (")
    assert real[6].startswith("1 of 2 (") and simulated[6].startswith("0 of 2 (")
    assert beside(curves, tmp_path / "real_stack.png").stat().st_size > 10_000


def test_the_command_reads_files(
    curves: pd.DataFrame, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "curves.parquet"
    curves.to_parquet(file)
    assert stability_report.main([str(file), "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / "tables.md").is_file() and "Accuracy after step k" in capsys.readouterr().out
    assert stability_report.main([str(file), str(file)]) == 2
    assert "the same run twice" in capsys.readouterr().err
    (tmp_path / "broken.parquet").write_text("no table")
    assert stability_report.main([str(tmp_path / "broken.parquet")]) == 2
    assert "broken.parquet: cannot be read" in capsys.readouterr().err
    curves.drop(columns="seed").to_parquet(file)
    assert stability_report.main([str(file)]) == 2
    assert "no column seed" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        stability_report.main([])
    assert ended.value.code == 2


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
        rows = steps.drop(columns=["method", "lag", "lr", "seed"]).to_dict("records")
        run = GridRun(method, lag, seed, lr)
        write_run(Path("outputs/stability/runs") / f"{run.name}.parquet", run, rows)
    assert comparison.main([*command, "--json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    same = json.loads(as_json(make_report(curves, STEPS)))
    assert all(told[name] == same[name] for name in ("steps", "comparisons", "alarm"))
    (published,) = read_curves([Path("outputs/stability/curves.parquet")]).values()
    assert len(published) == len(curves)


def test_a_lag_as_long_as_a_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        comparison.main(["--lags", "0", "200", "--steps", "200"])
    assert ended.value.code == 2
    assert "--lags 200: a run of 200 steps has no evaluation after that step" in capsys.readouterr().err
