"""A row for each run: what it reached, and what that cost.

**Hours** are those of training: the seconds of the steps (`step_s`, from the wait for rollouts to the end of the
weight update), without checkpoints. The start, held-out evaluations and the writing of records are outside of steps.
While the trainer evaluates, samplers go on with up to k batches of rollouts, which an asynchronous run would get for
nothing. So the k steps after an evaluation count, together, no less than as many at the mean of the other steps after
step k. On GPUs the hours are multiplied by the number of GPUs, training and sampling, as in the paper; on a CPU
they are those of the machine.

A run's **curve** has the hours and the accuracy at each evaluation; step 0 is before training, at 0 hours.
"""

import itertools
import json
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from lab.paper_tables.tasks import PAPER, SYNCHRONOUS
from scripts.report.runs import ReportedRun, read_run
from verl_vcpo.common.whole_file import write_whole
from verl_vcpo.report.metrics_file import SAVE_S

RUN = ["task", "method", "lag", "seed"]
"""The columns that name a run."""
MEASURED = {
    "void_turns": "tool_use/void_turns/share",
    "calls_per_response": "tool_use/calls/mean",
    **{name: name for name in ("ess_ratio", "trainer_idle_share", "sampler_idle_share")},
}
"""Column -> the metric whose mean over the steps the column has. Of tools, which training changes: the last tenth."""
COLUMNS = [*RUN, "accuracy_before", "accuracy_after", "steps", "hours", "speed_up", *MEASURED]
COLUMNS += ["device", "finished", "curve", "settings"]
"""Of the file: accuracies are shares; `curve` has `step hours accuracy` of each evaluation, with `;` between;
`settings` is what the run was started with."""
_UNKNOWN = "not recorded"
Line = Mapping[str, Any]


class Point(NamedTuple):
    step: int
    hours: float
    accuracy: float


def training_seconds(lines: Sequence[Line], lag: float) -> dict[int, float]:
    """Return the seconds of each step, by step, as this file counts them.

    Args:
        lines: metrics.jsonl, or the stored part of it.
        lag: the bound k.

    Raises:
        ValueError: there are no steps, or one between 1 and the last has no seconds, so the sum would be too small.
    """
    if not lines:
        raise ValueError("no steps")
    seconds = {line["step"]: line["step_s"] - (line.get(SAVE_S) or 0.0) for line in lines if line.get("step_s")}
    if lacking := set(range(1, max(line["step"] for line in lines) + 1)) - seconds.keys():
        raise ValueError(f"the seconds of {len(lacking)} steps are missing, the first of them {min(lacking)}")
    evaluated = [line["step"] for line in lines if line.get("val_accuracy") is not None and line["step"] > 0]
    helped = [[step for step in range(at + 1, at + math.ceil(lag) + 1) if step in seconds] for at in evaluated]
    not_others = {*range(1, math.ceil(lag) + 1), *itertools.chain(*helped)}
    others = [value for step, value in seconds.items() if step not in not_others]
    usual = statistics.fmean(others) if others else 0.0
    for part in helped:
        if part and (took := sum(seconds[step] for step in part)) < usual * len(part):
            seconds |= {step: seconds[step] * usual * len(part) / took for step in part}
    return seconds


def row_of(folder: Path, task: str | None = None) -> dict[str, Any]:
    """Return the row of a run's folder, as the trainer or a launch script has left it.

    Args:
        folder: `run_dir`.
        task: its name; None: what the run was evaluated on, as the reports call it.

    Raises:
        ValueError: the folder has no run, or one without a whole line for each step.
    """
    run = read_run(folder)
    names = (task or run.task, _method(run), run.lag, run.config.data.seed)
    more = {"device": run.device, "finished": run.finished, "settings": shlex.join(settings_of(run.command or ""))}
    return _row(str(folder), names, run.lines, 1 if run.device == "CPU" else run.devices) | more


def settings_of(command: str) -> list[str]:
    """Return the settings of a recorded command, but for those that name a place: the run's folder, the sandbox."""
    words = shlex.split(command)[3:]  # python -m MODULE
    return [word for word in words if not word.startswith(("run_dir=", "tool_use.sandbox_url="))]


def _method(run: ReportedRun) -> str:
    vcpo = run.config.vcpo
    plain = not vcpo.enable or (vcpo.step_size_rule, vcpo.baseline) == ("none", "mean")
    return SYNCHRONOUS if run.lag == 0 and plain else run.method


def rows_of_file(file: Path) -> list[dict[str, Any]]:
    """Return the rows of stored runs (docs/measurements/gpu/*-runs.jsonl): a line each, with `case` and `steps`.

    Such a line says neither method nor seed, and the hours are those of one GPU.

    Raises:
        ValueError: the file has no such lines.
    """
    try:
        stored = [json.loads(line) for line in file.read_text().splitlines()]
        named = [next((name for name in PAPER if name in run["case"]["what"]), run["case"]["what"]) for run in stored]
        return [
            _row(str(file), (task, _UNKNOWN, run["case"]["lag"], None), run["steps"], 1)
            | {"device": run["device"], "finished": False, "settings": ""}
            for task, run in zip(named, stored, strict=True)
        ]
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{file}: no stored runs with their steps ({reason}); give run folders") from None


def _row(where: str, names: tuple[Any, ...], lines: Sequence[Line], gpus: int) -> dict[str, Any]:
    try:
        seconds = training_seconds(lines, names[2])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    trained = [line for line in lines if line["step"] in seconds]
    curve = [
        Point(line["step"], gpus * _until(line["step"], seconds), line["val_accuracy"])
        for line in lines
        if line.get("val_accuracy") is not None
    ]
    last = trained[-max(1, len(trained) // 10) :]
    parts = {name: last if name.startswith("tool_use/") else trained for name in MEASURED.values()}
    return dict(zip(RUN, names, strict=True)) | {
        "accuracy_before": curve[0].accuracy if curve and curve[0].step == 0 else None,
        "accuracy_after": curve[-1].accuracy if curve else None,
        "steps": len(trained),
        "hours": round(gpus * _until(len(trained), seconds), 5),
        **{column: _mean(parts[name], name) for column, name in MEASURED.items()},
        "curve": ";".join(f"{p.step} {p.hours:.5f} {p.accuracy:.6g}" for p in curve),
    }


def _until(step: int, seconds: Mapping[int, float]) -> float:
    return sum(value for at, value in seconds.items() if at <= step) / 3600


def _mean(lines: Sequence[Line], name: str) -> float | None:
    values = [line[name] for line in lines if line.get(name) is not None]
    return round(statistics.mean(values), 4) if values else None


def curve_of(text: str) -> list[Point]:
    """Return the points of the column `curve`."""
    parts = [part.split() for part in text.split(";") if part]
    return [Point(int(step), float(hours), float(accuracy)) for step, hours, accuracy in parts]


def read(file: Path) -> pd.DataFrame:
    """Return the rows of a file that `write` wrote. Raises ValueError: it is not one."""
    try:
        rows = pd.read_csv(file, dtype={"curve": str, "settings": str})
    except (OSError, ValueError) as error:
        raise ValueError(f"{file}: cannot be read ({error}); lab.paper_tables writes such files") from None
    if lacking := set(COLUMNS) - set(rows.columns):
        raise ValueError(f"{file}: no column {', '.join(sorted(lacking))}; lab.paper_tables writes such files")
    return rows.fillna({"curve": "", "settings": ""}).astype({"seed": "Int64"})


def write(rows: pd.DataFrame, file: Path) -> None:
    """Write a line for each row."""
    write_whole(file, rows[COLUMNS].to_csv(index=False, lineterminator="\n"))
