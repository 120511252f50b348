"""Every `stabilizer=NAME` on the real stack: `python -m scripts.bench.stabilizers [--only NAME ...] [--json]`.

A few steps each through Ray, vLLM and Megatron on CPU, at lag 1, one run after another: about three minutes each on 2
cores. Exits with 1 where a run fails, or a step's gradient is not finite.
"""

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tqdm import tqdm

from scripts.bench.small_run import Run, make_assets
from scripts.bench.stability import METHODS

LAG, STEPS = 1, 3


@dataclass(frozen=True)
class Execution:
    """What became of one method."""

    stabilizer: str
    exit_code: int
    grad_norms: list[float]
    """One per step."""
    max_lag: float
    seconds: float

    @property
    def ok(self) -> bool:
        whole = len(self.grad_norms) == STEPS and all(map(math.isfinite, self.grad_norms))
        return self.exit_code == 0 and whole and any(self.grad_norms) and self.max_lag <= LAG


def execute(name: str, assets: Path, run_dir: Path) -> Execution:
    """Run one method to its end, and say on stderr how it went."""
    start = time.perf_counter()
    run = Run(assets, run_dir, f"stabilizer={name}", f"async.lag={LAG}", f"trainer.total_training_steps={STEPS}")
    exit_code = run.wait()
    steps = [line for line in run.lines() if line["step"] > 0]
    execution = Execution(
        stabilizer=name,
        exit_code=exit_code,
        grad_norms=[line["grad_norm"] for line in steps],
        max_lag=max((line["lag_max"] for line in steps), default=0.0),
        seconds=time.perf_counter() - start,
    )
    verdict = "ok" if execution.ok else f"WRONG:\n{run.tail()}"
    tqdm.write(f"{name}: {execution.seconds:.0f} s, {verdict}", file=sys.stderr)  # the table comes only after the last
    return execution


def executions(names: Sequence[str]) -> Iterator[Execution]:
    with tempfile.TemporaryDirectory() as folder:
        assets = make_assets(Path(folder))
        for name in names:
            yield execute(name, assets, Path(folder) / name)


def print_table(rows: list[Execution]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("stabilizer", "exit code", "gradient norms", "largest lag", "seconds", "")
    for row in rows:
        norms = ", ".join(f"{norm:.3g}" for norm in row.grad_norms)
        verdict = "ok" if row.ok else "WRONG"
        table.add_row(row.stabilizer, str(row.exit_code), norms, f"{row.max_lag:.0f}", f"{row.seconds:.0f}", verdict)
    Console(width=110).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=METHODS, metavar="NAME", help=f"of {', '.join(METHODS)}")
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON line, last")
    arguments = parser.parse_args()
    names = arguments.only or METHODS
    rows = list(tqdm(executions(names), total=len(names), desc="stabilizers", file=sys.stderr))
    print_table(rows)
    if arguments.json:
        print(json.dumps({"lag": LAG, "steps": STEPS, "stabilizers": [asdict(row) for row in rows]}))
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
