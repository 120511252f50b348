"""Does OPOB gain by its level? `python -m lab.stability.interventions [--runs DIR... | --report [FILE]]`.

Makes no run: lab/stability/predictions.md has the commands that make them, and says what each comparison decides.
Prints, for each task and lag, the paired differences to `vcpo_ess`, and which share of OPOB's gain or loss each
intervention has. --out gets interventions.csv, a line for each run, and interventions.png. --report shows the published
runs.
"""

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from lab.simulator.analysis import outcome
from lab.simulator.level import MEAN_WITH_LEVEL, OPOB_WITHOUT_LEVEL
from lab.stability.contrasts import visible
from lab.stability.figures import new_figure, save
from lab.stability.inference import Difference, paired
from lab.stability.report import show_tables
from lab.stability.tables import Table, short
from recipe.command_line import OneLineParser, run_command
from verl_vcpo.common.whole_file import write_whole

REFERENCE, WHOLE, HALF_MEAN = "vcpo_ess", "vcpo", "vcpo_half_mean"
RATE, STEPS = 1e-4, 300
COMPARED = (WHOLE, MEAN_WITH_LEVEL, OPOB_WITHOUT_LEVEL, HALF_MEAN, "vcpo_published")
EFFECT = 0.05
"""The p below which OPOB has an effect at a task and lag; not corrected."""
TASKS = ("countdown_lag", "countdown4_lag", "sort_digits_lag")
FOLDERS = [Path("outputs") / name for name in ("stability", "stability-countdown4", "stability-sort_digits")]
PUBLISHED = Path("docs/measurements/stability/interventions.csv")


@dataclass(frozen=True)
class Place:
    """A task and a lag: what each method differs by from `vcpo_ess`, in points."""

    task: str
    lag: int
    accuracy: float
    """The accuracy of `vcpo_ess` after step k, %."""
    differences: dict[str, Difference]
    visible: float
    """The points between `vcpo` and `vcpo_ess` that the test sees with a power of 80 %."""
    level: dict[str, float]
    """The mean baseline less the mean reward of a method, in hundredths of a reward."""

    @property
    def has_effect(self) -> bool:
        return self.differences[WHOLE].p < EFFECT

    def share(self, method: str) -> float:
        """Return the method's difference as a part of that of `vcpo`."""
        return self.differences[method].mean / self.differences[WHOLE].mean


def collected(folders: Sequence[Path], seeds: Sequence[int]) -> pd.DataFrame:
    """Return a row for each run of the compared methods with these seeds in the folders of lab.stability."""
    rows = []
    for task, folder in zip(TASKS, folders, strict=True):
        for file in sorted((folder / "runs").glob("*.parquet")):
            curve = pd.read_parquet(file)
            run = curve.iloc[0]
            if run["method"] not in (REFERENCE, *COMPARED) or run["seed"] not in seeds or run["lr"] != RATE:
                continue
            found = outcome(curve, STEPS, int(run["lag"]))
            rows.append(
                {
                    "task": task,
                    "lag": int(run["lag"]),
                    "method": run["method"],
                    "seed": int(run["seed"]),
                    "accuracy": round(found.accuracy, 5),
                    "collapsed": found.collapse_step,
                    "level": round(float(found.shift), 5),
                }
            )
    if not rows:
        raise ValueError(f"{', '.join(map(str, folders))}: no run of an intervention; predictions.md has the commands")
    table = pd.DataFrame(rows).astype({"collapsed": "Int64"})
    table["task"] = pd.Categorical(table["task"], TASKS)
    return table.sort_values(["task", "lag", "method", "seed"], ignore_index=True).astype({"task": "str"})


def places(runs: pd.DataFrame) -> list[Place]:
    """Return all tasks and lags at which `vcpo` and `vcpo_ess` were run, with the methods that have the same seeds."""
    found = []
    for (task, lag), at in runs.groupby(["task", "lag"], sort=False):
        of = {str(name): rows.set_index("seed") for name, rows in at.groupby("method")}
        reference = 100 * of[REFERENCE]["accuracy"] if REFERENCE in of else pd.Series(dtype=float)
        values = {name: 100 * of[name]["accuracy"].reindex(reference.index) for name in COMPARED if name in of}
        whole = {name: list(value) for name, value in values.items() if value.notna().all()}
        if WHOLE not in whole or reference.empty:
            continue
        found.append(
            Place(
                str(task),
                int(lag),
                statistics.mean(reference),
                {name: paired(value, list(reference)) for name, value in whole.items()},
                visible(whole[WHOLE], list(reference)),
                {name: 100 * float(rows["level"].mean()) for name, rows in of.items()},
            )
        )
    return found


def tables(found: Sequence[Place]) -> list[Table]:
    """Return the differences at each task and lag, and the shares of OPOB's effect where it has one."""
    rows = [
        [
            *(short(place.task), str(place.lag), f"{place.accuracy:.1f}"),
            *(_cell(place.differences.get(name)) for name in COMPARED),
            f"{place.visible:.1f}",
            *(f"{place.level.get(name, math.nan):+.1f}" for name in (WHOLE, "vcpo_published")),
        ]
        for place in found
    ]
    columns = ["task", "lag", REFERENCE, *(f"`{name}`" for name in COMPARED), "seen", "level", "level, published"]
    title = f"Points ahead of {REFERENCE}, paired; *: p < {EFFECT}"
    effect = [place for place in found if place.has_effect]
    shares = []
    for name in COMPARED[1:]:
        at = [place for place in effect if name in place.differences]
        if not at:
            continue
        values = [place.share(name) for place in at]
        against = [place for place in at if place.share(name) < 0 and place.differences[name].p < EFFECT]
        cells = (f"{statistics.mean(values):.2f}", f"{statistics.median(values):.2f}")
        shares.append([f"`{name}`", str(len(at)), *cells, str(sum(value > 0 for value in values)), str(len(against))])
    heads = ["method", "places with an effect", "mean share", "median share", "same sign", "other sign, p < 0.05"]
    return [Table(title, columns, rows), Table("The share of the gain or loss of vcpo", heads, shares)]


def _cell(difference: Difference | None) -> str:
    if difference is None:
        return "-"
    return f"{difference.mean:+.1f}{'*' if difference.p < EFFECT else ''}"


def draw(found: Sequence[Place], file: Path) -> Path:
    """Draw each intervention's points ahead of `vcpo_ess` against those of `vcpo`: on the diagonal they are equal."""
    shown = COMPARED[1:3]
    figure, axes = new_figure(1, len(shown), figsize=(4.8 * len(shown), 4.4), sharey=True)
    titles = ("OPOB's level on the group's mean", "OPOB without its level")
    for axis, name, title in zip(axes[0], shown, titles, strict=True):
        for number, task in enumerate(TASKS):
            at = [place for place in found if place.task == task and name in place.differences]
            x, y = ([place.differences[of].mean for place in at] for of in (WHOLE, name))
            reach = [[place.differences[of].high - place.differences[of].mean for place in at] for of in (WHOLE, name)]
            axis.errorbar(x, y, reach[1], reach[0], fmt="o", color=f"C{number}", elinewidth=0.6, label=short(task))
        low, high = axis.get_xlim()
        axis.plot([low, high], [low, high], color="0.6", linewidth=1)
        axis.axhline(0, color="0.6", linewidth=1)
        axis.set_title(title, loc="left")
        axis.set_xlabel("points of OPOB ahead of the mean")
    axes[0, 0].set_ylabel("points ahead of the mean")
    axes[0, 0].legend(frameon=False, fontsize="small")
    return save(figure, file)


def main(argv: list[str] | None = None) -> int:
    """Read, show and write. Return the exit code: 2 where there are no runs."""
    parser = OneLineParser(prog="python -m lab.stability.interventions", description=__doc__)
    parser.add_argument("--runs", nargs=3, type=Path, default=FOLDERS, metavar="DIR", help="of the tasks: %(default)s")
    parser.add_argument("--seeds", nargs="+", type=int, default=range(21, 29), metavar="N", help="default: 21 to 28")
    parser.add_argument("--report", type=Path, nargs="?", const=PUBLISHED, help="an interventions.csv")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write the line of each run and the figure there")
    arguments = parser.parse_args(argv)
    try:
        if arguments.report:
            runs = pd.read_csv(arguments.report).astype({"collapsed": "Int64"})
        else:
            runs = collected(arguments.runs, list(arguments.seeds))
    except (OSError, ValueError) as error:
        print(f"stability.interventions: {error}", file=sys.stderr)
        return 2
    found = places(runs)
    show_tables(tables(found))
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        write_whole(arguments.out / "interventions.csv", runs.to_csv(index=False, lineterminator="\n"))
        print(draw(found, arguments.out / "interventions.png"))
    return 0


if __name__ == "__main__":
    run_command(main)
