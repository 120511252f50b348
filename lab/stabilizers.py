"""Every `method=NAME` on the real stack: `python -m lab.stabilizers [--only NAME ...] [--json]`.

A few steps each through Ray, vLLM and Megatron on CPU, at lag 1, one run after another: about a minute each on 2
cores. Exits with 1 where a run fails, or a step's gradient is not finite.
"""

import json
import sys
from dataclasses import asdict

from tqdm import tqdm

from lab.stability.preset import METHODS
from lab.stability.stabilizer_runs import LAG, STEPS, StabilizerExecution, executions
from recipe.command_line import OneLineParser, run_command


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
