"""The paper's table: Method | accuracy | steps | GPU hours, and the speed-ups over the synchronous run."""

import csv
import io
from pathlib import Path

from scripts.report.runs import ReportedRun, labels
from verl_vcpo.common.whole_file import write_whole

NOTE = (
    "Speed-up: how many times fewer optimizer steps, and how many times fewer device hours, a run takes until its "
    "held-out accuracy is that at which the synchronous run of the task ended. Device hours count every GPU (on CPU, "
    "every core), training or sampling, busy or idle."
)
Table = list[list[str]]


def make_table(runs: list[ReportedRun]) -> Table:
    """The header and one row per run, as text; before them in each task the accuracies before RL."""
    tasks = list(dict.fromkeys(run.task for run in runs))
    devices = " or ".join(sorted({run.device for run in runs}, reverse=True))
    accuracy = "Accuracy" if len(tasks) > 1 else f"{tasks[0]} accuracy"
    references = {task: _reference(runs, task) for task in tasks}
    compared = any(
        reference is not None and run is not reference and run.task == reference.task
        for reference in references.values()
        for run in runs
    )
    header = ["Method", accuracy, "Steps", f"{devices} hours"]
    header += ["Speed-up, steps", f"Speed-up, {devices} hours"] if compared else []
    rows = [["Task", *header] if len(tasks) > 1 else header]
    for task in tasks:
        of_task = [run for run in runs if run.task == task]
        lines = [[name, base, "0", "-", *(["-", "-"] if compared else [])] for name, base in _before(of_task).items()]
        for run in of_task:
            steps = str(run.steps) if run.finished else f"{run.steps} of {run.planned}, unfinished"
            line = [run.label, percent(run.accuracy), steps, f"{run.hours:.2f}"]
            lines.append(line + (list(speed_ups(run, references[task])) if compared else []))
        rows += [[task, *line] if len(tasks) > 1 else line for line in lines]
    return rows


def _before(runs: list[ReportedRun]) -> dict[str, str]:
    """By name, accuracies before RL: one for all runs where they agree, and otherwise one for each."""
    known = {label: run.base_accuracy for label, run in zip(labels(runs), runs, strict=True)}
    bases = {f"before RL: {label}": percent(base) for label, base in known.items() if base is not None}
    return {"before RL": of_all.pop()} if len(of_all := {*bases.values()}) == 1 else bases


def _reference(runs: list[ReportedRun], task: str) -> ReportedRun | None:
    """The synchronous run that the others are compared with."""
    return next((run for run in runs if run.task == task and run.lag == 0 and run.accuracy is not None), None)


def speed_ups(run: ReportedRun, reference: ReportedRun | None) -> tuple[str, str]:
    """(in steps, in device hours) until the accuracy at which `reference` ended."""
    if reference is None or reference.accuracy is None:
        return "-", "-"
    before, now = reference.cost_of(reference.accuracy), run.cost_of(reference.accuracy)
    if now is None or before is None:
        return "not reached", "not reached"
    hours = f"{before[1] / now[1]:.2f}x" if now[1] and run.device == reference.device else "-"
    return f"{before[0] / now[0]:.2f}x", hours


def percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def markdown(table: Table) -> str:
    header, *rows = table
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def write(table: Table, out: Path) -> None:
    """table.md and table.csv."""
    note = f"\n{NOTE}\n" if has_speed_ups(table) else ""
    write_whole(out / "table.md", markdown(table) + note)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(table)
    write_whole(out / "table.csv", text.getvalue())


def has_speed_ups(table: Table) -> bool:
    return table[0][-1].startswith("Speed-up")


def show(table: Table) -> None:
    """On the console."""
    from rich.console import Console
    from rich.table import Table as RichTable

    header, *rows = table
    shown = RichTable(*header)
    for row in rows:
        shown.add_row(*row)
    Console(width=110).print(shown)
