"""`python -m scripts.report` on run folders as the trainer writes them."""

import csv
import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from omegaconf import OmegaConf

from recipe.evaluate import results
from scripts.report import figure, table
from scripts.report.__main__ import main
from scripts.report.outcome import outcome, standard_error
from scripts.report.payload import make
from scripts.report.runs import method, read_run
from vcpo.diagnostics import AlarmLevels
from verl_vcpo.report.learning_signal import EQUAL_GROUPS
from verl_vcpo.report.run_log import ANSWERS, RunLog, read_metrics, write_summary

NOISE = "±: one standard error of 100 held-out answers, greedy"
SAID = (
    "MATH-500: vcpo, lag 10, ended at 71.0 ± 4.5 % from 40.0 ± 4.9 % in 4 steps; "
    "tis_seq, synchronous, ended at 70.0 ± 4.6 % from 40.0 ± 4.9 % in 4 steps; "
    "vcpo, lag 128, is at 41.0 ± 4.9 % from 40.0 ± 4.9 % after 1 of 4 steps; "
    f"tis_seq, lag 10, ended at 0.0 ± 1.0 % from 40.0 ± 4.9 % in 4 steps ({NOISE})."
)


def config(lag: float, *, device: str = "gpu", task: str = "math", name: str = "vcpo", **vcpo: object) -> dict:
    """What the report reads of config.yaml; the samplers' GPUs are an interpolation, as the launcher leaves it."""
    return {
        "async": {"lag": lag},
        "method": name,
        "vcpo": {"enable": True, "baseline": "opob", "step_size_rule": "sqrt", "opob_scope": "group", **vcpo},
        "data": {"val_files": f"data/{task}/val.parquet"},
        "trainer": {"device": device, "n_gpus_per_node": 4, "nnodes": 1, "total_training_steps": 4},
        "actor_rollout_ref": {
            "rollout": {"n_gpus_per_node": "${trainer.n_gpus_per_node}", "nnodes": 1, "val_kwargs": {"temperature": 0}}
        },
        "run_id": "${oc.env:NO_SUCH_VARIABLE}",
    }


def write_run(folder: Path, settings: dict, accuracies: list[float], seconds: float, finished: bool = True) -> Path:
    """A run that validates at every step, `seconds` apart; its lines have the trainer's names."""
    folder.mkdir(parents=True)
    log = RunLog(folder)
    for step, accuracy in enumerate(accuracies):
        metrics = {"val-core/math-500/acc/mean@3": accuracy, ANSWERS: 100}
        if step:
            metrics |= {
                "critic/score/mean": accuracy,
                EQUAL_GROUPS: 0.5,
                "actor/vcpo/ess_ratio": 0.7 / step,
                "actor/vcpo/lr_multiplier": 0.8,
                "actor/grad_norm": 0.1 if step < 3 else float("nan"),  # null in the file
                "actor/vcpo/kl_rollout_policy": 1e-3 * step,
                **{f"training/off_policy/trajectory_staleness_worst/{m}": step for m in ("min", "mean", "max")},
                **{f"vcpo/{m}": 0.5 for m in ("tokens_per_s", "trainer_idle_share", "sampler_idle_share")},
                "vcpo/weight_sync_share": 0.0,
                "timing_s/step": seconds,
            }
        log.write(step, metrics)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["wall_clock_s"] = line["step"] * seconds
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    OmegaConf.save(settings, folder / "config.yaml")
    if finished:
        write_summary(folder, settings["method"], settings["async"]["lag"], lines[-1]["wall_clock_s"])
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Synchronous, VCPO at lag 10 that learns as much in half the time, a collapse, and one on its way."""
    plain = {"name": "tis_seq", "enable": False}
    return [
        write_run(tmp_path / "sync", config(0, **plain), [0.4, 0.5, 0.6, 0.65, 0.7], 3600),
        write_run(tmp_path / "vcpo", config(10), [0.4, 0.6, 0.7, 0.71, 0.71], 1800),
        write_run(tmp_path / "tis", config(10, **plain), [0.4, 0.5, 0.3, 0.0, 0.0], 1800),
        write_run(tmp_path / "going", config(128), [0.4, 0.41], 1800, finished=False),
    ]


def test_the_papers_table(runs: list[Path]) -> None:
    """By hand: 8 GPUs; synchronous reaches 70 % at step 4 after 32 hours, VCPO at step 2 after 8."""
    assert table.make_table([read_run(run) for run in runs]) == [
        ["Method", "MATH-500 accuracy", "Steps", "GPU hours", "Speed-up, steps", "Speed-up, GPU hours"],
        ["before RL", "40.0%", "0", "-", "-", "-"],
        ["tis_seq, synchronous", "70.0%", "4", "32.00", "1.00x", "1.00x"],
        ["vcpo, lag 10", "71.0%", "4", "16.00", "2.00x", "4.00x"],
        ["tis_seq, lag 10", "0.0%", "4", "16.00", "not reached", "not reached"],
        ["vcpo, lag 128", "41.0%", "1 of 4, unfinished", "4.00", "not reached", "not reached"],
    ]


def test_each_run_s_accuracy_before_rl(tmp_path: Path) -> None:
    runs = [
        read_run(write_run(tmp_path / str(base), config(lag), [base, 0.5], 1)) for lag, base in ((8, 0.25), (9, 0.27))
    ]
    assert [row[:2] for row in table.make_table(runs)[1:3]] == [
        ["before RL: vcpo, lag 8", "25.0%"],
        ["before RL: vcpo, lag 9", "27.0%"],
    ]


def with_two_sets(folder: Path) -> Path:
    """A run whose held-out accuracy is the mean of two."""
    write_run(folder, config(0), [0.4, 0.6], 3600)
    lines = read_metrics(folder)
    for line in lines:
        line["val_accuracies"] = {"sums": line["val_accuracy"] - 0.1, "games": line["val_accuracy"] + 0.1}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_several_held_out_sets(tmp_path: Path) -> None:
    run = read_run(with_two_sets(tmp_path / "two"))
    assert table.make_table([run])[0][1] == "Mean of sums, games accuracy"
    (shown,) = make([run])["runs"]
    assert shown["validations_of_each"] == {"sums": [[0, 0.3], [1, 0.5]], "games": [[0, 0.5], [1, 0.7]]}
    assert outcome([run]) == (
        "Mean of sums, games: vcpo, synchronous, ended at 60.0 % (sums 50.0 %, games 70.0 %) "
        "from 40.0 % (sums 30.0 %, games 50.0 %) in 1 step (of 100 held-out answers, greedy)."
    )
    assert [error for _, _, error in shown["validations"]] == [None, None], "how many are of each is not known"
    (alone,) = make([read_run(write_run(tmp_path / "one", config(0), [0.4], 3600))])["runs"]
    assert alone["validations_of_each"] == {}


def test_evaluations_beside_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run evaluated its first policy alone; step 2 was evaluated beside it, step 3 with other settings."""
    folder = write_run(tmp_path / "run", config(10), [0.4, 0.5, 0.6, 0.7], 3600)
    lines = [
        line | ({"val_accuracy": None, "val_accuracies": {}} if line["step"] else {}) for line in read_metrics(folder)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for step, share, as_the_run in ((0, 0.9, True), (2, 0.55, True), (3, 0.8, False)):
        (place := results.folder(folder, step)).mkdir(parents=True)
        settings = {"data.val_max_samples": None if as_the_run else 9}
        results.write(results.Evaluation(step, {"math-500": share}, 100, as_the_run, settings, "model", 1), place)
    run = read_run(folder)
    assert run.accuracies == [(0, 0.4), (2, 0.55)] and run.cost_of(0.5) == (2, 2 * 8)
    assert "ended at 55.0 ± 5.0 % from 40.0 ± 4.9 % in 2 steps" in outcome([run])
    (shown,) = make([run])["runs"]
    assert [v[:2] for v in shown["validations"]] == [[0, 0.4]]
    assert shown["evaluations"] == [[0, 0.9], [2, 0.55], [None, None], [3, 0.8]], "no line joins the last two"
    curves = {line.get_label(): [*line.get_xdata()] for line in drawn([folder], monkeypatch).axes[0].lines}
    assert curves["held out"] == [0] and curves["held out, evaluated beside"] == pytest.approx(
        [0, 2, math.nan, 3], nan_ok=True
    )


def test_the_files(runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main([*map(str, runs), "--out", str(out)]) == 0
    assert sorted(file.name for file in out.iterdir()) == ["figure.png", "report.html", "table.csv", "table.md"]
    rows = table.make_table([read_run(run) for run in runs])
    with open(out / "table.csv", newline="") as file:
        assert list(csv.reader(file)) == rows
    text = (out / "table.md").read_text()
    assert "| vcpo, lag 10 | 71.0% | 4 | 16.00 | 2.00x | 4.00x |" in text
    assert "Speed-up: how many times fewer optimizer steps" in text
    assert (out / "figure.png").read_bytes().startswith(b"\x89PNG")
    page = (out / "report.html").read_text()
    assert '"vcpo, lag 10", "71.0%"' in page
    ours = page[: page.index("<script>")] + page[page.rindex("<script>") :]
    assert re.findall(r"(?:src|href)=\S+|https?:\S+|@@\w+", ours) == ['href="data:,">'], "the page needs no other file"
    assert SAID in capsys.readouterr().out and json.dumps(SAID) in page


def test_what_came_out_is_said_in_a_sentence(runs: list[Path], tmp_path: Path) -> None:
    read = [read_run(run) for run in runs]
    assert outcome(read) == SAID
    lines = [{name: value for name, value in line.items() if name != ANSWERS} for line in read[1].lines]
    assert outcome([replace(read[1], lines=lines)]) == (
        "MATH-500: vcpo, lag 10, ended at 71.0 % from 40.0 % in 4 steps "
        "(of how many held-out answers was not recorded)."
    )
    unseen = [line | {"val_accuracy": None} for line in lines]
    assert outcome([replace(read[1], lines=unseen)]) == "MATH-500: vcpo, lag 10, was not evaluated (4 of 4 steps)."
    many = outcome([replace(read[0], method=f"m{i}") for i in range(9)])
    assert [f"m{i}," in many for i in range(9)] == [*[True] * 3, *[False] * 5, True] and "; 5 more between; " in many
    other = read_run(write_run(tmp_path / "other", config(1, task="gsm8k"), [0.2], 60))
    assert outcome([*read, other]) == f"{SAID} GSM8K: vcpo, lag 1, begins at 20.0 ± 4.0 % ({NOISE})."


@pytest.mark.parametrize(("accuracy", "expected"), [(0.5, 0.025), (0.9, 0.015), (0.0, 0.0025), (1.0, 0.0025)])
def test_the_noise_is_that_of_independent_answers(accuracy: float, expected: float) -> None:
    """Four hundred answers; none that is right says less than that none ever is."""
    assert standard_error(accuracy, 400) == pytest.approx(expected, rel=2e-3)
    assert standard_error(accuracy, 1) == 0.0


def test_one_run_on_cpu_writes_into_its_own_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    run = write_run(tmp_path / "run", config(8, device="cpu", task="countdown"), [0.1, 0.2], 1800)
    assert main([str(run)]) == 0
    assert (run / "table.md").read_text() == (
        "| Method | Countdown accuracy | Steps | CPU hours |\n| --- | --- | --- | --- |\n"
        "| before RL | 10.0% | 0 | - |\n| vcpo, lag 8 | 20.0% | 1 | 1.00 |\n"
    )
    assert (run / "figure.png").is_file()
    assert "Figure:" in capsys.readouterr().out


def test_a_resumed_run_counts_its_time_and_steps_once(tmp_path: Path) -> None:
    """The summary is of the last process alone; the lines go on where the earlier process's ended."""
    run = write_run(tmp_path / "run", config(10), [0.4, 0.5, 0.6], 3600, finished=False)
    again = RunLog(run)
    again.resume(1)  # the checkpoint was of step 1
    line = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    line |= {"step": 2, "wall_clock_s": 9000.0, "val_accuracy": 0.66}
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    write_summary(run, "vcpo", 10, 1200.0)
    read = read_run(run)
    assert (read.steps, read.accuracy, read.hours) == (2, 0.66, 9000 / 3600 * 8)


@pytest.mark.parametrize(
    ("settings", "label"),
    [
        ({}, "vcpo"),
        ({"name": "ppo", "enable": False}, "ppo"),
        ({"name": "vcpo_opob", "step_size_rule": "none"}, "vcpo_opob"),
        ({"name": "vcpo", "baseline": "none"}, "vcpo vcpo.baseline=none"),
        (
            {"name": "vcpo", "step_size_rule": "none", "baseline": "mean"},
            "vcpo vcpo.step_size_rule=none vcpo.baseline=mean",
        ),
    ],
)
def test_a_run_is_called_by_its_method(settings: dict, label: str) -> None:
    assert method(OmegaConf.create(config(10, **settings))) == label


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (lambda run: (run / "metrics.jsonl").unlink(), "no metrics.jsonl; give the folder"),
        (lambda run: (run / "config.yaml").unlink(), "no config.yaml; give the folder"),
        (lambda run: (run / "metrics.jsonl").write_text(""), "metrics.jsonl has no step yet"),
        (lambda run: (run / "metrics.jsonl").write_text("half a li"), "metrics.jsonl has no step yet"),
        (lambda run: (run / "summary.json").write_text("half a li"), "not the files of a run (JSONDecodeError"),
        (lambda run: (run / "config.yaml").write_text("vcpo: {}"), "not the files of a run"),
        (lambda run: (run / "config.yaml").write_text("a: ["), "not the files of a run"),
    ],
)
def test_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil, expected: str) -> None:
    run = write_run(tmp_path / "run", config(10), [0.4, 0.5], 60)
    spoil(run)
    assert main([str(run)]) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ") and errors.count("\n") == 1
    assert expected in errors
    assert not (run / "table.md").exists()


def test_several_runs_need_a_folder(runs: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run) for run in runs]) == 2
    assert "--out" in capsys.readouterr().err


@pytest.mark.filterwarnings("error")
def test_a_run_that_was_never_validated_is_drawn_beside_another(tmp_path: Path) -> None:
    """Its empty curve must not be in the layout: the panels would shrink to nothing, with a warning."""
    runs = [write_run(tmp_path / str(lag), config(lag), [0.4, 0.5, 0.6], 60) for lag in (2, 4)]
    lines = [line | {"val_accuracy": None} for line in read_metrics(runs[0])]
    (runs[0] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert figure.draw([read_run(run) for run in runs], tmp_path / "figure.png").is_file()


def drawn(runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> Figure:
    """The figure of the runs, still open."""
    kept: list[Figure] = []
    monkeypatch.setattr("matplotlib.pyplot.close", kept.append)
    figure.draw([read_run(run) for run in runs], runs[0] / "figure.png")
    return kept[0]


@pytest.mark.parametrize("number", [1, 9])
def test_nothing_in_the_figure_lies_on_anything_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Of one run, and of many with long names at several lags."""
    settings = [config(lag, opob_scope="mini_batch") for lag in range(number)]
    runs = [write_run(tmp_path / str(i), s, [0.4, 0.5, 0.6], 60) for i, s in enumerate(settings)]
    picture = drawn(runs, monkeypatch)
    (legend,) = picture.legends
    panels = [axis.get_tightbbox() for axis in picture.axes if axis.axison]
    boxes = [legend.get_window_extent(), *panels]
    assert not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i])
    whole = picture.bbox
    assert boxes[0].x0 >= 0 and boxes[0].x1 <= whole.width, "the legend is in the picture"
    columns = 2 if number == 1 else 3
    assert all(axis.bbox.width > 0.7 * whole.width / columns for axis in picture.axes), "no panel is squeezed"


def test_the_axes_show_the_bulk_and_the_alarms_levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While rollouts are of the current policy, KL is a rounding error: 1e-13."""
    run = write_run(tmp_path / "run", config(10), [0.4, 0.5, 0.6, 0.7], 60)
    lines = read_metrics(run)
    lines[1]["kl"] = 1e-13
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, ess, _, kl = drawn([run], monkeypatch).axes
    assert 1e-8 < kl.get_ylim()[0] <= 1e-3 and kl.get_ylim()[1] == 1
    for axis, level in ((ess, AlarmLevels().ess_ratio), (kl, AlarmLevels().kl)):
        assert any(list(line.get_ydata()) == [level, level] for line in axis.lines)
        assert [text.get_text() for text in axis.texts] == ["alarm"]
