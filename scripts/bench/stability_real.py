"""Does the real stack do what the simulator says? `python -m scripts.bench.stability_real [--json] [--figures DIR]`.

The same preset, first policy, lag and learning rate through Ray, vLLM and Megatron on CPU and through the lag
simulator: a method that collapses and one that does not. Runs are kept in --out: the same command goes on where it was
stopped. Problems and samples differ, so compare what becomes of a run, not its digits. About a quarter of an hour.
"""

import json
import sys
from pathlib import Path

import pandas as pd

from recipe.command_line import OneLineParser, run_command, whole_number
from recipe.lag_simulator.analysis import outcome
from scripts.bench.stability.preset import METHODS as ALL_METHODS
from scripts.bench.stability.preset import prepare
from scripts.bench.stability.real_stack import LAG, METHODS, STEPS, TASK, compare


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument(
        "--methods", nargs="+", choices=ALL_METHODS, default=METHODS, metavar="NAME", help="default: none vcpo"
    )
    parser.add_argument("--lag", type=whole_number(0), default=LAG, metavar="K", help="default: %(default)s")
    parser.add_argument("--steps", type=whole_number(1), default=STEPS, metavar="N", help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("outputs/stability-real"), help="default: %(default)s")
    parser.add_argument("--figures", type=Path, metavar="DIR", help="draw the curves there")
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON line, last")
    arguments = parser.parse_args()
    if arguments.lag >= arguments.steps:
        parser.error(f"--steps {arguments.steps}: there is no evaluation after step --lag {arguments.lag}; give more")
    try:
        prepare(TASK)
        curves = compare(arguments.out, arguments.methods, arguments.lag, arguments.steps)
    except (RuntimeError, ValueError) as error:
        print(f"stability_real: {error}", file=sys.stderr)
        return 2
    rows = []
    for (method, stack), curve in curves.groupby(["method", "stack"], sort=False):
        result = outcome(curve, arguments.steps, arguments.lag)
        rows.append({"method": method, "stack": stack, **vars(result)})
    print(pd.DataFrame(rows).to_string(index=False))
    if arguments.figures:
        from scripts.bench.stability.figures import beside

        print(f"Figure: {beside(curves, arguments.figures / 'real_stack.png')}")
    if arguments.json:
        print(json.dumps({"lag": arguments.lag, "steps": arguments.steps, "rows": rows}))
    return 0


if __name__ == "__main__":
    run_command(main)
