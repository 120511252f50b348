"""How many runs does a core make in an hour? `python -m lab.stability.speed [--json]`.

The same runs, seed by seed and side by side in one process: seconds of the processor's time, and whether the curves
begin the same. 13 minutes of a core; `python -m lab.stability --prepare` comes first.
"""

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from lab.simulator.grid import TOGETHER, Folder, GridRun, config_of
from lab.simulator.simulator import Row, Simulator
from lab.stability.preset import METHODS, TASKS
from recipe.command_line import OneLineParser, run_command, whole_number

METHODS_MEASURED, LAG, LEARNING_RATE = ("vcpo", "vcpo_ess", "tis_seq"), 32, 3e-4
COMPARED = 20
"""Steps whose numbers are compared: later ones show how fast training makes rounding larger."""

SMALL = 1e-3
"""The KL of the first steps is nothing but rounding."""


@dataclass(frozen=True)
class Speed:
    """Of one method."""

    method: str
    side_by_side: int
    """Runs in one process."""
    alone_s: float
    """Seconds of a core per run, one run after the other."""
    together_s: float
    """The same, the runs side by side."""
    largest_difference: float
    """Relative, over all numbers of the first `COMPARED` steps, between a run by itself and beside the others; of
    numbers below `SMALL` relative to that."""

    @property
    def runs_per_core_hour(self) -> float:
        """Side by side."""
        return 3600 / self.together_s


def measure(task: str, method: str, seeds: int, steps: int) -> Speed:
    """Make runs of `steps` steps."""
    folder = Folder(Path(), TASKS[task].preset, (f"trainer.total_training_steps={steps}",))
    configs = [config_of(GridRun(method, LAG, seed, LEARNING_RATE), folder) for seed in range(1, seeds + 1)]
    start = time.process_time()
    alone = [Simulator([config]).run()[0] for config in configs]
    middle = time.process_time()
    together = Simulator(configs).run()
    end = time.process_time()
    return Speed(method, seeds, (middle - start) / seeds, (end - middle) / seeds, difference(alone, together))


def difference(alone: list[list[Row]], together: list[list[Row]]) -> float:
    """The largest relative difference of two numbers that should be the same."""
    pairs = [
        (one[name], other.get(name, math.nan))
        for of, beside in zip(alone, together, strict=True)
        for one, other in zip(of[: COMPARED + 1], beside[: COMPARED + 1], strict=True)
        for name in one
    ]
    different = [(a, b) for a, b in pairs if a != b and not (math.isnan(a) and math.isnan(b))]
    return max((abs(a - b) / max(abs(a), abs(b), SMALL) for a, b in different), default=0.0)


def show(rows: list[Speed], steps: int) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = [
        "method",
        "side by side",
        "alone, s/run",
        "together, s/run",
        "runs per core and hour",
        f"difference, {COMPARED} steps",
    ]
    table = Table(*columns, title=f"Processor time of {steps} steps at lag {LAG}")
    for row in rows:
        seconds = (f"{row.alone_s:.1f}", f"{row.together_s:.1f}", f"{row.runs_per_core_hour:.0f}")
        table.add_row(row.method, str(row.side_by_side), *seconds, f"{row.largest_difference:.1e}")
    Console(width=120).print(table)


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--task", choices=TASKS, default="countdown", help="default: %(default)s")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS_MEASURED, metavar="NAME")
    parser.add_argument(
        "--seeds", type=whole_number(1), default=TOGETHER, metavar="N", help="runs side by side (default: %(default)s)"
    )
    parser.add_argument(
        "--steps",
        type=whole_number(1),
        default=300,
        metavar="N",
        help="make this number of steps in a run (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON line, last")
    arguments = parser.parse_args(argv)
    if not TASKS[arguments.task].model.is_dir():
        parser.error(f"{TASKS[arguments.task].model}: no such folder; run lab.stability --prepare first")
    import torch

    torch.set_num_threads(1)
    rows = [measure(arguments.task, method, arguments.seeds, arguments.steps) for method in arguments.methods]
    show(rows, arguments.steps)
    if arguments.json:
        runs = [asdict(row) | {"runs_per_core_hour": row.runs_per_core_hour} for row in rows]
        print(json.dumps({"task": arguments.task, "lag": LAG, "steps": arguments.steps, "methods": runs}))
    return 0


if __name__ == "__main__":
    run_command(main)
