"""Launch scripts, run to their end on a CPU."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf
from tqdm import tqdm

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
