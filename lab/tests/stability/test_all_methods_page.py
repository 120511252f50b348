"""docs/measurements/all-methods.md says what lab.stability.report prints of published runs."""

from pathlib import Path

import pytest

from lab.stability.contrasts import SAME
from lab.stability.published import read_curves
from lab.stability.report import Report, make_report, of_all_tasks

DOCS = Path(__file__).parents[3] / "docs"
RUNS, PAGE = DOCS / "measurements" / "runs", DOCS / "measurements" / "all-methods.md"
LAG = 128


@pytest.fixture(scope="module")
def report() -> Report:
    files = [RUNS / "all-methods.parquet", RUNS / "stability.parquet"]
    return make_report(read_curves(files, [LAG])["countdown_lag"], 300)


@pytest.fixture(scope="module")
def page() -> str:
    return " ".join(PAGE.read_text().split())


def test_the_table_is_what_the_command_prints(report: Report) -> None:
    assert report.table.markdown() in PAGE.read_text(), "python -m lab.stability.report: see the page"
    assert f"{len({cell.method for cell in report.cells})} methods at lag {LAG}" in PAGE.read_text()


def test_what_is_said_about_the_order_of_methods(report: Report, page: str) -> None:
    verdicts = {row.method: row.verdict for row in report.comparisons[0].contrasts}
    named = {
        verdict: ", ".join(f"`{method}`" for method, of in verdicts.items() if of == verdict)
        for verdict in ("better", "worse")
    }
    assert not named["better"] and f"Worse than `vcpo_ess` are {named['worse']}." in page
    assert f"{list(verdicts.values()).count(SAME)} methods cannot be told apart from it" in page
    dead = [row.method for row in report.comparisons[0].contrasts if row.collapsed > row.runs / 2]
    assert f"Most runs of {', '.join(f'`{method}`' for method in dead)} collapse" in page


def test_the_table_of_new_methods_is_what_the_command_prints() -> None:
    """Also what is concluded from it: the weights of group OPOB do no harm, its baseline does."""
    (curves,) = read_curves([RUNS / "screen.parquet"]).values()
    report = make_report(curves, 300)
    assert report.table.markdown() in PAGE.read_text()
    verdicts = {row.method: row.verdict for row in report.comparisons[0].contrasts}
    assert {name for name, verdict in verdicts.items() if verdict == "worse"} == {"vcpo", "vcpo_shrunk", "tis_seq"}
    assert verdicts["vcpo_leverage"] == SAME and "better" not in verdicts.values()


def test_the_tables_of_new_seeds_are_what_the_command_prints(page: str) -> None:
    """The method that is first in the table is not ahead where the contrast was fixed beforehand."""
    files = [RUNS / "new-seeds.parquet", RUNS / "mis_seq.parquet"]
    reports = {task: make_report(of, 300) for task, of in read_curves(files).items()}
    _, planned, over_rates, *_ = of_all_tasks(reports)
    assert planned.markdown() in PAGE.read_text() and over_rates.markdown() in PAGE.read_text()
    found = [row for report in reports.values() for row in report.comparisons[0].contrasts if row.method == "mis_seq"]
    assert len(found) == 3 and all(row.verdict != "better" for row in found)
    assert "`mis_seq`, the first in the table, is not ahead" in page and "a quarter of its runs collapse" in page
    tried = [row for report in reports.values() for row in report.comparisons[0].robustness if row.method == "mis_seq"]
    assert sum(row.collapsed for row in tried) * 4 == sum(row.runs for row in tried)
