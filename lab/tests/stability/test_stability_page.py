"""docs/measurements/stability.md and its folder say what lab.stability.report prints of published runs."""

from pathlib import Path

import pytest
from scipy.stats import fisher_exact

from lab.simulator.grid import fingerprint
from lab.stability.alarm import choose_levels, score_alarm
from lab.stability.contrasts import SAME, Contrast
from lab.stability.figures import draw_all
from lab.stability.preset import TASKS
from lab.stability.published import read_curves, settings
from lab.stability.report import Report, alarm_halves, make_report, numbers, of_all_tasks, of_the_alarm
from tests.report.published import difference
from vcpo.diagnostics import AlarmLevels

DOCS = Path(__file__).parents[3] / "docs"
FOLDER, PAGE = DOCS / "measurements" / "stability", DOCS / "measurements" / "stability.md"
ALARM = DOCS / "measurements" / "alarm.md"
RUNS = DOCS / "measurements" / "runs"
_REDO = "python -m lab.stability.report --out docs/measurements/stability, and its tables on the page"


@pytest.fixture(scope="module")
def reports() -> dict[str, Report]:
    return {task: make_report(of, 300) for task, of in read_curves([RUNS / "stability.parquet"]).items()}


@pytest.fixture(scope="module")
def page() -> str:
    return " ".join(PAGE.read_text().split())


def test_the_tables_are_what_the_command_prints(reports: dict[str, Report]) -> None:
    assert (FOLDER / "tables.csv").read_text() == numbers(reports).to_csv(index=False, lineterminator="\n"), _REDO
    pages = PAGE.read_text() + ALARM.read_text()
    lacking = [
        table.title for table in (*of_all_tasks(reports), *of_the_alarm(reports)) if table.markdown() not in pages
    ]
    assert not lacking, _REDO


def test_the_figure_is_what_the_command_draws(reports: dict[str, Report], tmp_path: Path) -> None:
    drawn = draw_all({task: report.of_chosen_rates for task, report in reports.items()}, tmp_path)
    assert max(difference(file, FOLDER / file.name) for file in drawn) < 1e-3, _REDO


def test_the_runs_began_with_the_published_policies() -> None:
    """So that the same command makes the same cells. All files together are small."""
    files = sorted(RUNS.glob("*.parquet"))
    assert sum(file.stat().st_size for file in files) <= 1_000_000
    first = {task.preset: fingerprint(task.published) for task in TASKS.values()}
    for file in files:
        assert all(settings(of)["first_policy"] == first[task] for task, of in read_curves([file]).items()), file


def test_every_cell_has_every_seed(reports: dict[str, Report]) -> None:
    assert set(reports) == {task.preset for task in TASKS.values()}
    for task, report in reports.items():
        assert {len(cell.runs) for cell in report.cells} == {4}, task


def test_the_verdicts_are_those_that_the_page_tells(reports: dict[str, Report], page: str) -> None:
    found = {task: {row.method: row for row in report.comparisons[0].contrasts} for task, report in reports.items()}
    verdicts = {method: [rows[method].verdict for rows in found.values()] for method in found["countdown_lag"]}
    same = ("tis_seq", "vcpo_ess_tempered", "vcpo_ess_kl")
    assert list(found) == ["countdown_lag", "countdown4_lag", "sort_digits_lag"]
    assert verdicts == {
        "none": ["worse"] * 3,
        "vcpo": ["worse", "worse", "better"],
        "vcpo_minibatch": [SAME, "worse", "better"],
        "vcpo_ess": ["-"] * 3,
        "topr": [SAME, SAME, "better"],
        **{method: [SAME] * 3 for method in same},
    }

    def gaps(method: str) -> list[str]:
        return [f"{100 * rows[method].difference.mean:+.1f}" for rows in found.values()]

    none, vcpo, batch = gaps("none"), gaps("vcpo"), gaps("vcpo_minibatch")
    assert f"{none[0]}, {none[1]} and {none[2]} points" in page
    assert f"{vcpo[0]} and {vcpo[1]} points on `countdown`" in page and f"{vcpo[2]} on `sort_digits`" in page
    p = found["countdown_lag"]["vcpo_minibatch"].corrected
    assert f"{batch[0]} (p = {p:.3f}), {batch[1]} and {batch[2]} points" in page
    topr = [rows["topr"].corrected for rows in found.values()]
    text = "{}, {} and {} points, p = ".format(*gaps("topr"))
    assert text + "{:.3f}, {:.3f} and {:.3f}".format(*topr) in page
    over_rates = [{row.method: row for row in report.comparisons[0].robustness}["topr"] for report in reports.values()]
    text = "over the rates {:+.1f}, {:+.1f} and {:+.1f}".format(*(100 * row.difference.mean for row in over_rates))
    assert text + ", p = {:.3f}, {:.3f} and {:.3f}".format(*(row.corrected for row in over_rates)) in page
    rest = [rows[method] for rows in found.values() for method in same]
    low, high = (100 * best(row.difference.mean for row in rest) for best in (min, max))
    assert f"{low:+.1f} to {high:+.1f} points, p >= {min(row.corrected for row in rest):.3f}" in page


def test_small_lags_are_told_as_they_are(reports: dict[str, Report], page: str) -> None:
    assert [list(group.lags) for report in reports.values() for group in report.comparisons] == [[64, 128], [8, 32]] * 3
    small = [{row.method: row for row in report.comparisons[1].contrasts} for report in reports.values()]
    over_rates = [{row.method: row for row in report.comparisons[1].robustness} for report in reports.values()]
    better = {method: [rows[method].verdict for rows in small] for method in small[0]}
    assert better.pop("none") == ["worse", SAME, "worse"] and better.pop("vcpo_ess") == ["-"] * 3
    assert better == {
        **dict.fromkeys(("vcpo", "vcpo_minibatch", "tis_seq"), [SAME, SAME, "better"]),
        **dict.fromkeys(("topr", "vcpo_ess_tempered"), [SAME] * 3),
    }

    def told(rows: list[dict[str, Contrast]], method: str) -> str:
        p = ["< 0.001" if (p := of[method].corrected) < 0.001 else f"{p:.3f}" for of in rows]
        gaps = [f"{100 * of[method].difference.mean:+.1f}" for of in rows]
        return f"{gaps[0]}, {gaps[1]} and {gaps[2]}, p = {p[0]}, {p[1]} and {p[2]}"

    told_of = " ".join(page.replace(" points, p", ", p").split())
    for method in ("none", "vcpo", "vcpo_minibatch", "topr"):
        assert told(small, method) in told_of, method
    assert told(over_rates, "topr") in told_of and max(of["none"].corrected for of in over_rates) <= 0.0011


def test_the_collapses_are_those_that_the_page_tells(reports: dict[str, Report], page: str) -> None:
    collapsed: dict[str, int] = {}
    runs: dict[str, int] = {}
    for row in (row for report in reports.values() for group in report.comparisons for row in group.robustness):
        collapsed[row.method] = collapsed.get(row.method, 0) + row.collapsed
        runs[row.method] = runs.get(row.method, 0) + row.runs
    assert runs.pop("vcpo_ess_kl") == 72 and set(runs.values()) == {144}
    assert f"{collapsed['none']} of its 144 runs collapse" in page
    ess, tis, vcpo = (collapsed[name] for name in ("vcpo_ess", "tis_seq", "vcpo"))
    assert f"{ess} of 144 runs of `vcpo_ess` collapse, and {tis} of `tis_seq`" in page
    p = {name: fisher_exact([[n, 144 - n], [ess, 144 - ess]]).pvalue for name, n in collapsed.items()}
    assert p["tis_seq"] < 0.001
    assert f"{ess} of 144 against {tis} (p < 0.001) and {vcpo} (p = {p['vcpo']:.3f}) of 144" in page
    assert collapsed["topr"] == 0 and f"0 of 144 against {ess}, p = {p['topr']:.3f}" in page
    small = [row for report in reports.values() for row in report.comparisons[1].robustness]
    assert not sum(row.collapsed for row in small if row.method == "vcpo_minibatch")


def test_what_is_said_of_the_alarm_follows_from_its_table(reports: dict[str, Report]) -> None:
    choosing, telling = alarm_halves(reports)
    scores = [score_alarm(runs) for runs in telling.values()]
    page = " ".join(ALARM.read_text().split())
    recall = "{:.0f} % of the collapses on `countdown`, {:.0f} % on `countdown4` and {:.0f} % on `sort_digits`"
    assert recall.format(*(100 * score.recall for score in scores)) in page
    precision = "right in {:.0f}, {:.0f} and {:.0f} % of the runs warned of"
    assert precision.format(*(100 * score.precision for score in scores)) in page
    assert choose_levels(choosing) == AlarmLevels(), "and those of docs/reference/metrics.md: test_metrics_page.py"


def test_the_tables_of_new_seeds_are_what_the_command_prints(page: str) -> None:
    """And what is concluded from them."""
    reports = {task: make_report(of, 300) for task, of in read_curves([RUNS / "new-seeds.parquet"]).items()}
    _, planned, over_rates, *_ = of_all_tasks(reports)
    assert planned.markdown() in PAGE.read_text() and over_rates.markdown() in PAGE.read_text()
    verdicts = [
        row.verdict for report in reports.values() for row in report.comparisons[0].contrasts if row.method == "topr"
    ]
    assert verdicts == [SAME, "better", "better"] and "on four new seeds it is a point ahead" in page
    seeds = {seed for report in reports.values() for cell in report.cells for seed in cell.runs}
    assert seeds == {5, 6, 7, 8}, "none that the other runs have"
