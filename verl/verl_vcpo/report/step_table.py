"""The table of steps on the console, a row for each step; a terminal of less than 80 columns gets fewer columns."""

import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vcpo.diagnostics import AlarmLevels
from verl_vcpo.common import console
from verl_vcpo.report.advice import ess_ratio_of_lag

_ROWS_PER_HEADING = 20
HELD_OUT = "held out"
_ALARM = AlarmLevels()


class _Column(NamedTuple):
    heading: str
    width: int
    cell: Callable[[dict[str, Any]], str]
    meaning: str


def _number(name: str, form: str) -> Callable[[dict[str, Any]], str]:
    return lambda line: "-" if line.get(name) is None else format(line[name], form)


def _numbers(names: tuple[str, ...], form: Callable[[float], str]) -> Callable[[dict[str, Any]], str]:
    return lambda line: "/".join("-" if line.get(name) is None else form(line[name]) for name in names)


def _lag(value: float) -> str:
    return f"{value:.1f}" if value < 100 and value % 1 else f"{value:.0f}"


_COLUMNS = (
    _Column("step", 4, _number("step", "d"), "optimizer updates made"),
    _Column("reward", 6, _number("reward", ".3f"), "mean reward of the batch that was trained on"),
    _Column(
        "ess",
        5,
        lambda line: _number("ess", ".3f")({"ess": ess_ratio_of_lag(line)}),
        "effective sample size / batch size, of the part that the lag has made where it is known: 1 where all "
        "sequences count alike; "
        f"{_ALARM.ess_steps} steps below {_ALARM.ess_ratio:g}: a warning",
    ),
    _Column("lr x", 4, _number("lr_multiplier", ".2f"), "factor on the learning rate"),
    _Column("grad", 7, _number("grad_norm", ".3g"), "norm of the gradient, before clipping"),
    _Column(
        "kl",
        7,
        _number("kl", ".2g"),
        "KL(rollout || policy) per token, nats: how far the trainer is from the sampler; "
        f"{_ALARM.kl_steps} steps above {_ALARM.kl:g}: a warning",
    ),
    _Column(
        "lag",
        11,
        _numbers(("lag_min", "lag_mean", "lag_max"), _lag),
        "updates between sampling and training: least/mean/largest",
    ),
    _Column("tok/s", 6, _number("tokens_per_s", ".0f"), "tokens trained on per second"),
    _Column(
        "idle %",
        7,
        _numbers(("trainer_idle_share", "sampler_idle_share"), lambda share: f"{100 * share:.0f}"),
        "share of the step without work: trainer/samplers",
    ),
    _Column(HELD_OUT, 8, _number("val_accuracy", ".1%"), "accuracy on held-out prompts"),
)
MEANINGS = {column.heading: column.meaning for column in _COLUMNS}
"""The meaning of each column in one line, by heading."""
_LEFT_OUT = ("idle %", "tok/s", "lr x", "grad", "lag")
"""The columns that a narrow terminal leaves out, in this order; metrics.jsonl and the report have them."""


def _fitting(width: int | None) -> list[_Column]:
    columns = list(_COLUMNS)
    for heading in _LEFT_OUT:
        if width is None or sum(column.width + 1 for column in columns) <= width + 1:
            break
        columns = [column for column in columns if column.heading != heading]
    return columns


class StepTable:
    """The table of a run, with explanations before the first row, and headings every `_ROWS_PER_HEADING` rows.

    Args:
        answered: how held-out prompts are answered, such as "greedy"; "": not said.
    """

    def __init__(self, answered: str = "") -> None:
        self._rows = 0
        self._answered = answered
        self._columns = _fitting(console.width())

    def lines(self, line: dict[str, Any]) -> list[str]:
        """Return the console's lines for a line of `metrics.jsonl`."""
        before = [] if self._rows else [each for column in self._columns for each in self._explanation(column)]
        if self._rows % _ROWS_PER_HEADING == 0:
            before.append(_row([column.heading for column in self._columns], self._columns))
        self._rows += 1
        return [*before, row(line, self._columns), *_notes(line)]

    def _explanation(self, column: _Column) -> list[str]:
        answered = f"; answers: {self._answered}" if self._answered and column.heading == HELD_OUT else ""
        text = f"{column.heading:>8}  {column.meaning}{answered}"
        return textwrap.wrap(text, width - 1, subsequent_indent=" " * 10) if (width := console.width()) else [text]


def row(line: dict[str, Any], columns: Sequence[_Column] = _COLUMNS) -> str:
    """Return the row of a line of `metrics.jsonl`; step 0, before training, has an accuracy only."""
    before_training = line["reward"] is None
    return _row(
        [
            "" if before_training and column.heading not in ("step", "held out") else column.cell(line)
            for column in columns
        ],
        columns,
    )


def _row(cells: list[str], columns: Sequence[_Column]) -> str:
    return " ".join(f"{cell:>{column.width}}" for cell, column in zip(cells, columns, strict=True)).rstrip()


def _notes(line: dict[str, Any]) -> list[str]:
    notes = []
    if line.get("actor/vcpo/skipped_updates"):
        notes.append(f"step {line['step']}: update SKIPPED: no usable sequence (see vcpo/excluded_sequences)")
    if each := _of_each(line.get("val_accuracies") or {}):
        notes.append(f"step {line['step']}: held out, the mean of {each}")
    return notes


def _of_each(accuracies: dict[str, float | None]) -> str:
    """Return the held-out accuracy of each of several data sources; empty for one source: the mean says the same."""
    shown = (f"{source} {'-' if value is None else format(value, '.1%')}" for source, value in accuracies.items())
    return ", ".join(shown) if len(accuracies) > 1 else ""
