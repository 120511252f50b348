"""What is a baseline worth that is estimated from few sequences? `python -m lab.baselines.estimates [--json]`.

1. The variance of the update with three unbiased baselines, from the other sequences of a group of 8 or 64, above the
   variance with the best constant. Beside them the mean reward, if it were known. At four ESS ratios, and for rewards
   that depend on the weight not at all, somewhat and much (the slope of the log odds).
2. How much of the update is left by OPOB of the group itself, which knows each sequence's own reward.

The weights are log-normal; lab/baselines/few_samples.py describes the world. The other question, which
constant is best, is that of `lab.baselines.variance`.
"""

import itertools
import json
import sys
from dataclasses import asdict

from tqdm import tqdm

from lab.baselines.few_samples import BLOCKS, INTERVAL, RATIOS, SIZES, SLOPES, Excess, Kept, measure
from recipe.command_line import OneLineParser, run_command, whole_number


def print_tables(rows: list[Excess], kept: list[Kept]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=110)
    names = list(dict.fromkeys(row.baseline for row in rows))
    table = Table("slope", "ESS ratio", "sequences", *names, title="variance above that of the best constant")
    for where in dict.fromkeys((row.slope, row.ess_ratio, row.size) for row in rows):
        cells = [row for row in rows if (row.slope, row.ess_ratio, row.size) == where]
        shown = [f"{row.excess:+.1%} ± {INTERVAL * row.standard_error:.1%}" for row in cells]
        table.add_row(f"{where[0]:g}", f"{where[1]:.2f}", str(where[2]), *shown)
    console.print(table)
    table = Table("slope", "ESS ratio", "sequences", "signal", "of the largest", title="kept by OPOB of the group")
    for row in kept:
        numbers = (f"{row.slope:g}", f"{row.ess_ratio:.2f}", str(row.size))
        table.add_row(*numbers, f"{row.signal:.0%}", f"{row.of_largest:.0%}")
    console.print(table)


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--groups", type=whole_number(1), default=4000, help="groups drawn of each kind (default 4000)")
    parser.add_argument("--json", action="store_true", help="print everything as one JSON line, last")
    arguments = parser.parse_args()
    if arguments.groups < 2 * BLOCKS:
        parser.error(f"--groups {arguments.groups}: give at least {2 * BLOCKS}")
    kinds = list(itertools.product(SLOPES, RATIOS, SIZES))
    progress = tqdm(kinds, file=sys.stderr)
    measured = [measure(slope, ratio, size, arguments.groups) for slope, ratio, size in progress]
    rows, kept = [row for part, _ in measured for row in part], [row for _, row in measured]
    print_tables(rows, kept)
    if arguments.json:
        print(json.dumps({"excess": [asdict(row) for row in rows], "kept": [asdict(row) for row in kept]}))
    return 0


if __name__ == "__main__":
    run_command(main)
