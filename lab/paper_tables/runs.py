"""Runs of the real stack, each started by its public command line; a finished one is kept."""

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from lab.paper_tables.rows import settings_of
from lab.paper_tables.tasks import PlannedRun
from recipe.fully_async_policy.launch.processes import sigterm_is_ctrl_c
from verl_vcpo.report.run_log import COMMAND_FILE, METRICS_FILE, SUMMARY_FILE, last_step

PROGRAM = (sys.executable, "-m", "recipe.fully_async_policy.main")
_POLL_S = 1.0


def is_finished(run: PlannedRun, out: Path) -> bool:
    """Return True if the run's folder below `out` has the finished run.

    Raises:
        ValueError: its settings are others; runs of two lengths would be in one table.
    """
    folder = out / run.name
    if not (folder / SUMMARY_FILE).is_file():
        return False
    if not (folder / COMMAND_FILE).is_file() or settings_of((folder / COMMAND_FILE).read_text()) != run.settings:
        raise ValueError(f"{folder}: a run of other settings; remove it, or give another --out")
    return True


def make(runs: Sequence[PlannedRun], out: Path) -> list[str]:
    """Make the runs that `out` lacks, one after the other; a line for each that failed. All others are made, too.

    Raises:
        ValueError: data or a model are missing, or a folder has a run of other settings.
        tests.kit.sandbox_server.NotStarted: the code sandbox does not start here; it says why.
    """
    missing = [run for run in runs if not is_finished(run, out)]
    for task in {run.task.name: run.task for run in missing}.values():
        task.prepare()
    failures = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(sigterm_is_ctrl_c())
        of_sandbox: list[str] = []
        for number, run in enumerate(missing, 1):
            if run.task.sandbox and not of_sandbox:
                from tests.kit.sandbox_server import served

                of_sandbox = [f"tool_use.sandbox_url={stack.enter_context(served('--warm', '0'))[0]}"]
            more = of_sandbox if run.task.sandbox else []
            if failure := _make(run, out, more, f"{number} of {len(missing)}"):
                print(failure, file=sys.stderr, flush=True)
                failures.append(failure)
    return failures


def _make(run: PlannedRun, out: Path, more: list[str], which: str) -> str | None:
    """Make one run under a bar of its steps. Return None, or one line that says how the run failed."""
    folder = (out / run.name).absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.with_suffix(".log")
    command = [*PROGRAM, *run.settings, *more, f"run_dir={folder}"]
    begun = time.time()
    with (
        log.open("w") as said,
        tqdm(total=run.steps, desc=f"{which}: {run.name}", unit="step", file=sys.stderr) as bar,
        subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT) as process,
    ):
        try:
            while process.poll() is None:
                time.sleep(_POLL_S)
                metrics = folder / METRICS_FILE  # an earlier run's is moved aside when the run has begun
                if metrics.is_file() and metrics.stat().st_mtime >= begun:
                    bar.update(last_step(folder) - bar.n)
                bar.set_postfix_str("" if bar.n else _last_words(log)[:60])
        finally:
            process.terminate()  # without effect on one that has ended; a run ends all that it has started
            process.wait()  # the sandbox is needed until then, and a restart would meet the run's processes
    if process.returncode == 0 and is_finished(run, out):
        return None
    return f"failed: {run.name} (exit code {process.returncode}): {_last_words(log)[:300]} [all it said: {log}]"


def _last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "no word yet")
