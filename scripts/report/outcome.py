"""What came out of the runs, in one sentence for each task."""

import math

from scripts.report.runs import ReportedRun, labels

_BEST, _NAMED = 3, 4
"""Of more runs than the second number, the first number's best and the last are named."""


def standard_error(accuracy: float, answers: int) -> float:
    """Of a share of independent answers that are right; where none or all are, as if one were not."""
    share = min(max(accuracy, 1 / answers), 1 - 1 / answers)
    return math.sqrt(max(share * (1 - share), 0.0) / answers)


def error_of(run: ReportedRun, accuracy: float) -> float | None:
    """The standard error of an accuracy of the run; None where it is unknown over how many answers each mean is."""
    return standard_error(accuracy, run.answers) if run.answers and not run.accuracies_of_each else None


def outcome(runs: list[ReportedRun]) -> str:
    """Who ended where, from where, after how many steps, and how far chance moves these numbers."""
    by_task: dict[str, list[tuple[ReportedRun, str]]] = {}
    for run, label in zip(runs, labels(runs), strict=True):
        by_task.setdefault(run.task, []).append((run, label))
    return " ".join(_of_task(task, of_task) for task, of_task in by_task.items())


def _of_task(task: str, runs: list[tuple[ReportedRun, str]]) -> str:
    ranked = sorted(runs, key=lambda run: -1.0 if run[0].accuracy is None else run[0].accuracy, reverse=True)
    said = [_of_run(run, label) for run, label in ranked]
    if len(said) > _NAMED:
        said[_BEST:-1] = [f"{len(said) - _BEST - 1} more between"]
    return f"{task}: {'; '.join(said)}{_noise([run for run, _ in runs])}."


def _of_run(run: ReportedRun, label: str) -> str:
    if not run.accuracies:
        return f"{label}, was not evaluated ({run.steps} of {run.planned} steps)"
    step, accuracy = run.accuracies[-1]
    now = _percent(accuracy, error_of(run, accuracy)) + _of_sets(run, step)
    if step == 0:
        return f"{label}, begins at {now}"
    base = run.base_accuracy
    start = "" if base is None else f" from {_percent(base, error_of(run, base))}{_of_sets(run, 0)}"
    if run.finished:
        return f"{label}, ended at {now}{start} in {step} {'step' if step == 1 else 'steps'}"
    return f"{label}, is at {now}{start} after {step} of {run.planned} steps"


def _of_sets(run: ReportedRun, step: int) -> str:
    """The accuracy of each of several held-out sets after a step, whose mean is the run's."""
    found = {source: dict(points).get(step) for source, points in run.accuracies_of_each.items()}
    shown = [f"{source} {_percent(value)}" for source, value in found.items() if value is not None]
    return f" ({', '.join(shown)})" if shown else ""


def _percent(accuracy: float, error: float | None = None) -> str:
    noise = "" if error is None else f" ± {100 * error:.1f}"
    return f"{100 * accuracy:.1f}{noise} %"


def _noise(runs: list[ReportedRun]) -> str:
    counts = sorted({run.answers for run in runs if run.answers and run.accuracies})
    if not counts:
        return " (of how many held-out answers was not recorded)" if any(run.accuracies for run in runs) else ""
    answers = " to ".join(f"{count:,}" for count in dict.fromkeys((counts[0], counts[-1])))
    how = {run.answered for run in runs}
    drawn = f", {how.pop()}" if len(how) == 1 and None not in how else ""
    what = "of" if any(run.accuracies_of_each for run in runs) else "±: one standard error of"
    return f" ({what} {answers} held-out answers{drawn})"
