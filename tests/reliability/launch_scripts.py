"""Every launch script, executed: `python -m tests.reliability.launch_scripts [--json]`.

The scripts run one after another with CPU=1: the script's own settings with a small model and small sizes through the
real stack, 2 steps. A script takes about two minutes on 2 cores. Exit code 1: a script failed, or exceeded its lag.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from omegaconf import OmegaConf
from tqdm import tqdm

from recipe.command_line import OneLineParser, run_command
from tests.kit import ROOT
from verl_vcpo.report.run_log import CONFIG_FILE, METRICS_FILE, read_metrics

SHELL = ROOT / "recipe/fully_async_policy/shell/vcpo"
STEPS = 2
_TIMEOUT_S = 1800
_GRACE_S = 60


@dataclass(frozen=True)
class ScriptExecution:
    """The result of one script."""

    script: str
    exit_code: int
    steps: int
    lag: float | None
    max_lag: float | None
    seconds: float

    @property
    def ok(self) -> bool:
        return self.exit_code == 0 and self.steps == STEPS and (self.max_lag or 0) <= (self.lag or 0)


def execute(script: Path, run_dir: Path, settings: list[str]) -> ScriptExecution:
    """Run one script to its end; the output of a failed script goes to stderr."""
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen(
            ["bash", str(script), f"run_dir={run_dir}", *settings],
            env={**os.environ, "CPU": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            exit_code = process.wait(_TIMEOUT_S)
        except BaseException as error:  # Ctrl-C too: a script is never left behind
            exit_code = end(process)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
        seconds = time.perf_counter() - start
        output.seek(0)
        printed = output.read()
    lines = read_metrics(run_dir) if (run_dir / METRICS_FILE).is_file() else []
    steps = [line for line in lines if line["reward"] is not None]
    config = run_dir / CONFIG_FILE
    execution = ScriptExecution(
        script=str(script.relative_to(SHELL)),
        exit_code=exit_code,
        steps=len(steps),
        lag=OmegaConf.load(config)["async"].lag if config.is_file() else None,
        max_lag=max((line["lag_max"] for line in steps), default=None),
        seconds=seconds,
    )
    if not execution.ok:
        tqdm.write(f"{execution.script}:\n{printed[-2000:]}", file=sys.stderr)
    return execution


def end(process: subprocess.Popen[bytes]) -> int:
    """Let the script end cleanly, or kill it. Return the exit code."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        return process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()


def executions(scripts: list[Path], settings: list[str]) -> Iterator[ScriptExecution]:
    with tempfile.TemporaryDirectory() as folder:
        for number, script in enumerate(scripts):
            yield execute(script, Path(folder) / str(number), settings)


def print_table(rows: list[ScriptExecution]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("script", "exit code", "steps", "lag", "largest lag", "seconds", "")
    for row in rows:
        values = (str(row.exit_code), str(row.steps), str(row.lag), str(row.max_lag), f"{row.seconds:.0f}")
        table.add_row(row.script, *values, "ok" if row.ok else "WRONG")
    Console(width=110).print(table)


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("settings", nargs="*", metavar="setting=value", help="overrides for every script")
    parser.add_argument("--only", metavar="TEXT", default="", help="scripts whose path contains TEXT")
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON line, last")
    arguments = parser.parse_args()
    scripts = [s for s in sorted(SHELL.glob("*/*.sh")) if arguments.only in str(s.relative_to(SHELL))]
    if not scripts:
        parser.error(f"--only {arguments.only}: no such script in {SHELL}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the script that runs, too
    rows = list(tqdm(executions(scripts, arguments.settings), total=len(scripts), desc="scripts", file=sys.stderr))
    print_table(rows)
    if arguments.json:
        print(json.dumps({"steps": STEPS, "scripts": [asdict(row) for row in rows]}))
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    run_command(main)
