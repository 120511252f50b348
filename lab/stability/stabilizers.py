"""Every `method=NAME` on the real stack: `python -m lab.stability.stabilizers [--only NAME ...] [--json]`.

A few steps each through Ray, vLLM and Megatron on CPU, at lag 1, one run after another: about a minute each on 2
cores. Exits with 1 where a run fails, or a step's gradient is not finite.
"""

import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from lab.stability.preset import METHODS
from recipe.command_line import OneLineParser, run_command
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


def print_table(rows: list[StabilizerExecution]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("method", "exit code", "gradient norms", "largest lag", "seconds", "")
    for row in rows:
        norms = ", ".join(f"{norm:.3g}" for norm in row.grad_norms)
        verdict = "ok" if row.ok else "WRONG"
        table.add_row(row.method, str(row.exit_code), norms, f"{row.max_lag:.0f}", f"{row.seconds:.0f}", verdict)
    Console(width=110).print(table)


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=METHODS, metavar="NAME", help=f"run these alone, of {', '.join(METHODS)}"
    )
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON line, last")
    arguments = parser.parse_args()
    names = arguments.only or METHODS
    rows = list(tqdm(executions(names), total=len(names), desc="methods", file=sys.stderr))
    print_table(rows)
    if arguments.json:
        print(json.dumps({"lag": LAG, "steps": STEPS, "methods": [asdict(row) for row in rows]}))
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    run_command(main)
