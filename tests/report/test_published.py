"""The figure on the README is what the code draws now."""

from dataclasses import replace
from pathlib import Path

from scripts.report import figure
from scripts.report.runs import read_run
from tests.report.published import FIGURE, FOLDER, difference

_SAME = 1e-3


def test_the_figure_is_what_the_code_draws(tmp_path: Path) -> None:
    drawn = figure.draw([read_run(FOLDER)], tmp_path / "figure.png")
    assert difference(drawn, FIGURE) < _SAME, "python -m tests.report.published RUN, of a run of scripts/quickstart.sh"


def test_another_figure_differs(tmp_path: Path) -> None:
    run = read_run(FOLDER)
    lines = [line if line["ess_ratio"] is None else line | {"ess_ratio": 0.9 * line["ess_ratio"]} for line in run.lines]
    drawn = figure.draw([replace(run, lines=lines)], tmp_path / "figure.png")
    assert difference(drawn, FIGURE) > _SAME
