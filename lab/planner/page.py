"""The plan as a table for the console, and as an HTML page that needs no other file and no network."""

from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from lab.planner.answers import NEARLY, Forecast, Plan
from verl_vcpo.common.whole_file import write_whole

if TYPE_CHECKING:
    import plotly.graph_objects as go

HEADS = (
    "trainer GPUs", "sampler GPUs", "lag", "s per step", "GPU hours", "trainer idle", "samplers idle",
    "mean lag", "95 %", "largest", "deadline wait, s", "what binds", "1 trainer GPU more", "1 sampler GPU more",
)  # fmt: skip

_WORDS = "what binds"
_ON_A_TERMINAL = [head for head in HEADS if head not in ("95 %", "largest", "deadline wait, s")]
"""The page has the others, too."""
_WIDTH, _NARROW = 118, 8
_STYLE = files("lab.planner") / "page_style.css"
_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>$title</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,"><style>
$style
th, td { text-align: right; } td.words { text-align: left; min-width: 18rem; } tr.front { font-weight: 600; }
</style></head><body>
<script>
const dark = matchMedia("(prefers-color-scheme: dark)").matches;
document.documentElement.dataset.theme = dark ? "dark" : "light";
</script>
<h1>$title</h1><p id="advice">$advice</p><p class="note">$source</p>
<h2>GPU hours against lag</h2>$costs<h2>Seconds per step</h2>$steps
<script>
const colour = getComputedStyle(document.documentElement).getPropertyValue("--text");
for (const plot of document.querySelectorAll(".plotly-graph-div")) Plotly.relayout(plot, { "font.color": colour });
</script>
<h2>Every split and lag</h2><p class="note">$legend</p>
<div class="wide"><table><thead><tr>$heads</tr></thead><tbody>$rows</tbody></table></div>
<h2>What is assumed</h2><ul>$assumptions</ul></body></html>
""")
_LEGEND = (
    "Bold: no other row has fewer GPU hours and less lag. Of the rows that cost at most "
    f"{NEARLY - 1:.0%} more than the cheapest, the one with the least lag is advised."
)
_NO_BUTTONS = {"displayModeBar": False}
_GRID = "rgba(128, 136, 144, 0.35)"  # on a white ground and on a dark one
_LAYOUT = {
    "height": 380,
    "margin": {"t": 10, "r": 10, "b": 50},
    "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
    "paper_bgcolor": "rgba(0, 0, 0, 0)",
    "plot_bgcolor": "rgba(0, 0, 0, 0)",
    **{axis: {"gridcolor": _GRID, "zerolinecolor": _GRID} for axis in ("xaxis", "yaxis")},
}


def cells(row: Forecast) -> list[str]:
    """A row of the table, as `HEADS` names it."""

    def gain(value: float | None) -> str:
        return "" if value is None else f"{value:.1%}"

    return [
        str(row.trainer_gpus), str(row.sampler_gpus), f"{row.lag:g}", f"{row.step_s:.3g}", f"{row.gpu_hours:.3g}",
        f"{row.trainer_idle:.0%}", f"{row.sampler_idle:.0%}", f"{row.lag_mean:.2f}", f"{row.lag_p95:g}",
        str(row.lag_max), f"{row.deadline_wait_s:.3g}", row.binds, gain(row.trainer_gain), gain(row.sampler_gain),
    ]  # fmt: skip


def title(plan: Plan) -> str:
    """In one line."""
    return f"{plan.gpus} GPUs, {plan.steps} steps of {plan.responses} responses"


def advice(plan: Plan) -> str:
    """What to take, in one sentence."""
    row = plan.advised

    def gain(share: float | None) -> str:
        return f"{100 * (share or 0.0):.0f} %"

    take = "Take " if len(plan.rows) > 1 else ""
    return (
        f"{take}{row.trainer_gpus} + {row.sampler_gpus} GPUs (trainer + samplers) at lag {row.lag:g}: "
        f"{row.step_s:.3g} s a step, {row.gpu_hours:.3g} GPU hours; one more trainer GPU gains "
        f"{gain(row.trainer_gain)}, one more sampler GPU {gain(row.sampler_gain)} (what binds: {row.binds})."
    )


def basis(plan: Plan) -> str:
    """What the forecasts are made from, in one line."""
    misfits = ", ".join(f"{name} within {share:.1%} on average" for name, share in plan.fits.items())
    return f"Calibration: {plan.source}{f'; fitted {misfits}' if misfits else ''}."


def show(plan: Plan, page: Path | None = None, most: int = 24) -> None:
    """Print the table: all rows, or where they are many the Pareto front. The last line says what to take.

    Args:
        page: where the page of this plan is, if it has one.
        most: rows of the table, if that is not the front alone.
    """
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    rows = plan.rows if len(plan.rows) <= most else [row for row in plan.rows if row.pareto]
    table = Table(title=title(plan), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for head in _ON_A_TERMINAL:
        words = head == _WORDS
        table.add_column(head, justify="left" if words else "right", max_width=None if words else _NARROW)
    for row in rows:
        shown = dict(zip(HEADS, cells(row), strict=True))
        table.add_row(*(shown[head] for head in _ON_A_TERMINAL), style="bold" if row.pareto else None)
    Console(width=_WIDTH).print(table)
    if len(rows) < len(plan.rows):
        print(f"The Pareto front of {len(plan.rows)} forecasts: no other has fewer GPU hours and less lag.")
    print(basis(plan))
    for assumption in plan.assumptions:
        print(f"Assumed: {assumption}.")
    if page:
        print(f"Page: {page}")
    print(advice(plan))


def write(plan: Plan, path: Path) -> None:
    """Write the page: 5 MB, most of which is plotly.js."""

    def row(forecast: Forecast) -> str:
        texts = "".join(
            f"<td{' class=words' if head == _WORDS else ''}>{escape(text)}</td>"
            for head, text in zip(HEADS, cells(forecast), strict=True)
        )
        return f"<tr{' class=front' if forecast.pareto else ''}>{texts}</tr>"

    write_whole(
        path,
        _PAGE.substitute(
            title=escape(title(plan)),
            style=_STYLE.read_text(),
            advice=escape(advice(plan)),
            legend=_LEGEND,
            source=escape(basis(plan)),
            costs=_costs(plan).to_html(full_html=False, include_plotlyjs=True, config=_NO_BUTTONS),
            steps=_steps(plan).to_html(full_html=False, include_plotlyjs=False, config=_NO_BUTTONS),
            heads="".join(f"<th>{escape(head)}</th>" for head in HEADS),
            rows="".join(map(row, plan.rows)),
            assumptions="".join(f"<li>{escape(text)}</li>" for text in plan.assumptions),
        ),
    )


def _costs(plan: Plan) -> "go.Figure":
    import plotly.graph_objects as go

    def points(rows: list[Forecast], name: str, mode: str, size: int) -> go.Scatter:
        return go.Scatter(
            x=[row.lag_mean for row in rows],
            y=[row.gpu_hours for row in rows],
            text=[f"{row.trainer_gpus} + {row.sampler_gpus} GPUs, lag {row.lag:g}: {row.binds}" for row in rows],
            name=name,
            mode=mode,
            marker={"size": size},
        )

    front = sorted((row for row in plan.rows if row.pareto), key=lambda row: row.lag_mean)
    figure = go.Figure([points(plan.rows, "split and lag", "markers", 6), points(front, "front", "lines+markers", 11)])
    return figure.update_layout(_LAYOUT, xaxis_title="mean lag, policy updates", yaxis_title="GPU hours")


def _steps(plan: Plan) -> "go.Figure":
    import plotly.graph_objects as go

    traces = []
    for lag in sorted({row.lag for row in plan.rows}):
        rows = [row for row in plan.rows if row.lag == lag]
        x, y = [row.trainer_gpus for row in rows], [row.step_s for row in rows]
        traces.append(go.Scatter(x=x, y=y, name=f"lag {lag:g}", mode="lines+markers"))
    return go.Figure(traces).update_layout(_LAYOUT, xaxis_title="GPUs of the trainer", yaxis_title="seconds per step")
