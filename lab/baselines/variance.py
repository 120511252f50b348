"""Is OPOB the baseline of least variance? `python -m lab.baselines.variance [--json]`.

A softmax policy over sequences of 6 tokens from 5, small enough that every expectation is an exact sum over all 15625
sequences. The update G(b) = mean over a group of min(w, c) (R - b) g is drawn many times from a sampler whose logits
differ from the policy's, and its total variance tr Cov G is measured:

1. for constant baselines: where is the minimum of the measured variance, and what does each formula's constant cost?
2. for baselines as training uses them, computed from the group itself. They take some of the group's own signal away;
   how much is kept is printed beside the variance.

"w counted twice" is the weight of the published implementation, w^2 times a norm that holds min(w, c) already.
"""

import json
from dataclasses import asdict

from lab.baselines.exact import BLOCKS, GROUP_SIZE, INTERVAL, SETTINGS, BaselineFigures, Minimum, measure
from recipe.command_line import OneLineParser, run_command, whole_number


def print_tables(minima: list[Minimum], rows: list[BaselineFigures]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=110)
    table = Table("setting", "variance is least at b: measured", "exact", "OPOB's formula", "")
    for m in minima:
        interval = f"{m.measured:.4f} ± {INTERVAL * m.standard_error:.4f}"
        table.add_row(m.setting, interval, f"{m.exact:.4f}", f"{m.opob:.4f}", "agrees" if m.agrees else "DIFFERS")
    console.print(table)
    for title, constant in (("constant baselines", True), (f"computed from a group of {GROUP_SIZE}", False)):
        columns = ("setting", "ESS", "baseline", "b", "variance / that of none", "signal")
        table = Table(*columns, title=title)
        for r in rows:
            if (r.constant is not None) == constant:
                value = "" if r.constant is None else f"{r.constant:.3f}"
                error = f"{r.variance:.3f} ± {INTERVAL * r.standard_error:.3f}"
                table.add_row(r.setting, f"{r.ess_ratio:.2f}", r.baseline, value, error, f"{r.signal:.2f}")
        console.print(table)


def main() -> int:
    parser = OneLineParser(description=__doc__)
    parser.add_argument(
        "--groups", type=whole_number(1), default=20000, help="groups drawn in each setting (default 20000)"
    )
    parser.add_argument("--json", action="store_true", help="print everything as one JSON line, last")
    arguments = parser.parse_args()
    if arguments.groups < 2 * BLOCKS:
        parser.error(f"--groups {arguments.groups}: give at least {2 * BLOCKS}")
    results = [measure(*setting, arguments.groups) for setting in SETTINGS]
    minima, rows = [m for m, _ in results], [row for _, part in results for row in part]
    print_tables(minima, rows)
    if arguments.json:
        print(
            json.dumps(
                {"minima": [asdict(m) | {"agrees": m.agrees} for m in minima], "rows": [asdict(r) for r in rows]}
            )
        )
    return 0 if all(m.agrees for m in minima) else 1


if __name__ == "__main__":
    run_command(main)
