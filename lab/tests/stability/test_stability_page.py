"""docs/measurements/stability.md and its folder say what lab.stability.report prints of published runs."""

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from lab.simulator.grid import fingerprint
from lab.stability.alarm import choose_levels, score_alarm
from lab.stability.contrasts import BEST, RATES, SAME, Contrast
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
    shifts_of,
    write,
)
from lab.stability.tables import all_contrasts
from tests.report.published import difference
from vcpo.diagnostics import AlarmLevels

DOCS = Path(__file__).parents[3] / "docs"
FOLDER, PAGE = DOCS / "measurements" / "stability", DOCS / "measurements" / "stability.md"
RUNS = DOCS / "measurements" / "runs"
LAG = 128
_REDO = "python -m lab.stability.report, as the page says, and what it prints on the page"


def reports_of(*names: str, lags: list[int] | None = None) -> dict[str, Report]:
    files = [RUNS / f"{name}.parquet" for name in names]
    return {task: make_report(of, 300) for task, of in read_curves(files, lags).items()}


def with_reference(reports: dict[str, Report], task: str) -> dict[str, Contrast]:
    found = contrasts_of(reports)[task]
    return {one.method: one for one in found if one.compared == BEST and one.against == "vcpo_ess"}


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    return reports_of(*(Path(name).stem for name in SHOWN))


@pytest.fixture(scope="module")
def every() -> dict[str, Report]:
    return reports_of("all-methods", "stability", lags=[LAG])


@pytest.fixture(scope="module")
def page() -> str:
    return " ".join(PAGE.read_text().split())


def test_the_page_is_short_and_names_every_spreadsheet(page: str) -> None:
    """Two figures and one table; the rest is in files."""
    assert len(page.split()) <= 1500 and page.count("![") == 2 and PAGE.read_text().count("\n| --") == 1
    assert all(f"(stability/{file.relative_to(FOLDER)})" in page for file in FOLDER.rglob("*.csv"))


def test_the_folder_is_as_written(reports: dict[str, Report], every: dict[str, Report], tmp_path: Path) -> None:
    """And the page the overview of the methods that have not left the project."""
    for file in write(reports, tmp_path):
        published, is_figure = FOLDER / file.name, file.suffix == ".png"
        assert difference(file, published) < 1e-3 if is_figure else file.read_text() == published.read_text(), _REDO
    for folder, of in (("all-methods", every), ("three-times-the-rate", reports_of("screen"))):
        for name, table in (("contrasts", all_contrasts(contrasts_of(of))), ("tables", numbers(of))):
            text = table.to_csv(index=False, lineterminator="\n")
            assert (FOLDER / folder / f"{name}.csv").read_text() == text, _REDO
    (overview,) = (table for table in of_tasks(reports) if table.title.startswith("Points ahead"))
    stay = [row for row in overview.rows if row[0] not in ("`vcpo_ess_tempered`", "`vcpo_ess_kl`")]
    assert replace(overview, rows=stay).markdown() in PAGE.read_text(), _REDO


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
    assert f"has all {len(rows)} contrasts" in page
    shown = rows[rows["verdict"].isin(["better", "worse"])]
    told, untold = page.split("Not after it, but by themselves:")
    told = told[told.index("After it these hold") :]
    best = shown.loc[:, BEST, :].drop(index="vcpo_ess", level="less")  # the table has those
    assert [name[2:] for name in best.index] == [("topr", "vcpo_minibatch")]
    over_rates = shown.loc[:, RATES, :]
    assert [name[:3] for name in over_rates.index] == [("countdown4", "64 128", "topr")]
    assert all(f"({of['points'].iloc[0]:+.1f})" in told for of in (best, over_rates))
    collapsed = shown.loc["all tasks"]
    assert {method for _, _, method, _ in collapsed.index} == {"none", "tis_seq"}
    for task, number in (("countdown", "+1.3, p = 0.010"), ("sort_digits", "+1.6, p = 0.005")):
        row = rows.loc[(task, RATES, "64 128", "topr", "vcpo_ess")]
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
    assert f"{told['none'].replace(' of 144', ' of 144 runs')} of `none`" in page
    assert f"({told['vcpo_ess'].replace(' of 192', ' of 192 runs')} of `vcpo_ess`)" in page
    assert f"{told['tis_seq'].replace(' of 144', ' of 144 runs')} collapse (`tis_seq`)" in page
    assert f"({told['topr']} against {told['vcpo_ess']}, p = 0.007)" in page
    assert f"({count['vcpo_minibatch'][0]} against {told['vcpo']}, p = 0.026)" in page


def test_what_is_said_of_the_alarm_follows_from_its_table(reports: dict[str, Report], page: str) -> None:
    choosing, telling = alarm_halves(reports)
    scores = [score_alarm(runs) for runs in telling.values()]
    recall = "{:.0f} % of the collapses on `countdown`, {:.0f} % on `countdown4` and {:.0f} % on `sort_digits`"
    assert recall.format(*(100 * score.recall for score in scores)) in page
    precision = "right in {:.0f}, {:.0f} and {:.0f} % of the runs warned of"
    assert precision.format(*(100 * score.precision for score in scores)) in page
    assert choose_levels(choosing) == AlarmLevels(), "and those of docs/reference/metrics.md: test_reference.py"


def test_what_is_said_about_the_order_of_methods(every: dict[str, Report], page: str) -> None:
    found = with_reference(every, "countdown_lag")
    assert f"{len({cell.method for cell in every['countdown_lag'].cells})} methods at lag {LAG}" in page
    assert not [name for name, one in found.items() if one.verdict == "better"]
    worse = ", ".join(f"`{name}`" for name, one in found.items() if one.verdict == "worse")
    assert f"Shown to be worse: {worse}." in page
    dead = [cell.method for cell in every["countdown_lag"].chosen if len(cell.collapse_steps) > len(cell.runs) / 2]
    assert f"Most runs of {', '.join(f'`{name}`' for name in sorted(dead))} collapse" in page


def test_what_is_said_of_three_times_the_rate(page: str) -> None:
    """The weights of group OPOB do no harm, its baseline does."""
    fast = reports_of("screen")
    of = {cell.method: f"{100 * cell.accuracy:.1f} %" for cell in fast["countdown_lag"].chosen}
    assert f"`vcpo_ess` ends at {of['vcpo_ess']} and `tis_seq` at {of['tis_seq']}" in page
    verdicts = {name: one.verdict for name, one in with_reference(fast, "countdown_lag").items()}
    assert {name for name, verdict in verdicts.items() if verdict == "worse"} == {"vcpo", "vcpo_shrunk", "tis_seq"}
    assert verdicts["vcpo_leverage"] == SAME and "better" not in verdicts.values()


def test_the_method_at_the_top_is_not_ahead_on_new_seeds(page: str) -> None:
    """The contrast was fixed beforehand."""
    reports = reports_of("new-seeds", "mis_seq")
    gaps = [f"{100 * with_reference(reports, task)['mis_seq'].difference.mean:+.1f}" for task in reports]
    cells = [cell for report in reports.values() for cell in report.cells if cell.method == "mis_seq"]
    collapsed = f"{sum(len(c.collapse_steps) for c in cells)} of {sum(len(c.runs) for c in cells)}"
    assert f"it is {gaps[0]}, {gaps[1]} and {gaps[2]} points from `vcpo_ess`, and {collapsed} runs collapse" in page
