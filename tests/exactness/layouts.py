"""Every parallel layout computes what one process computes: `python -m tests.exactness.layouts [--layers te] [--json]`.

Trains a few VCPO steps (group OPOB, truncation, ESS-scaled AdamW, gradient clipping) on each layout and on one process,
in real gloo processes on CPU, and compares per-sequence squared gradient norms, ESS ratio, baselines and the parameters
at the end. Norms are measured in every way that the layout allows, and compared with one process that makes one
backward per sequence on the same layers. Exits with 1 where a relative error exceeds 1e-5.

Layers are Megatron's own, or with `--layers te` Transformer Engine's, as a GPU would build them, with a stand-in in
plain torch for their kernels (tests/kit/te_on_cpu.py).
"""

import json
import sys
from dataclasses import asdict, replace

from tqdm import tqdm

from recipe.command_line import OneLineParser, run_command
from tests.exactness.layout_comparisons import LAYOUTS, LIMIT, Comparison, comparisons


def print_table(rows: list[Comparison]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("layout", "method", "procs", "norms", "ESS ratio", "baselines", "parameters", "s/step", "")
    for row in rows:
        errors = (f"{e:.1e}" for e in (row.norms, row.ess_ratio, row.baselines, row.parameters))
        table.add_row(
            row.layout, row.method, str(row.processes), *errors, f"{row.step_s:.2f}", "ok" if row.ok else "WRONG"
        )
    Console(width=150).print(table)


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--only", metavar="TEXT", help="layouts whose name contains TEXT")
    parser.add_argument(
        "--layers", choices=["local", "te"], default="local", help="Megatron's, or Transformer Engine's"
    )
    parser.add_argument("--json", action="store_true", help="print the rows as one JSON line, last")
    arguments = parser.parse_args()
    layouts = [replace(x, layers=arguments.layers) for x in LAYOUTS if (arguments.only or "") in x.name]
    if not layouts:
        parser.error(f"--only {arguments.only}: no such layout; choose from {', '.join(x.name for x in LAYOUTS)}")
    progress = tqdm(comparisons(layouts), total=len(layouts), desc="layouts", file=sys.stderr)
    rows = [row for of_layout in progress for row in of_layout]
    print_table(rows)
    if arguments.json:
        print(json.dumps({"limit": LIMIT, "layers": arguments.layers, "layouts": [asdict(row) for row in rows]}))
    return 0 if all(row.ok for row in rows) else 1


if __name__ == "__main__":
    run_command(main)
