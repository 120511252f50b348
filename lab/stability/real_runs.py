"""Do Ray, vLLM and Megatron contradict the decision? `python -m lab.stability.real_runs [--runs DIR...]`.

Makes no run: lab/stability/decision.md has the commands that make them, and the rules. Prints each method's accuracies,
and each candidate's differences from the methods before it, paired by seed. --out gets real_runs.csv, a line for each
evaluation. --report shows the published runs.
"""

from collections.abc import Iterable
from pathlib import Path

import pandas as pd

from lab.simulator.analysis import accuracy_after
from lab.stability.contrasts import visible
from lab.stability.inference import paired, pairs_by_seed
from lab.stability.report import show_and_keep
from lab.stability.tables import Table
from recipe.command_line import OneLineParser, run_command
from scripts.report.runs import read_run
from verl_vcpo.report.run_log import ACCURACIES

CANDIDATES = ("vcpo_half_mean", "vcpo_capped")
"""In the order of the decisions."""
PUBLISHED = Path("docs/measurements/stability/real_runs.csv")
RUN = ["task", "lag", "method", "seed"]
NO_SIGN = "none"
"""No sign of the alarm since the evaluation before; an empty cell says that none was looked for."""


def evaluations(folder: Path) -> pd.DataFrame:
    """Return a row for each evaluation of a finished run: its accuracy, and the alarm's signs since the one before.

    Raises:
        ValueError: the folder has no finished run.
    """
    run = read_run(folder)
    if not run.finished:
        raise ValueError(f"{folder}: the run is not finished; resume the run, or leave the folder out")
    rows, signs = [], set[str]()
    for step in run.lines:
        signs |= set(step.get("collapse_signs") or [])
        if step.get("val_accuracy") is not None:
            rows.append(
                {
                    "step": step["step"],
                    "val_accuracy": step["val_accuracy"],
                    "signs": " ".join(sorted(signs)) or NO_SIGN,
                }
            )
            signs = set()
    task = "+".join(run.lines[0][ACCURACIES])
    names = {"task": task, "lag": int(run.lag), "method": run.config.method, "seed": run.config.data.seed}
    return pd.DataFrame([names | row for row in rows])


def tables(rows: pd.DataFrame) -> list[Table]:
    """Return the accuracies of each method, and each candidate's differences from the methods before it."""
    runs = [
        dict(zip(RUN, name, strict=True))
        | {"start": curve["val_accuracy"].iloc[0], "end": curve["val_accuracy"].iloc[-1]}
        | {"accuracy": accuracy_after(curve, name[1], int(curve["step"].max()))}
        | {"alarm": None if curve["signs"].isna().all() else (curve["signs"].fillna(NO_SIGN) != NO_SIGN).any()}
        for name, curve in rows.groupby(RUN, sort=False)
    ]
    every = pd.DataFrame(runs)
    reached: list[list[str]] = []
    differences: dict[str, list[list[str]]] = {name: [] for name in CANDIDATES if name in set(every["method"])}
    for (task, lag), of in every.groupby(["task", "lag"], sort=False):
        by_method = {str(method): found.set_index("seed") for method, found in of.groupby("method", sort=False)}
        for method, found in by_method.items():
            shown = [", ".join(f"{100 * value:.1f}" for value in found[name]) for name in ("start", "accuracy", "end")]
            alarms = "-" if found["alarm"].isna().any() else f"{sum(found['alarm'])} of {len(found)}"
            mean = f"{100 * found['accuracy'].mean():.1f}"
            reached.append([str(task), str(lag), f"`{method}`", *shown, mean, alarms])
        for candidate, method in ((c, m) for c in differences if c in by_method for m in _before(c, by_method)):
            of_both = ((100 * by_method[name]["accuracy"]).to_dict() for name in (candidate, method))
            pair = pairs_by_seed(*of_both)
            test = paired(*pair)
            points = [f"{value:+.1f}" for value in (test.mean, test.low, test.high)]
            row = [str(task), str(lag), f"`{method}`", *points, f"{test.p:.2g}", f"{visible(*pair):.1f}"]
            differences[candidate].append(row)
    columns = [
        "task",
        "k",
        "method",
        "before, each seed",
        "after step k, each seed",
        "at the end",
        "after step k, mean",
    ]
    return [
        Table("Held-out accuracy, %", [*columns, "runs with an alarm"], reached),
        *(
            Table(
                f"`{candidate}` less others, after step k",
                ["task", "k", "less", "points", "from", "to", "p", "seen with a power of 80 %"],
                rows_of,
            )
            for candidate, rows_of in differences.items()
        ),
    ]


def _before(candidate: str, methods: Iterable[str]) -> list[str]:
    later = CANDIDATES[CANDIDATES.index(candidate) :]
    return [method for method in methods if method not in later]


def main(argv: list[str] | None = None) -> int:
    """Show and write. Return the exit code: 2 where a folder or a file cannot be used."""
    parser = OneLineParser(prog="python -m lab.stability.real_runs", description=__doc__)
    parser.add_argument("--runs", type=Path, nargs="+", default=[], metavar="DIR", help="folders of finished runs")
    parser.add_argument("--out", type=Path, default=Path("outputs/real-runs"), help="default: %(default)s")
    parser.add_argument("--report", type=Path, nargs="?", const=PUBLISHED, help="a real_runs.csv")
    arguments = parser.parse_args(argv)
    if not (arguments.runs or arguments.report):
        parser.error("give --runs DIR..., or --report")
    return show_and_keep(
        "real_runs",
        arguments.report,
        arguments.out,
        lambda: pd.concat([evaluations(folder) for folder in arguments.runs], ignore_index=True),
        tables,
    )


if __name__ == "__main__":
    run_command(main)
