"""The published figures are what the code draws now."""

from dataclasses import replace
from pathlib import Path

from scripts.report import figure
from tests.report.published import ACCURACY, FIGURE, difference, draw_accuracy, published

_SAME = 1e-3


def test_the_figure_is_what_the_code_draws(tmp_path: Path) -> None:
    drawn = figure.draw(published(), tmp_path / "figure.png")
    assert difference(drawn, FIGURE) < _SAME, (
        "python -m tests.report.published RUN..., the runs of scripts/quickstart.sh"
    )
    assert difference(draw_accuracy(tmp_path / "accuracy.png"), ACCURACY) < _SAME


def test_another_figure_differs(tmp_path: Path) -> None:
    run, *others = published()
    lines = [line if line["ess_ratio"] is None else line | {"ess_ratio": 0.9 * line["ess_ratio"]} for line in run.lines]
    drawn = figure.draw([replace(run, lines=lines), *others], tmp_path / "figure.png")
    assert difference(drawn, FIGURE) > _SAME
