"""Is one method better than others that are published? `python -m lab.stability.decision [--of NAME] [--runs DIR...]`.

Makes no run: lab/stability/NAME.md has the commands that make them, and the rule by which the question is decided.
`decision`: is one better than the pair that the guide recommended? `rivals`: does the ESS ratio say more than the lag
does, and where do later methods stand? Prints what each method reaches at each task and lag, the differences, paired by
seed, and accuracies and collapses at each rate; of places where all candidates have all their runs. --out gets
NAME.csv, a line for each run of a candidate. --report shows the published runs.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from lab.simulator.analysis import outcome
from lab.stability.cells import RUN
from lab.stability.contrasts import visible
from lab.stability.inference import holm, paired
from lab.stability.published import PUBLISHED as PUBLISHED_RUNS
from lab.stability.published import read_curves
from lab.stability.report import show_and_keep
from lab.stability.tables import Table, short
from lab.stability.tuning import at_better_rate
from recipe.command_line import OneLineParser, run_command

PAIR = {8: "vcpo_minibatch", 32: "vcpo_minibatch", 64: "topr", 128: "topr"}
"""By lag, the method that the guide recommended."""
THE_PAIR = "the pair"
TASKS = ("countdown_lag", "countdown4_lag", "sort_digits_lag")
RATES, SEEDS, STEPS = (1e-4, 3e-4), (1, 2, 3, 4), 300
PUBLISHED = Path("docs/measurements/stability")


@dataclass(frozen=True)
class Comparison:
    """Methods whose runs are made for it, and others whose runs are published."""

    name: str
    candidates: tuple[str, ...]
    others: tuple[str, ...]
    """The rule is about the first: Holm's correction is over the candidates' differences to it."""
    runs_of_others: Callable[[], pd.DataFrame]


def collected(folders: Sequence[Path], methods: Collection[str]) -> pd.DataFrame:
    """Return a row for each run of these methods in the folders of lab.stability, one folder for each of `TASKS`.

    Raises:
        ValueError: there is none.
    """
    rows = []
    for task, folder in zip(TASKS, folders, strict=True):
        for file in sorted((folder / "runs").glob("*.parquet")):
            curve = pd.read_parquet(file)
            run = curve.iloc[0]
            if run["method"] in methods and run["lag"] in PAIR and run["lr"] in RATES and run["seed"] in SEEDS:
                rows.append(run_row(task, curve))
    if not rows:
        raise ValueError(f"{', '.join(map(str, folders))}: no such run; the page beside this program has the commands")
    return pd.DataFrame(rows).astype({"collapsed": "Int64"})


def run_row(task: str, curve: pd.DataFrame) -> dict[str, Any]:
    """Return what the comparisons read of a run, from its steps; `collapsed` is the step of its collapse, or None."""
    method, lag, lr, seed = curve.iloc[0][["method", "lag", "lr", "seed"]]
    found = outcome(curve, STEPS, int(lag))
    run = {"task": task, "lag": int(lag), "method": method, "lr": lr, "seed": int(seed)}
    return run | {"accuracy": round(found.accuracy, 5), "collapsed": found.collapse_step}


def published(methods: Collection[str]) -> pd.DataFrame:
    """Return a row for each published run of these methods at these lags, rates and seeds."""
    rows = [
        run_row(task, curve)
        for task, curves in read_curves([PUBLISHED_RUNS / "stability.parquet"], list(PAIR)).items()
        for (method, _, lr, seed), curve in curves.groupby(RUN, sort=False)
        if method in methods and lr in RATES and seed in SEEDS
    ]
    return pd.DataFrame(rows).astype({"collapsed": "Int64"})


def recommended() -> pd.DataFrame:
    """Return the published runs of the methods in `PAIR` and of `vcpo_ess`, and the pair's again as `THE_PAIR`."""
    runs = published({*PAIR.values(), "vcpo_ess"})
    of_pair = runs[runs["method"] == runs["lag"].map(PAIR)]
    return pd.concat([runs, of_pair.assign(method=THE_PAIR)], ignore_index=True)


def before_rivals() -> pd.DataFrame:
    """Return the published runs that later methods are compared with."""
    decided = pd.read_csv(PUBLISHED / "decision.csv").astype({"collapsed": "Int64"})
    decided = decided[decided["method"].isin({"vcpo_half_mean", "vcpo_capped"})]
    return pd.concat([published({"vcpo_ess", "topr"}), decided], ignore_index=True)


COMPARISONS = {
    of.name: of
    for of in (
        Comparison(
            "decision",
            ("vcpo_half_mean", "vcpo_capped", "topr_half"),
            (THE_PAIR, "vcpo_minibatch", "topr", "vcpo_ess"),
            lambda: recommended(),
        ),
        Comparison(
            "rivals",
            ("lag_law", "p3o", "dppo_tv", "r2vpo_dual"),
            ("vcpo_ess", "vcpo_half_mean", "vcpo_capped", "topr"),
            lambda: before_rivals(),
        ),
    )
}


def finished(runs: pd.DataFrame, methods: Collection[str]) -> list[tuple[str, int]]:
    """Return the places, tasks and lags, where these methods have a run of each seed at each rate, in order."""
    count = runs.groupby(["task", "lag", "method"]).size().unstack("method").reindex(columns=list(methods))
    whole = count[(count == len(RATES) * len(SEEDS)).all(axis=1)]
    return sorted(whole.index, key=lambda place: (TASKS.index(place[0]), place[1]))


def tables(candidates: pd.DataFrame, of: Comparison | None = None) -> list[Table]:
    """Return the accuracies by task and lag, the candidates' differences, and what happens at each rate.

    Args:
        candidates: a row for each run of a candidate; the others' runs are read from those that are published.
        of: the comparison; None: `decision`.
    """
    of = of or COMPARISONS["decision"]
    runs = pd.concat([candidates, of.runs_of_others()], ignore_index=True)
    there = [name for name in of.candidates if name in set(runs["method"])]
    names = {name: name if name == THE_PAIR else f"`{name}`" for name in (*there, *of.others)}
    if not (places := finished(runs, there)):
        raise ValueError("at no task and lag there are all runs of all candidates; go on with those of the page")
    runs = runs[[place in places for place in zip(runs["task"], runs["lag"], strict=True)]]
    better = at_better_rate(runs)
    better["accuracy"] *= 100
    means = better.groupby(["task", "lag", "method"], sort=False)["accuracy"].mean().unstack("method")
    accuracies = [
        [short(task), str(lag), *(f"{means.loc[(task, lag), name]:.1f}" for name in names)] for task, lag in places
    ]
    of_tasks = [short(task) for task in dict.fromkeys(task for task, _ in places)]
    return [
        Table("Accuracy after step k at the better rate, %", ["task", "k", *names.values()], accuracies),
        Table(
            "Differences over all tasks and lags",
            [
                *("candidate", "less", "points", "from", "to", *of_tasks),
                *("seen with a power of 80 %", "collapsed runs of both", "p", "p (Holm)"),
            ],
            _differences(better, runs, places, there, names),
        ),
        Table(
            "At each rate: accuracy, %, and how many runs collapse",
            ["k", "rate", "runs", *names.values()],
            _at_each_rate(runs, list(names)),
        ),
    ]


def _differences(
    better: pd.DataFrame, runs: pd.DataFrame, places: list[tuple[str, int]], there: list[str], names: dict[str, str]
) -> list[list[str]]:
    by_seed = {
        name: of.pivot(index="seed", columns=["task", "lag"], values="accuracy")[places]
        for name, of in better.groupby("method")
    }
    collapsed = runs.groupby("method")["collapsed"].count()
    rows, tests = [], []
    for other in list(names)[len(there) :]:
        for name in there:
            of, less = by_seed[name], by_seed[other].reindex(by_seed[name].index)
            pair = list(of.mean(axis=1)), list(less.mean(axis=1))
            tests.append(paired(*pair))
            of_tasks = (of - less).mean().groupby("task", sort=False).mean()
            rows.append(
                [names[name], names[other]]
                + [f"{value:+.1f}" for value in (tests[-1].mean, tests[-1].low, tests[-1].high, *of_tasks)]
                + [f"{visible(*pair):.1f}", f"{collapsed[name]}, {collapsed[other]}", f"{tests[-1].p:.2g}"]
            )
    of_rule = holm([test.p for test in tests[: len(there)]])
    for row, p in zip(rows, [*of_rule, *[math.nan] * (len(rows) - len(there))], strict=True):
        row.append("" if math.isnan(p) else f"{p:.2g}")
    return rows


def _at_each_rate(runs: pd.DataFrame, names: list[str]) -> list[list[str]]:
    """A line for each lag and rate: of each method the mean over tasks and seeds, and its collapsed runs."""
    rows = []
    for (lag, lr), at in runs.groupby(["lag", "lr"]):
        of = {str(name): method for name, method in at.groupby("method")}
        cells = [f"{100 * of[name]['accuracy'].mean():.1f}, {of[name]['collapsed'].count()}" for name in names]
        rows.append([str(lag), f"{lr:.0e}".replace("e-0", "e-"), str(len(of[names[0]])), *cells])
    return rows


def main(argv: list[str] | None = None) -> int:
    """Show and write. Return the exit code: 2 where a folder or a file cannot be used."""
    parser = OneLineParser(prog="python -m lab.stability.decision", description=__doc__)
    parser.add_argument("--of", choices=COMPARISONS, default="decision", help="default: %(default)s")
    parser.add_argument(
        "--runs", type=Path, nargs=len(TASKS), metavar="DIR", help="default: outputs/NAME-TASK of each task"
    )
    parser.add_argument("--out", type=Path, help="default: outputs/NAME")
    parser.add_argument("--report", type=Path, nargs="?", const=Path(), metavar="FILE", help="default: the published")
    arguments = parser.parse_args(argv)
    of = COMPARISONS[arguments.of]
    folders = arguments.runs or [Path("outputs") / f"{of.name}-{short(task)}" for task in TASKS]
    report = PUBLISHED / f"{of.name}.csv" if arguments.report == Path() else arguments.report
    return show_and_keep(
        of.name,
        report,
        arguments.out or Path("outputs") / of.name,
        lambda: collected(folders, of.candidates),
        lambda runs: tables(runs, of),
    )


if __name__ == "__main__":
    run_command(main)
