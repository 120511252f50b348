"""docs/measurements/stability.md and its folder say what lab.stability.report prints of published runs."""

from pathlib import Path

import pandas as pd
import pytest

from lab.simulator.grid import fingerprint
from lab.stability.alarm import choose_levels, score_alarm
from lab.stability.figures import draw_all
from lab.stability.preset import TASKS
from lab.stability.published import read_curves, settings
from lab.stability.report import (
    SHOWN,
    Report,
    alarm_halves,
    contrasts_of,
    make_report,
    numbers,
    of_tasks,
    of_the_alarm,
    shifts_of,
)
from lab.stability.tables import all_contrasts
from tests.report.published import difference
from vcpo.diagnostics import AlarmLevels

DOCS = Path(__file__).parents[3] / "docs"
FOLDER, PAGE = DOCS / "measurements" / "stability", DOCS / "measurements" / "stability.md"
RUNS = DOCS / "measurements" / "runs"
_REDO = "python -m lab.stability.report --out docs/measurements/stability, and its tables on the page"


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    return {task: make_report(of, 300) for task, of in read_curves([RUNS / name for name in SHOWN]).items()}


@pytest.fixture(scope="module")
def page() -> str:
    return " ".join(PAGE.read_text().split())


def test_the_tables_are_what_the_command_prints(reports: dict[str, Report]) -> None:
    """And every contrast, in a file of its own."""
    for name, table in (("tables", numbers(reports)), ("contrasts", all_contrasts(contrasts_of(reports)))):
        assert (FOLDER / f"{name}.csv").read_text() == table.to_csv(index=False, lineterminator="\n"), _REDO
    text = PAGE.read_text()
    (overview,) = (table for table in of_tasks(reports) if table.title.startswith("Points ahead"))
    assert overview.markdown() in text, _REDO
    for table in of_the_alarm(reports):  # the page has a choice of their rows
        head, rule, *printed = table.markdown().splitlines()
        shown = text[text.index(f"{head}\n{rule}\n") :].partition("\n\n")[0].splitlines()[2:]
        assert len(shown) > 2 and set(shown) <= set(printed), _REDO


def test_the_figures_are_what_the_command_draws(reports: dict[str, Report], tmp_path: Path) -> None:
    drawn = draw_all({task: report.of_chosen_rates for task, report in reports.items()}, shifts_of(reports), tmp_path)
    assert max(difference(file, FOLDER / file.name) for file in drawn) < 1e-3, _REDO


def test_the_runs_began_with_the_published_policies() -> None:
    """So that the same command makes the same cells. All files together are small."""
    files = sorted(RUNS.glob("*.parquet"))
    assert sum(file.stat().st_size for file in files) <= 1_000_000
    first = {task.preset: fingerprint(task.published) for task in TASKS.values()}
    for file in files:
        assert all(settings(of)["first_policy"] == first[task] for task, of in read_curves([file]).items()), file


def test_every_cell_has_every_seed(reports: dict[str, Report]) -> None:
    """TOPR and the reference have the new ones, too, at the large lags and rates."""
    assert set(reports) == {task.preset for task in TASKS.values()}
    for task, report in reports.items():
        for cell in report.cells:
            new = cell.method in ("topr", "vcpo_ess") and cell.lag >= 64 and cell.lr > 3e-5
            assert set(cell.runs) == set(range(1, 9 if new else 5)), (task, cell.method, cell.lag, cell.lr)


def test_what_is_shown_is_what_the_contrasts_say(page: str) -> None:
    """Those that hold after the correction, and the numbers that are told."""
    rows = pd.read_csv(FOLDER / "contrasts.csv").set_index(["task", "compared", "lags", "method", "less"])
    assert f"all {len(rows)} contrasts" in page and f"all {len(rows)} rows of that file" in page
    shown = rows[rows["verdict"].isin(["better", "worse"])]
    told, untold = page.split("Not after it, but by themselves:")
    told = told[told.index("After it these hold") :]
    best = shown.loc[:, "accuracy at the best rate", :]
    assert all(f"{points:+.1f}" in told for points in best["points"])
    over_rates = shown.loc[:, "accuracy over the rates with new seeds", :]
    assert [name[:3] for name in over_rates.index] == [("countdown4", "64 128", "topr")]
    assert f"{over_rates['points'].iloc[0]:+.1f}" in told
    collapsed = shown.loc["all tasks"]
    assert {method for _, _, method, _ in collapsed.index} == {"none", "tis_seq"}
    for task, number in (("countdown", "+1.3, p = 0.010"), ("sort_digits", "+1.6, p = 0.005")):
        row = rows.loc[(task, "accuracy over the rates with new seeds", "64 128", "topr", "vcpo_ess")]
        assert f"{row['points']:+.1f}, p = {row['p']:.3f}" == number and number in untold


def test_the_power_that_the_page_tells(page: str) -> None:
    rows = pd.read_csv(FOLDER / "contrasts.csv").query("method != 'none'")
    four, eight = (rows.loc[rows["seeds"] == seeds, "seen_at_power_80"] for seeds in (4, 8))
    said = f"sees {four.min():.1f} to {four.max():.1f} points on four seeds, {four.median():.1f} in the middle, and "
    assert f"{said}{eight.min():.1f} to {eight.max():.1f} on eight" in page


def test_what_is_said_of_the_level_follows_from_its_cells(reports: dict[str, Report], page: str) -> None:
    points = shifts_of(reports)
    low, above = points["lr"] < 3e-4, points["shift"] > 0
    every, of_low = (of["shift"].corr(of["gain"], method="spearman") for of in (points, points[low]))
    assert len(points) == 72 and f"all 72 it is {every:.2f}" in page
    assert f"the {low.sum()} cells at 3e-5 and 1e-4 Spearman's correlation is {of_low:.2f}" in page
    gains = points.loc[low & above, "gain"]
    assert f"Seven of them have a baseline above the mean: {gains.mean():.1f} points" in page
    assert len(gains) == 7 and not (gains > 0).any()


def test_the_collapses_are_those_that_the_page_tells(reports: dict[str, Report], page: str) -> None:
    count = {}
    for cell in (cell for report in reports.values() for cell in report.cells if cell.lag):
        collapsed, runs = count.get(cell.method, (0, 0))
        count[cell.method] = collapsed + len(cell.collapse_steps), runs + len(cell.runs)
    told = {name: "{} of {}".format(*count[name]) for name in ("none", "vcpo_ess", "tis_seq", "topr", "vcpo")}
    assert f"{count['none'][0]} of 144 runs of `none` do, and {told['vcpo_ess']} of `vcpo_ess`" in page
    assert f"{told['tis_seq'].replace(' of 144', ' of 144 runs')} collapse (`tis_seq`)" in page
    assert f"({told['topr']} against {told['vcpo_ess']}, p = 0.007)" in page
    assert f"({count['vcpo_minibatch'][0]} against {told['vcpo']}, p = 0.026)" in page


def test_what_is_said_of_the_alarm_follows_from_its_table(reports: dict[str, Report]) -> None:
    choosing, telling = alarm_halves(reports)
    scores = [score_alarm(runs) for runs in telling.values()]
    page = " ".join(PAGE.read_text().split())
    recall = "{:.0f} % of the collapses on `countdown`, {:.0f} % on `countdown4` and {:.0f} % on `sort_digits`"
    assert recall.format(*(100 * score.recall for score in scores)) in page
    precision = "right in {:.0f}, {:.0f} and {:.0f} % of the runs warned of"
    assert precision.format(*(100 * score.precision for score in scores)) in page
    assert choose_levels(choosing) == AlarmLevels(), "and those of docs/reference/metrics.md: test_reference.py"
