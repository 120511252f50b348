"""docs/measurements/stability.md, "All methods on Countdown": what lab.stability.report prints of published runs."""

from pathlib import Path

import pytest

from lab.stability.contrasts import BEST, SAME, Contrast
from lab.stability.published import read_curves
from lab.stability.report import Report, contrasts_of, make_report, of_tasks

DOCS = Path(__file__).parents[3] / "docs"
RUNS, PAGE = DOCS / "measurements" / "runs", DOCS / "measurements" / "stability.md"
LAG = 128


def reports_of(*names: str, lags: list[int] | None = None) -> dict[str, Report]:
    files = [RUNS / f"{name}.parquet" for name in names]
    return {task: make_report(of, 300) for task, of in read_curves(files, lags).items()}


def with_reference(reports: dict[str, Report], task: str) -> dict[str, Contrast]:
    found = contrasts_of(reports)[task]
    return {one.method: one for one in found if one.compared == BEST and one.against == "vcpo_ess"}


@pytest.fixture(scope="module")
def every() -> dict[str, Report]:
    return reports_of("all-methods", "stability", lags=[LAG])


@pytest.fixture(scope="module")
def page() -> str:
    return " ".join(PAGE.read_text().split())


def test_the_table_is_what_the_command_prints(every: dict[str, Report]) -> None:
    table, *_ = of_tasks(every)
    assert table.markdown() in PAGE.read_text(), "python -m lab.stability.report: see the page"
    assert f"{len({cell.method for cell in every['countdown_lag'].cells})} methods at lag {LAG}" in PAGE.read_text()


def test_what_is_said_about_the_order_of_methods(every: dict[str, Report], page: str) -> None:
    found = with_reference(every, "countdown_lag")
    assert not [name for name, one in found.items() if one.verdict == "better"]
    worse = ", ".join(f"`{name}`" for name, one in found.items() if one.verdict == "worse")
    assert f"Shown to be worse: {worse}." in page
    dead = [cell.method for cell in every["countdown_lag"].chosen if len(cell.collapse_steps) > len(cell.runs) / 2]
    assert f"Most runs of {', '.join(f'`{name}`' for name in sorted(dead))} collapse" in page


def test_the_table_at_three_times_the_rate_is_what_the_command_prints() -> None:
    """Also what is concluded from it: the weights of group OPOB do no harm, its baseline does."""
    reports = reports_of("screen")
    (table,) = of_tasks(reports)
    assert table.markdown() in PAGE.read_text()
    verdicts = {name: one.verdict for name, one in with_reference(reports, "countdown_lag").items()}
    assert {name for name, verdict in verdicts.items() if verdict == "worse"} == {"vcpo", "vcpo_shrunk", "tis_seq"}
    assert verdicts["vcpo_leverage"] == SAME and "better" not in verdicts.values()


def test_the_method_at_the_top_is_not_ahead_on_new_seeds(page: str) -> None:
    """The contrast was fixed beforehand."""
    reports = reports_of("new-seeds", "mis_seq")
    gaps = [f"{100 * with_reference(reports, task)['mis_seq'].difference.mean:+.1f}" for task in reports]
    cells = [cell for report in reports.values() for cell in report.cells if cell.method == "mis_seq"]
    collapsed = f"{sum(len(c.collapse_steps) for c in cells)} of {sum(len(c.runs) for c in cells)}"
    assert f"it is {gaps[0]}, {gaps[1]} and {gaps[2]} points from `vcpo_ess`, and {collapsed} runs collapse" in page
