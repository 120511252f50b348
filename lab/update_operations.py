"""What packed norms and sums add to an update of a GPU: counted from the operations that the code runs, not measured.

    python -m lab.update_operations [--json]

One prompt's samples of each published task pass through the real collector on the meta device, at the sizes of one GPU
of the trainer. A rank's operations count by bytes, products and launches at an H100's rates
(lab/cost/operations.py). Needs no GPU: a few seconds.
"""

import json
import tempfile
from dataclasses import asdict
from pathlib import Path

from lab.cost.operations import CASES, Count, count, join_alone
from recipe.command_line import OneLineParser, run_command, whole_number
from verl_vcpo.actor.norms.settings import NormsKeep


def print_table(rows: list[Count]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("task", "tokens", "micro-batches", "keep", "plain ms", "added", "launches", "host")
    for row in rows:
        tokens = f"{row.case.samples} of {row.case.mean_tokens}"
        values = (f"{row.plain_s * 1e3:.0f}", f"{row.added:+.0%}", f"{row.launches:,.0f}", f"{row.host:.0%}")
        table.add_row(row.case.task, tokens, str(row.micro_batches), row.keep.value, *values)
    Console(width=110).print(table)
    print("added: device time, relative to a plain forward and backward. launches: the collector's in a micro-batch;")
    print("host: the host's time for them, relative to the device's. Counted operations, not measured times.")


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--rewards", type=whole_number(1), default=2, help="values that a prompt's rewards have (2)")
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON line, last")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        join_alone(Path(folder))
        keeps = (NormsKeep.ACTIVATIONS, NormsKeep.GRADIENTS)
        rows = [count(case, keep, arguments.rewards) for case in CASES for keep in keeps]
    print_table(rows)
    if arguments.json:
        print(json.dumps({"rows": [asdict(row) | {"added": row.added, "host": row.host} for row in rows]}))
    return 0


if __name__ == "__main__":
    run_command(main)
