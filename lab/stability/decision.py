"""Is one method better than the pair that the guide recommends? `python -m lab.stability.decision [--runs DIR...]`.

Makes no run: lab/stability/decision.md has the commands that make them, and the rule by which the question is decided.
Prints what each candidate and the pair reach at each task and lag, and the candidates' differences, paired by seed.
--out gets decision.csv, a line for each run of a candidate. --report shows the published runs.
"""

import math
from pathlib import Path

import pandas as pd

from lab.stability.candidates import RATES, collected, run_row
from lab.stability.cells import RUN
from lab.stability.contrasts import visible
from lab.stability.inference import holm, paired
from lab.stability.interventions import TASKS
from lab.stability.published import PUBLISHED as PUBLISHED_RUNS
from lab.stability.published import read_curves
from lab.stability.report import show_and_keep
from lab.stability.tables import Table, short
from lab.stability.tuning import at_better_rate
from recipe.command_line import OneLineParser, run_command

CANDIDATES = ("vcpo_half_mean", "vcpo_capped", "topr_half")
PAIR = {8: "vcpo_minibatch", 32: "vcpo_minibatch", 64: "topr", 128: "topr"}
"""By lag, the method that the guide recommends."""
THE_PAIR = "the pair"
SEEDS = (1, 2, 3, 4)
FOLDERS = [Path("outputs") / f"decision-{short(task)}" for task in TASKS]
PUBLISHED = Path("docs/measurements/stability/decision.csv")


def recommended() -> pd.DataFrame:
    """Return a row for each published run of a method in `PAIR`, and of `vcpo_ess`, at these lags, rates and seeds."""
    rows = [
        run_row(task, curve)
        for task, curves in read_curves([PUBLISHED_RUNS / "stability.parquet"], list(PAIR)).items()
        for (method, _, lr, seed), curve in curves.groupby(RUN, sort=False)
        if method in {*PAIR.values(), "vcpo_ess"} and lr in RATES and seed in SEEDS
    ]
    return pd.DataFrame(rows).astype({"collapsed": "Int64"})


def with_pair(runs: pd.DataFrame) -> pd.DataFrame:
    """Return the runs, and once more those that are the pair's, as the method `THE_PAIR`."""
    of_pair = runs[runs["method"] == runs["lag"].map(PAIR)]
    return pd.concat([runs, of_pair.assign(method=THE_PAIR)], ignore_index=True)


def tables(candidates: pd.DataFrame) -> list[Table]:
    """Return the accuracies by task and lag, and the candidates' differences.

    Args:
        candidates: a row for each run of a candidate; the pair's runs are read from those that are published.
    """
    runs = with_pair(pd.concat([candidates, recommended()], ignore_index=True))
    better = at_better_rate(runs)
    better["accuracy"] *= 100
    means = better.groupby(["task", "lag", "method"], sort=False)["accuracy"].mean().unstack("method")
    there = [name for name in CANDIDATES if name in means]
    shown = [*there, THE_PAIR, *dict.fromkeys(PAIR.values()), "vcpo_ess"]
    places = sorted(means[there].dropna().index, key=lambda place: (TASKS.index(place[0]), place[1]))
    accuracies = [
        [short(task), str(lag), *(f"{means.loc[(task, lag), name]:.1f}" for name in shown)] for task, lag in places
    ]
    by_seed = {
        name: of.pivot(index="seed", columns=["task", "lag"], values="accuracy")[places]
        for name, of in better.groupby("method")
    }
    collapsed = runs.groupby("method")["collapsed"].count()
    rows, tests = [], []
    for other in shown[len(there) :]:
        for name in there:
            of, less = by_seed[name], by_seed[other].reindex(by_seed[name].index)
            pair = list(of.mean(axis=1)), list(less.mean(axis=1))
            tests.append(paired(*pair))
            of_tasks = (of - less).mean().groupby("task", sort=False).mean()
            rows.append(
                [f"`{name}`", other if other == THE_PAIR else f"`{other}`"]
                + [f"{value:+.1f}" for value in (tests[-1].mean, tests[-1].low, tests[-1].high, *of_tasks)]
                + [f"{visible(*pair):.1f}", f"{collapsed[name]}, {collapsed[other]}", f"{tests[-1].p:.2g}"]
            )
    of_rule = holm([test.p for test in tests[: len(there)]])
    for row, p in zip(rows, [*of_rule, *[math.nan] * (len(rows) - len(there))], strict=True):
        row.append("" if math.isnan(p) else f"{p:.2g}")
    columns = [
        "candidate",
        "less",
        "points",
        "from",
        "to",
        *(short(task) for task in dict.fromkeys(task for task, _ in places)),
    ]
    return [
        Table(
            "Accuracy after step k at the better rate, %",
            ["task", "k", *(name if name == THE_PAIR else f"`{name}`" for name in shown)],
            accuracies,
        ),
        Table(
            "Differences over all tasks and lags",
            [*columns, "seen with a power of 80 %", "collapsed runs of both", "p", "p (Holm)"],
            rows,
        ),
    ]


def main(argv: list[str] | None = None) -> int:
    """Show and write. Return the exit code: 2 where a folder or a file cannot be used."""
    parser = OneLineParser(prog="python -m lab.stability.decision", description=__doc__)
    parser.add_argument("--runs", type=Path, nargs=len(TASKS), default=FOLDERS, metavar="DIR", help="%(default)s")
    parser.add_argument("--out", type=Path, default=Path("outputs/decision"), help="default: %(default)s")
    parser.add_argument("--report", type=Path, nargs="?", const=PUBLISHED, help="a decision.csv")
    arguments = parser.parse_args(argv)
    return show_and_keep(
        "decision",
        arguments.report,
        arguments.out,
        lambda: collected(arguments.runs, CANDIDATES, tuple(PAIR), SEEDS),
        tables,
    )


if __name__ == "__main__":
    run_command(main)
