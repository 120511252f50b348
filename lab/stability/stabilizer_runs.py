"""Every stabilizer's first steps through the real stack."""

import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from tests.kit.small_run import TrainerRun, make_assets

LAG, STEPS = 1, 3


@dataclass(frozen=True)
class StabilizerExecution:
    """What became of one method."""

    method: str
    exit_code: int
    grad_norms: list[float]
    """One per step."""
    max_lag: float
    seconds: float

    @property
    def ok(self) -> bool:
        whole = len(self.grad_norms) == STEPS and all(map(math.isfinite, self.grad_norms))
        return self.exit_code == 0 and whole and any(self.grad_norms) and self.max_lag <= LAG


def execute(name: str, assets: Path, run_dir: Path) -> StabilizerExecution:
    """Run one method to its end, and say on stderr how it went."""
    start = time.perf_counter()
    run = TrainerRun(assets, run_dir, f"method={name}", f"async.lag={LAG}", f"trainer.total_training_steps={STEPS}")
    exit_code = run.wait()
    steps = [line for line in run.lines() if line["step"] > 0]
    execution = StabilizerExecution(
        method=name,
        exit_code=exit_code,
        grad_norms=[line["grad_norm"] for line in steps],
        max_lag=max((line["lag_max"] for line in steps), default=0.0),
        seconds=time.perf_counter() - start,
    )
    verdict = "ok" if execution.ok else f"WRONG:\n{run.tail()}"
    tqdm.write(f"{name}: {execution.seconds:.0f} s, {verdict}", file=sys.stderr)  # the table comes only after the last
    return execution


def executions(names: Sequence[str]) -> Iterator[StabilizerExecution]:
    with tempfile.TemporaryDirectory() as folder:
        assets = make_assets(Path(folder))
        for name in names:
            yield execute(name, assets, Path(folder) / name)
