"""Runs of the real stack: what is read of their folders, the tables, and the published numbers."""

import json
from pathlib import Path

import pandas as pd
import pytest
from omegaconf import OmegaConf

from lab.stability import real_runs

ROOT = Path(__file__).parents[3]


def run_folder(folder: Path, method: str, seed: int, accuracies: list[float], signs: list[str]) -> Path:
    """Write the files of a finished run at lag 1 that was evaluated before step 1 and after each step."""
    folder.mkdir()
    config = {
        **{"method": method, "async": {"lag": 1}, "vcpo": {"enable": False}},
        "data": {"seed": seed, "val_files": "data/sums/val.parquet"},
        "trainer": {"device": "cpu", "nnodes": 1, "n_gpus_per_node": 1, "total_training_steps": 2},
        "actor_rollout_ref": {"rollout": {"nnodes": 1, "n_gpus_per_node": 1}},
    }
    OmegaConf.save(config, folder / "config.yaml")
    (folder / "summary.json").write_text(json.dumps({"wall_clock_s": 1.0}))
    lines: list[dict[str, object]] = [
        {"step": step, "wall_clock_s": step, "val_accuracy": value, "val_accuracies": {"sums": value}}
        for step, value in enumerate(accuracies)
    ]
    lines.insert(2, {"step": 1, "val_accuracy": None, "collapse_signs": signs})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_what_a_run_reached(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [
        run_folder(tmp_path / f"{method}{seed}", method, seed, [0.1, 0.9, value], signs)
        for method, signs, values in (("vcpo", ["kl_growth"], (0.3, 0.4, 0.5)), ("vcpo_half_mean", [], (0.4, 0.6, 0.8)))
        for seed, value in enumerate(values)
    ]
    assert real_runs.main(["--runs", *map(str, folders), "--out", str(tmp_path / "out")]) == 0
    reached, differences = real_runs.tables(pd.read_csv(tmp_path / "out/real_runs.csv"))
    assert reached.rows == [
        ["sums", "1", "`vcpo`", "10.0, 10.0, 10.0", "30.0, 40.0, 50.0", "30.0, 40.0, 50.0", "40.0", "3 of 3"],
        ["sums", "1", "`vcpo_half_mean`", "10.0, 10.0, 10.0", "40.0, 60.0, 80.0", "40.0, 60.0, 80.0", "60.0", "0 of 3"],
    ]
    ((*names, points, low, high, p, seen),) = differences.rows
    assert (names, points) == (["sums", "1", "`vcpo`"], "+20.0")
    assert float(low) < 0 < float(high) and 0.05 < float(p) < 0.1 and float(seen) > 20
    capsys.readouterr()
    unknown = pd.DataFrame(
        {**dict.fromkeys(real_runs.RUN, 1), "step": [0, 2], "val_accuracy": [0.1, 0.3], "signs": None}
    )
    every = pd.concat([pd.read_csv(tmp_path / "out/real_runs.csv"), unknown])
    assert [row[-1] for row in real_runs.tables(every)[0].rows] == ["3 of 3", "0 of 3", "-"]


def test_runs_are_paired_by_their_seed(tmp_path: Path) -> None:
    """Catches differences of whatever runs come first, and a seed of one method that is compared with another's."""
    made = (("vcpo", (1, 2, 3)), ("vcpo_half_mean", (3, 4, 2, 1)))
    rows = [
        real_runs.evaluations(run_folder(tmp_path / f"{method}{seed}", method, seed, [0.1, 0.1, 0.1 * seed + more], []))
        for (method, seeds), more in zip(made, (0.0, 0.2), strict=True)
        for seed in seeds
    ]
    ((*_, points, low, high, _p, _seen),) = real_runs.tables(pd.concat(rows))[1].rows
    assert (points, low, high) == ("+20.0", "+20.0", "+20.0")


def test_a_folder_without_a_finished_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    assert real_runs.main(["--runs", str(tmp_path)]) == 2
    assert "config.yaml" in capsys.readouterr().err
    going = run_folder(tmp_path / "going", "vcpo", 1, [0.1, 0.2, 0.3], [])
    (going / "summary.json").unlink()
    assert real_runs.main(["--runs", str(going)]) == 2
    assert "the run is not finished" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        real_runs.main([])
    assert ended.value.code == 2 and "give --runs" in capsys.readouterr().err


def test_the_page_has_the_published_runs() -> None:
    page = (ROOT / "lab/stability/decision.md").read_text()
    for table in real_runs.tables(pd.read_csv(ROOT / real_runs.PUBLISHED)):
        for row in table.rows:
            assert f"| {' | '.join(row)} |" in page
