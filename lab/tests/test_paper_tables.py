"""The paper's tables: hours and speed-ups of runs made by hand, what is made again, and the stored runs of a GPU."""

import dataclasses
import json
from pathlib import Path

import pandas as pd
import pytest
from omegaconf import OmegaConf

from lab.paper_tables import __main__ as command
from lab.paper_tables import report, rows, runs, tasks
from lab.paper_tables.rows import Point

ROOT = Path(__file__).parents[2]


def run_folder(
    folder: Path,
    lag: int,
    seconds: list[float],
    accuracies: dict[int, float],
    seed: int = 1,
    device: str = "cpu",
    **more: object,
) -> Path:
    """Write the files of a finished run of Countdown: steps of so many seconds, evaluations by step."""
    folder.mkdir(parents=True)
    config = {
        "method": "vcpo_capped" if lag else "vcpo",
        "async": {"lag": lag},
        "vcpo": {"enable": True, "opob_scope": "group"}
        | {"step_size_rule": "sqrt" if lag else "none", "baseline": "opob_capped" if lag else "mean"},
        "data": {"seed": seed, "val_files": "data/countdown/val.parquet"},
        "trainer": {"device": device, "nnodes": 1, "n_gpus_per_node": 1, "total_training_steps": len(seconds)},
        "actor_rollout_ref": {"rollout": {"nnodes": 1, "n_gpus_per_node": 1}},
    }
    lines: list[dict[str, object]] = [{"step": 0, "wall_clock_s": 9.0, "reward": None, "val_accuracy": accuracies[0]}]
    for step, took in enumerate(seconds, 1):
        line = {"step": step, "wall_clock_s": 1000.0 * step, "reward": 0.5, "step_s": took, "ess_ratio": 0.5}
        evaluated = {"val_accuracy": accuracies.get(step), "timing_s/testing": 900.0}
        lines.append(line | evaluated | {name: value for name, value in more.items() if step == len(seconds)})
    OmegaConf.save(config, folder / "config.yaml")
    (folder / "summary.json").write_text(json.dumps({"wall_clock_s": 5000.0}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_hours_are_those_of_training(tmp_path: Path) -> None:
    """Catches hours with evaluations or checkpoints in them, and rollouts of an evaluation that cost nothing."""
    more = {"timing_s/save_checkpoint": 6.0, "tool_use/void_turns/share": 0.25, "tool_use/calls/mean": 1.5}
    accuracies = {0: 0.2, 4: 0.3, 8: 0.4}
    seconds = [30.0, 20.0, 10.0, 40.0, 2.0, 2.0, 10.0, 26.0]  # the mean of the other steps is 20, their median 15
    row = rows.row_of(run_folder(tmp_path / "vcpo", 2, seconds, accuracies, **more), "countdown")
    assert [row[name] for name in rows.RUN] == ["countdown", "vcpo_capped", 2, 1]
    took = [Point(0, 0.0, 0.2), Point(4, 100 / 3600, 0.3), Point(8, (100 + 2 * 20 + 30) / 3600, 0.4)]
    assert rows.curve_of(row["curve"]) == [pytest.approx(point, abs=1e-5) for point in took]
    assert (row["accuracy_before"], row["accuracy_after"], row["steps"]) == (0.2, 0.4, 8)
    assert (row["void_turns"], row["calls_per_response"], row["ess_ratio"]) == (0.25, 1.5, 0.5)
    synchronous = rows.row_of(run_folder(tmp_path / "sync", 0, seconds, accuracies))
    assert (synchronous["task"], synchronous["method"]) == ("Countdown", "synchronous")
    assert synchronous["hours"] == pytest.approx(sum(seconds) / 3600, abs=1e-5)  # nothing is sampled while it evaluates
    lines = (tmp_path / "sync/metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "sync/metrics.jsonl").write_text("".join(lines[:3] + lines[4:]))
    with pytest.raises(ValueError, match="sync: the seconds of 1 steps are missing, the first of them 3"):
        rows.row_of(tmp_path / "sync")


def test_a_speed_up_is_to_where_the_synchronous_run_ended() -> None:
    synchronous = [Point(0, 0.0, 0.2), Point(10, 1.0, 0.3), Point(20, 2.0, 0.4)]
    faster = [Point(0, 0.0, 0.2), Point(10, 0.5, 0.35), Point(20, 1.0, 0.45), Point(30, 1.5, 0.3)]
    assert report.speed_up(faster, synchronous) == pytest.approx(2.0 / 0.75)
    peak = [*synchronous[:1], Point(10, 1.0, 0.6), Point(20, 2.0, 0.4)]  # it was there long before its end
    assert report.speed_up(faster, peak) == pytest.approx(0.5 / 0.75)
    assert report.speed_up(faster[:2], synchronous) is None  # never reached: nothing is extrapolated
    assert report.speed_up(faster, [*synchronous[:2], Point(20, 2.0, 0.2)]) is None  # which learned nothing
    mean = report.mean_curve([faster, synchronous])
    assert mean == [pytest.approx(p) for p in (Point(0, 0, 0.2), Point(10, 0.75, 0.325), Point(20, 1.5, 0.425))]


def test_the_tables(tmp_path: Path) -> None:
    """Catches a run that never got there and is left out of what is shown, and runs compared with another seed's."""
    ends = {("sync", 0): (0.4, 0.4), ("vcpo", 10): (0.6, 0.3)}
    folders = [
        run_folder(tmp_path / f"{name}{seed}", lag, [36.0 if lag else 72.0] * 4, {0: 0.2, 4: end}, seed)
        for (name, lag), of in ends.items()
        for seed, end in enumerate(of, 1)
    ]
    found = report.with_speed_ups(pd.DataFrame([rows.row_of(folder, "countdown") for folder in folders]))
    assert found["speed_up"].tolist()[:3] == [1.0, 1.0, 4.0] and pd.isna(found["speed_up"][3])
    ours, differences, meanwhile = report.tables(found)
    assert ours.rows == [
        ["before RL", "before RL", "1.6", "0", "-", "-", "20.0", "0", "-", "-", "-"],
        ["synchronous", "synchronous", "38.4", "400", "143.2", "1.00", "40.0 (40.0, 40.0)", "4", "0.080", "-", "-"],
        [
            *("vcpo_capped, lag 10", "VCPO, lag 10", "41.9", "400", "89.6", "1.60"),
            *("45.0 (60.0, 30.0)", "4", "0.040", "2.50", "1 of 2"),
        ],
    ]
    assert differences.rows[0][:5] == ["countdown", "vcpo_capped, lag 10", "synchronous", "2", "+5.0"]
    assert [row[2] for row in meanwhile.rows] == ["72.00", "36.00"]
    assert [row[4:] for row in report.tables(found[found["seed"] == 1])[1].rows] == [["+20.0", *"----"]]
    alone = report.tables(found.drop(index=1))[0]  # the synchronous run of seed 2 is not there
    assert alone.rows[2][-2:] == ["4.00", "1 of 1"]
    of_cpu, of_gpu, *_ = report.tables(found.assign(device=["CPU", "GPU"] * 2))
    assert (of_cpu.title, of_cpu.rows[2][-2:]) == ("countdown, CPU, beside the paper's Countdown", ["4.00", "1 of 1"])
    assert of_gpu.rows[2][-2:] == ["not reached", "0 of 1"]
    nothing = report.tables(found.assign(curve="0 0 0.2;4 0.08 0.2"))[0]
    assert nothing.rows[2][-2:] == ["nothing learned", "0 of 2"]
    begun_there = report.tables(found.assign(curve=["0 0 0.2;4 0.08 0.4"] * 2 + ["0 0 0.4;4 0.08 0.5"] * 2))[0]
    assert begun_there.rows[2][-2] == "-"
    rows.write(found, tmp_path / "paper_tables.csv")
    assert report.tables(rows.read(tmp_path / "paper_tables.csv"))[0] == ours
    assert report.draw(found, tmp_path / "paper_tables.png").is_file()


PROGRAM = """
for word; do case $word in run_dir=*) to=${word#*=} ;; async.lag=*) lag=${word#*=} ;; esac; done
if [ "$lag" = 0 ] && [ ! -e "${0%/*}/room" ]; then echo no room; echo; exit 1; fi
cp -r "${0%/*}/$lag" "$to"
echo python -m recipe.fully_async_policy.main "$@" >"$to/command.txt"
"""


def test_what_is_finished_stays_and_what_failed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a failed run that is lost or ends the others, finished runs made again, and runs of two lengths mixed."""
    for lag in (0, 10):
        run_folder(tmp_path / str(lag), lag, [1.0] * 4, {0: 0.1, 4: 0.3})
    (tmp_path / "program.sh").write_text(PROGRAM)
    monkeypatch.setattr(runs, "PROGRAM", ("bash", str(tmp_path / "program.sh")))
    prepared: list[str] = []
    one = dataclasses.replace(tasks.TASKS["countdown"], prepare=lambda: prepared.append("countdown"))
    monkeypatch.setitem(tasks.TASKS, "countdown", one)
    arguments = ["--quick", "--only", "countdown", "--out", str(tmp_path / "out")]
    assert command.main([*arguments, "--so-far"]) == 2 and not prepared
    assert command.main(arguments) == 1
    log = tmp_path / "out/countdown/synchronous-lag0-seed1.log"
    failure = f"failed: countdown/synchronous-lag0-seed1 (exit code 1): no room [all it said: {log}]"
    assert failure in capsys.readouterr().err and len(rows.read(tmp_path / "out/paper_tables.csv")) == 1
    (tmp_path / "room").touch()
    vcpo = tmp_path / "out/countdown/vcpo_capped-lag10-seed1/metrics.jsonl"
    before = vcpo.stat().st_mtime_ns
    assert command.main([*arguments, "--json"]) == 0 and vcpo.stat().st_mtime_ns == before
    assert [row["speed_up"] for row in json.loads(capsys.readouterr().out.splitlines()[-1])] == [1.0, 1.0]
    known = ["--known", str(tmp_path / "out/paper_tables.csv")]
    assert command.main([*arguments[:-1], str(tmp_path / "else"), *known]) == 0 and len(prepared) == 2
    other = rows.read(tmp_path / "out/paper_tables.csv").assign(steps=[4, 5])
    rows.write(pd.concat([other, other.tail(1).assign(seed=9)]), tmp_path / "other.csv")
    assert command.main([*arguments[:-1], str(tmp_path / "else"), "--so-far", "--known", f"{tmp_path}/other.csv"]) == 2
    said = capsys.readouterr().err
    assert "--known: 1 of 3 runs left out" in said and "countdown: runs of 4 and 5 steps" in said
    assert command.main(["--only", "countdown", "--out", str(tmp_path / "out")]) == 2
    assert "synchronous-lag0-seed1: a run of other settings" in capsys.readouterr().err
    assert command.main(["--only", "countdown", "--out", str(tmp_path / "else"), *known]) == 2
    assert "--known: countdown/synchronous-lag0-seed1 is a run of other settings" in capsys.readouterr().err


def test_runs_of_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches hours of one GPU in the place of all, and a report that says of a stored run what was not stored."""
    (file,) = (ROOT / "docs/measurements/gpu").glob("*-runs.jsonl")
    folder = run_folder(tmp_path / "run", 10, [36.0] * 4, {0: 0.1, 4: 0.3}, device="cuda")
    assert command.main(["--runs", str(folder), str(file), "--out", str(tmp_path)]) == 0
    ours, stored = rows.read(tmp_path / "paper_tables.csv").set_index("task").loc["Countdown"].to_dict("records")
    assert (ours["method"], ours["hours"], ours["device"]) == ("vcpo_capped", 0.08, "GPU")
    assert [stored[of] for of in ("method", "steps", "device")] == ["not recorded", 47, "NVIDIA H200"]
    assert stored["hours"] == pytest.approx(47 * 2.73 / 3600, rel=0.05) and round(stored["accuracy_after"], 3) == 0.330
    assert pd.isna(stored["seed"]) and pd.isna(stored["speed_up"]) and not stored["finished"]
    assert command.main(["--runs", str(ROOT / "docs/measurements/runs/screen.parquet"), "--out", str(tmp_path)]) == 2
    assert "screen.parquet: no stored runs" in capsys.readouterr().err
