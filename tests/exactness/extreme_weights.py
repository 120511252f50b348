"""Is the gradient right for every weight? `python -m tests.exactness.extreme_weights [--json]`.

One update of the real Megatron actor on a small model, in one process on CPU, with log importance weights between -40
and 40, for every way to form the gradient (`vcpo.norms.how` and scope). Its gradient is compared
with one backward per sequence, whose gradients are added up in float64 with coefficients in which nothing cancels. A
`+` marks an update that found that its two sums would not do, and took a second backward. A less exact way stands
beside: the two sums without a second backward. Takes a minute; exits with 1 where a relative error of the others
exceeds 1e-4.
"""

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from tqdm import tqdm

from recipe.command_line import OneLineParser, run_command
from tests.exactness.extreme_weight_cases import BESIDE, LIMIT, SPREADS, WAYS, Error, errors
from tests.kit.actor import join_processes


def print_table(rows: list[Error]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("weights", "spread", *WAYS, *BESIDE)
    for weights, spreads in SPREADS.items():
        for spread in spreads:
            of_spread = {row.way: row for row in rows if (row.weights, row.spread) == (weights, spread)}
            cells = (f"{row.relative:.1e}{'+' if row.second_backward else ''}" for row in of_spread.values())
            table.add_row(weights, f"{spread:g}", *cells)
    Console(width=180).print(table)


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON line, last")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        join_processes(0, 1, Path(folder))
        total = (len(WAYS) + len(BESIDE)) * sum(map(len, SPREADS.values()))
        rows = list(tqdm(errors(Path(folder)), total=total, desc="updates", file=sys.stderr))
    print_table(rows)
    worst = max(row.relative for row in rows if row.way in WAYS)
    if arguments.json:
        print(json.dumps({"limit": LIMIT, "worst_relative_error": worst, "updates": [asdict(row) for row in rows]}))
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    run_command(main)
