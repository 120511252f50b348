"""all-methods.md, its folder and alarm.md of docs/measurements say what scripts.bench.stability_report prints."""

import re
from pathlib import Path

import pandas as pd
import pytest

from scripts.bench.stability.contrasts import SAME
from scripts.bench.stability.figures import draw_all
from scripts.bench.stability.report import Report, make_report, markdown, read_curves
from tests.report.published import difference
from vcpo.diagnostics import AlarmLevels

DOCS = Path(__file__).parents[2] / "docs"
FOLDER, PAGE = DOCS / "measurements" / "all-methods", DOCS / "measurements" / "all-methods.md"
ALARM = DOCS / "measurements" / "alarm.md"
_REDO = "python -m scripts.bench.stability_report on the folder's files, --out the folder, and its tables on the page"


@pytest.fixture(scope="module")
def curves() -> pd.DataFrame:
    return read_curves(sorted(FOLDER.glob("*.parquet")))["countdown_lag"]


@pytest.fixture(scope="module")
def report(curves: pd.DataFrame) -> Report:
    return make_report(curves, 300)


def test_the_tables_are_what_the_command_prints(report: Report) -> None:
    assert (FOLDER / "tables.md").read_text() == markdown({"countdown_lag": report}), _REDO
    page = PAGE.read_text() + ALARM.read_text()
    lacking = [table.title for table in report.tables[:-1] if table.markdown() not in page]
    assert not lacking, _REDO


def test_the_page_says_how_many_runs_there_are(curves: pd.DataFrame) -> None:
    runs, methods = curves.groupby(["method", "lag", "lr", "seed"]).ngroups, curves["method"].nunique()
    assert f"{methods} methods at five lags, {runs} runs" in " ".join(PAGE.read_text().split())


def test_the_table_of_new_methods_is_what_the_command_prints() -> None:
    """Also what is concluded from it: the weights of group OPOB do no harm, its baseline does."""
    (curves,) = read_curves([DOCS / "measurements" / "screen" / "curves.parquet"]).values()
    report = make_report(curves, 300)
    assert report.tables[0].markdown() in PAGE.read_text()
    verdicts = {row.method: row.verdict for row in report.contrasts}
    assert {name for name, verdict in verdicts.items() if verdict == "worse"} == {"vcpo", "vcpo_shrunk", "tis_seq"}
    assert verdicts["vcpo_leverage"] == SAME and "better" not in verdicts.values()


def test_the_accuracies_of_three_more_methods_are_those_of_the_runs() -> None:
    (curves,) = read_curves([DOCS / "measurements" / "stability" / "countdown.parquet"]).values()
    cells = {(cell.method, cell.lr): cell for cell in make_report(curves, 300).cells if cell.lag == 128}
    page = " ".join(PAGE.read_text().split())
    for method in ("vcpo_ess", "m2po", "sat", "oapl"):
        first, second, third = (f"{100 * cells[method, lr].accuracy:.1f}" for lr in (3e-5, 1e-4, 3e-4))
        assert re.search(rf"`{method}`:? \(?{first}, {second} and {third} %", page), method
    collapses = {method: sum(len(cells[method, lr].collapse_steps) for lr in (3e-5, 1e-4, 3e-4)) for method, _ in cells}
    assert (collapses["m2po"], collapses["sat"], collapses["oapl"]) == (0, 0, 12)


def test_the_figure_is_what_the_command_draws(report: Report, tmp_path: Path) -> None:
    drawn = draw_all({"countdown_lag": report.of_chosen_rates}, tmp_path)
    assert max(difference(file, FOLDER / file.name) for file in drawn) < 1e-3, _REDO


def test_what_is_said_about_the_order_of_methods(report: Report) -> None:
    page, found = " ".join(PAGE.read_text().split()), {row.method: row for row in report.contrasts}
    same = [row for row in report.contrasts if row.verdict == SAME]
    worse = [row for row in report.contrasts if row.verdict == "worse" and not row.collapsed]
    assert f"{len(same)} methods, `tis_seq`, `vcpo_minibatch` and `vcpo` among them" in page
    assert {"tis_seq", "vcpo_minibatch", "vcpo"} <= {row.method for row in same}
    assert not [row for row in report.contrasts if row.verdict == "better"]
    assert f"{', '.join(f'`{row.method}`' for row in worse)} are worse there" in page and "eight" in page
    assert len(worse) == 8 and all(row.corrected < 0.001 for row in worse)
    gaps = [100 * row.difference.mean for row in worse]
    assert f"{max(gaps):.1f} to {min(gaps):.1f} points, p < 0.001 each" in page
    for method in ("none", "a2c"):
        row = found[method]
        assert f"{row.collapsed} of {row.runs}" in page and row.corrected < 0.001
        assert f"{-100 * row.difference.mean:.0f}" in re.search(r"\((\d+ and \d+) points below", page)[1].split(" and ")
    tis, vcpo = found["tis_seq"], found["vcpo"]
    assert f"`tis_seq` {100 * tis.difference.mean:+.1f} points, p = {tis.corrected:.2f}" in page
    assert f"{100 * vcpo.difference.mean:.1f} points, p = {vcpo.corrected:.2f} ({vcpo.difference.p:.3f} if" in page
    never = [row for row in report.contrasts if not row.collapsed]
    assert f"of the {len(never)} that never did" in page


def test_what_is_said_about_robustness(report: Report) -> None:
    page, found = " ".join(PAGE.read_text().split()), {row.method: row for row in report.robustness}
    for method in ("tis_seq", "vcpo_opob"):
        row = found[method]
        assert f"{100 * row.difference.mean:.1f} points, p = {row.corrected:.2f}" in page
    assert f"{found['vcpo_opob'].collapsed} of {found['vcpo_opob'].runs} runs collapse" in page
    assert all(len(row.by_seed) == 3 for row in found.values()) and found["vcpo_minibatch"].verdict == SAME


def test_the_alarms_levels_are_those_that_the_runs_choose(report: Report) -> None:
    """And those of docs/reference/metrics.md: tests/docs/test_metrics_page.py."""
    assert report.levels == AlarmLevels()
