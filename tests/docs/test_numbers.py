"""A number on a page is compared with what it comes from, or names the command (or commit) and the date."""

import csv
import json
import re
from pathlib import Path

import pytest

from tests.report.published import published_seeds

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
INDEX, STABILITY, THE_PAPER = (DOCS / "measurements" / f"{name}.md" for name in ("README", "stability", "paper"))
SUBJECTS = sorted({*(DOCS / "measurements").glob("*.md")} - {INDEX, STABILITY, THE_PAPER})
# Pages whose tables are compared with what they come from: the test that does it.
COMPARED = {
    "docs/measurements/stability.md": "lab/tests/stability/test_stability_page.py",
    "docs/guide/read-a-run.md": "tests/docs/test_numbers.py",
}
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
NUMBER = re.compile(
    r"\W*\d[\d.,]*(e[-+]?\d+)?( ?(%|s|h|x|GiB|MB|points|minutes|of \d+|in \d[\d.]*|(±|\(|to |\+).*))?\W*"
)
COMMAND = re.compile(r"`[^`]*(python -m |bash scripts/|DRY_RUN=1)[^`]*`|^(python -m|bash) |commit `", re.MULTILINE)
DATE = re.compile(r"\b2\d{3}-\d{2}-\d{2}\b")


def rows(table: str) -> list[list[str]]:
    """The cells of a table's rows, less its heading."""
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table.splitlines()[2:]]


def tables(text: str) -> list[str]:
    return re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE)


def is_of_numbers(table: str) -> bool:
    """At least two of its rows have two numbers or more beside their first cell."""
    return sum(sum(bool(NUMBER.fullmatch(cell)) for cell in row[1:]) > 1 for row in rows(table)) > 1


def sections(page: Path) -> list[str]:
    """Each begins with its heading. A comment in code begins none."""
    code = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    text = code.sub(lambda block: block[0].replace("\n#", "\n "), page.read_text())
    return re.split(r"^(?=#+ )", text, flags=re.MULTILINE)


def section_of(page: Path, heading: str) -> str:
    """The section below a heading, without those below headings of its own."""
    (found,) = (section for section in sections(page) if section.partition("\n")[0].lstrip("# ") == heading)
    return found


def shown(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_a_table_of_numbers_names_command_and_date(page: Path) -> None:
    if shown(page) in COMPARED or page == THE_PAPER:  # not our numbers
        return
    lacking = []
    for section in sections(page):
        for table in filter(is_of_numbers, tables(section)):
            wanted = {"a command": COMMAND, "a date": DATE}
            lacking += [f"{what}: {table.splitlines()[0]}" for what, form in wanted.items() if not form.search(section)]
    assert not lacking, "\n".join(lacking)


def test_the_index_is_short_and_links_every_page_and_file_is_linked() -> None:
    """The page of stability has a limit of its own."""
    folder = INDEX.parent
    text = {page: page.read_text() for page in (INDEX, THE_PAPER, *SUBJECTS)}
    assert len(text[INDEX].split()) <= 900 and sum(len(of.split()) for of in text.values()) <= 6000
    assert not [page.name for page in folder.glob("*.md") if page != INDEX and f"({page.name}" not in text[INDEX]]
    files = (file.relative_to(folder) for kind in ("*.csv", "*.png", "gpu/*") for file in folder.glob(kind))
    assert not [str(file) for file in files if not any(f"({file})" in of for of in text.values())]


def test_tables_of_numbers_are_found() -> None:
    assert all((ROOT / test).is_file() for test in COMPARED.values())
    found = {shown(page) for page in PAGES for table in tables(page.read_text()) if is_of_numbers(table)}
    assert {"README.md", *COMPARED, *map(shown, SUBJECTS)} <= found
    assert sum(is_of_numbers(table) for page in SUBJECTS for table in tables(page.read_text())) > 10


def test_the_readme_s_ranges_are_of_the_published_runs() -> None:
    """And the figure's runs are the first of them."""
    (table,) = (table for table in tables((ROOT / "README.md").read_text()) if "after 80 steps" in table)
    seeds, wanted = published_seeds(), []
    assert {(row["steps"], row["lag"]) for row in seeds} == {("80", "16")}
    for method in ("none", "vcpo_capped"):
        runs = [row for row in seeds if row["method"] == method]
        assert len(runs) >= 5
        before, after, seconds = (
            [float(run[name]) for run in runs] for name in ("base_accuracy", "final_accuracy", "wall_clock_s")
        )
        accuracies = [f"{100 * min(of):.1f} to {100 * max(of):.1f} %" for of in (before, after)]
        above = sum(end > start for start, end in zip(before, after, strict=True))
        minutes = f"{min(seconds) / 60:.1f} to {max(seconds) / 60:.1f} minutes"
        wanted.append([f"`{method}`", *accuracies, f"{above} of {len(runs)}", minutes])
        drawn = json.loads((DOCS / "quickstart" / method / "summary.json").read_text())
        assert [str(drawn[name]) for name in ("base_accuracy", "final_accuracy")] == [
            runs[0][name] for name in ("base_accuracy", "final_accuracy")
        ]
    assert rows(table) == wanted


def test_the_paper_s_speed_ups_follow_from_its_table() -> None:
    """Also the range on the README."""
    page = THE_PAPER.read_text()
    cost, wanted = {}, []
    for _, method, _, steps, hours, *_ in rows(tables(page)[0]):
        if method.startswith("synchronous"):
            cost = {"steps": float(steps), "hours": float(hours)}
        elif method.startswith("VCPO"):
            wanted.append((cost["hours"] / float(hours), cost["steps"] / float(steps)))
    (a, fewer_a), (b, fewer_b), (c, fewer_c) = wanted
    words = f"{a:.2f}, {b:.2f} and {c:.2f} times fewer GPU hours"
    assert f"{words}, with {fewer_a:.2f}, {fewer_b:.2f} and {fewer_c:.2f} times fewer steps" in " ".join(page.split())
    saved = sorted(hours for hours, _ in wanted)
    assert f"{saved[0]:.2f} to {saved[-1]:.2f} times fewer GPU hours" in " ".join(
        (ROOT / "README.md").read_text().split()
    )


def spreadsheet(name: str) -> list[list[str]]:
    """The rows of a file beside the page of stability, less its heading."""
    return list(csv.reader((STABILITY.with_suffix("") / name).read_text().splitlines()))[1:]


def test_the_first_policies_solve_what_the_page_says() -> None:
    """Greedily, as when they were made, but for rounding; and no run ends above them."""
    found, page = spreadsheet("first_policies.csv"), " ".join(STABILITY.read_text().split())
    assert [row[0] for row in found] == ["countdown", "countdown4", "sort_digits"]
    for task, greedy, *_, above in found:
        policy = json.loads((DOCS / f"measurements/stability/first_policy/{task}_lag/warm_start.json").read_text())
        assert abs(float(greedy.removesuffix(" %")) - 100 * policy["accuracy"]) < 0.5
        assert above.startswith("0 of ")
    assert f"None of {sum(int(row[-1].removeprefix('0 of ')) for row in found):,} runs ends above" in page
    assert f"wrong answers is {found[-1][-3]} times that of right ones" in page


def test_what_is_said_of_levels_of_the_ess_ratio_follows_from_its_table() -> None:
    page = " ".join(section_of(STABILITY, "The alarm").split())
    rules, (_, _, *areas) = spreadsheet("alarm_rules.csv"), spreadsheet("alarm_ranking.csv")[0]
    assert areas == ["0.90", "0.90"] and "(AUC) is 0.90 for" in page
    cells = {level: [[int(n) for n in re.findall(r"\d+", cell)] for cell in of] for level, *of in rules}
    *_, (in_a_row, *row), (of_mean, *mean) = cells["0.3"]
    said = f"the mean of 10 steps below 0.3 is in time for {of_mean} of 152 collapses, 10 steps in a row for {in_a_row}"
    assert said in page
    assert f"precision: {100 * mean[0] / mean[1]:.0f} % instead of {100 * row[0] / row[1]:.0f} %" in page
    assert f"is too low here: for 5 steps in a row it is in time for {cells['0.1'][0][0]} " in page


def test_the_lines_that_a_page_shows_are_of_the_published_runs() -> None:
    text = (DOCS / "guide/read-a-run.md").read_text().split("## In the quickstart's runs")[1].split("## ")[0]
    (table,) = tables(text)

    def line_of(step: int) -> list[str]:
        cells = [str(step)]
        for method in ("none", "vcpo_capped"):
            lines = map(json.loads, (DOCS / "quickstart" / method / "metrics.jsonl").read_text().splitlines())
            (line,) = (line for line in lines if line["step"] == step)
            cells += [f"{line['ess_ratio']:.2f}", f"{line['kl']:.2f}", f"{100 * line['val_accuracy']:.1f} %"]
        return cells

    assert len(rows(table)) > 3 and rows(table) == [line_of(int(row[0])) for row in rows(table)]
