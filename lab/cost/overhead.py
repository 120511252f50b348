"""What a quickstart run costs in processor time and memory: `python -m lab.cost.overhead [--beside COMMIT] [--json]`.

Runs the trainer as scripts/quickstart.sh does, with a few steps, and adds up the processor time of all its processes:
of the start (from the command to the evaluation before training), of that evaluation, and of a step. With `--beside`
another commit takes turns with this checkout, on the same data and model: ratios count, seconds depend on what else the
machine does. A process's last half second may be missed.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from recipe.command_line import OneLineParser, run_command, whole_number
from recipe.fully_async_policy.launch.processes import processes_of
from tests.kit import ROOT
from tests.kit.small_run import run_id_of
from verl_vcpo.report.run_log import METRICS_FILE, read_metrics

_EVALUATION = "Measuring the held-out accuracy"
_BEGINS, _ENDS = f"{_EVALUATION} ...", f"{_EVALUATION}: "
"""What the trainer prints when the evaluation before training begins and ends."""
_POLL_S = 0.5
_MEMORY_S = 3.0  # the kernel walks all pages of a process for its share of them
_WARM_UP = 3
"""The first steps, which are not counted: step 1 waits for the batches of the lag."""
_LIMIT_S = 1800.0
_QUICKSTART = (
    *("+task=countdown_lag", "method=vcpo", "async.lag=16", "data.train_batch_size=16"),
    *("actor_rollout_ref.actor.optim.lr=2e-4", "trainer.test_freq=-1", "trainer.save_freq=-1", "save_model=false"),
)
_WARM_START = ("--layers", "2", "--heads", "2", "--steps", "900", "--correct-fraction", "0.4", "--samples", "4")


@dataclass(frozen=True)
class Cost:
    """What one run took."""

    start_cpu_s: float
    held_out_cpu_s: float
    """Of the held-out answers before training."""
    step_cpu_s: float
    step_s: float
    resident_gb: float
    """The largest sum over processes; pages that processes share count for each."""
    proportional_gb: float
    """The same, with a shared page counted once: what the machine has to have."""
    processes: int


class _Processor:
    """The processor time of a run's processes, also of those that have ended; the memory of those that are alive."""

    def __init__(self, launcher: psutil.Process) -> None:
        self._launcher, self._run_id, self._of_process = launcher, "", dict[psutil.Process, float]()
        self.resident = self.proportional = self.count = 0
        self._memory_at = 0.0

    def look(self) -> float:
        """Return the seconds until now."""
        alive = {self._launcher, *self._launcher.children(recursive=True)}
        with contextlib.suppress(RuntimeError):  # the launcher has not begun the run yet
            self._run_id = self._run_id or run_id_of(self._launcher)
            alive |= {*processes_of(self._run_id)}  # Ray's own are nobody's children
        for process in alive:
            with contextlib.suppress(psutil.Error):  # a process that has ended since
                times = process.cpu_times()
                self._of_process[process] = times.user + times.system
        self.count = max(self.count, len(alive))
        if time.monotonic() - self._memory_at > _MEMORY_S:
            self._look_at_memory(alive)
            self._memory_at = time.monotonic()
        return sum(self._of_process.values())

    def _look_at_memory(self, alive: set[psutil.Process]) -> None:
        resident = proportional = 0
        for process in alive:
            with contextlib.suppress(psutil.Error):
                memory = process.memory_full_info()
                resident += memory.rss
                proportional += memory.pss
        self.resident, self.proportional = max(self.resident, resident), max(self.proportional, proportional)


def measure(checkout: Path, run_dir: Path, settings: list[str]) -> Cost:
    """Run the trainer of `checkout`. Raises RuntimeError: the run failed, or took longer than half an hour."""
    command = [sys.executable, "-m", "recipe.fully_async_policy.main", *settings, f"run_dir={run_dir}"]
    folders = checkout, checkout / "verl", checkout / "sandbox" / "src"
    environment = {**os.environ, "PYTHONPATH": ":".join(map(str, folders))}
    said = run_dir.with_suffix(".txt")
    with said.open("w") as out, subprocess.Popen(command, cwd=checkout, env=environment, stdout=out, stderr=out) as run:
        try:
            seconds, processor = _watched(run, said, run_dir)
        finally:
            run.terminate()
    if run.returncode:
        raise RuntimeError(f"the run failed: {said.read_text()[-500:]}")
    seen = sorted(step for step in seconds if isinstance(step, int) and step >= _WARM_UP)  # a look may miss a step
    first, last, steps = seconds[seen[0]], seconds[seen[-1]], seen[-1] - seen[0]
    return Cost(
        start_cpu_s=seconds[_BEGINS].cpu_s,
        held_out_cpu_s=seconds[_ENDS].cpu_s - seconds[_BEGINS].cpu_s,
        step_cpu_s=(last.cpu_s - first.cpu_s) / steps,
        step_s=(last.at - first.at) / steps,
        resident_gb=processor.resident / 1e9,
        proportional_gb=processor.proportional / 1e9,
        processes=processor.count,
    )


@dataclass(frozen=True)
class _Moment:
    at: float
    cpu_s: float


def _watched(run: subprocess.Popen[bytes], said: Path, run_dir: Path) -> tuple[dict[Any, _Moment], _Processor]:
    """Return when the evaluation began and ended, and when each step ended, with the processor time until then."""
    processor, moments, begun = _Processor(psutil.Process(run.pid)), dict[Any, _Moment](), time.monotonic()
    while run.poll() is None:
        if time.monotonic() - begun > _LIMIT_S:
            raise RuntimeError(f"the run took longer than {_LIMIT_S:g} s; what it said is in {said}")
        time.sleep(_POLL_S)
        now = _Moment(time.monotonic(), processor.look())
        printed = said.read_text()
        for text in (_BEGINS, _ENDS):
            if text in printed:
                moments.setdefault(text, now)
        if (run_dir / METRICS_FILE).exists():
            moments.setdefault(len(read_metrics(run_dir)) - 1, now)  # the first line is the evaluation's
    return moments, processor


@contextlib.contextmanager
def _other_checkout(commit: str, folder: Path) -> Iterator[Path]:
    subprocess.run(["git", "worktree", "add", "--detach", "--force", folder, commit], cwd=ROOT, check=True)
    try:
        yield folder
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=True)


def _print_table(costs: dict[str, list[Cost]]) -> None:
    table = Table(*("what", *costs, *(["ratio"] if len(costs) > 1 else [])))
    for field in fields(Cost):
        values = [statistics.fmean(getattr(cost, field.name) for cost in of_one) for of_one in costs.values()]
        ratio = [f"{values[0] / values[-1]:.2f}"] if len(costs) > 1 else []
        table.add_row(field.name, *(f"{value:.2f}" for value in values), *ratio)
    Console(width=100).print(table)


def _made(out: Path) -> list[str]:
    """Return the settings of data and model in `out`, which are made as in the quickstart if they are missing."""
    data, model = out / "data", out / "model"
    if not (data / "meta.json").exists():
        _command("scripts.prepare_data", "countdown", "--out", data)
    if not (model / "config.json").exists():
        _command("recipe.warm_start.train", "--data", data, "--out", model, *_WARM_START)
    return [
        f"data.train_files={data / 'train.parquet'}",
        f"data.val_files={data / 'val.parquet'}",
        f"actor_rollout_ref.model.path={model}",
    ]


def _command(*words: str | Path) -> None:
    subprocess.run([sys.executable, "-m", *words], cwd=ROOT, check=True)


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--beside", metavar="COMMIT", help="another commit, whose runs take turns with this checkout's")
    parser.add_argument("--steps", type=whole_number(_WARM_UP + 1), default=30, help="training steps of a run")
    parser.add_argument("--rounds", type=whole_number(1), default=1, help="runs of each checkout")
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=Path("outputs/overhead"), help="a folder for all")
    parser.add_argument("--json", action="store_true", help="print the costs as one JSON line, last")
    arguments = parser.parse_args()
    out = arguments.out.absolute()
    settings = [*_QUICKSTART, *_made(out), f"trainer.total_training_steps={arguments.steps}"]
    costs: dict[str, list[Cost]] = {"here": []}
    with contextlib.ExitStack() as stack:
        checkouts = {"here": ROOT}
        if arguments.beside:
            checkouts[arguments.beside] = stack.enter_context(
                _other_checkout(arguments.beside, out / f"beside_{os.getpid()}")
            )
        for round_ in range(arguments.rounds):
            for name, checkout in checkouts.items():
                run_dir = out / f"{round_}_{'here' if checkout == ROOT else 'beside'}_{os.getpid()}"
                costs.setdefault(name, []).append(measure(checkout, run_dir, settings))
                print(f"{name}: {costs[name][-1]}", flush=True)
    _print_table(costs)
    if arguments.json:
        print(json.dumps({name: [asdict(cost) for cost in of_one] for name, of_one in costs.items()}))
    return 0


if __name__ == "__main__":
    run_command(main)
