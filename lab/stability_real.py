"""Does the real stack do what the simulator says? `python -m lab.stability_real [--json] [--figures DIR]`.

The same preset, first policy, lag and learning rate through Ray, vLLM and Megatron on CPU and through the lag
simulator: a method that collapses and one that does not, three seeds each. Runs are kept in --out: the same command
goes on where it was stopped. Problems and samples differ, so compare what becomes of a run, not its digits. 24
minutes on 2 cores.
"""

import json
import sys
from pathlib import Path

from lab.stability.preset import METHODS as ALL_METHODS
from lab.stability.preset import prepare
from lab.stability.real_stack import LAG, METHODS, SEEDS, STEPS, TASK, compare, outcomes, table
from lab.stability.report import show_tables
from recipe.command_line import OneLineParser, run_command, whole_number


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument(
        "--methods",
        nargs="+",
        choices=ALL_METHODS,
        default=METHODS,
        metavar="NAME",
        help="default: none vcpo_ess",
    )
    parser.add_argument("--seeds", nargs="+", type=whole_number(0), default=SEEDS, metavar="N", help="default: 1 2 3")
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
        curves = compare(arguments.out, arguments.methods, arguments.seeds, arguments.lag, arguments.steps)
    except (RuntimeError, ValueError) as error:
        print(f"stability_real: {error}", file=sys.stderr)
        return 2
    runs = outcomes(curves, arguments.steps, arguments.lag)
    show_tables([table(runs, arguments.lag)])
    if arguments.figures:
        from lab.stability.figures import beside

        print(f"Figure: {beside(curves, arguments.figures / 'real_stack.png')}")
    if arguments.json:
        rows = json.loads(runs.to_json(orient="records"))  # null where a run has not collapsed
        print(json.dumps({"lag": arguments.lag, "steps": arguments.steps, "rows": rows}))
    return 0


if __name__ == "__main__":
    run_command(main)
