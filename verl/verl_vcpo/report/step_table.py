"""The table of steps on the console, a row for each step."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from vcpo.diagnostics import AlarmLevels
from verl_vcpo.report.advice import ess_ratio_of_lag

_ROWS_PER_HEADING = 20
HELD_OUT = "held out"
_ALARM = AlarmLevels()


class _Column(NamedTuple):
    heading: str
    width: int
    names: tuple[str, ...]
    """The names in a line of `metrics.jsonl`; a cell has their values with slashes between."""
    shown: Callable[[Any], str]
    meaning: str


def _lag(value: float) -> str:
    return f"{value:.1f}" if value < 100 and value % 1 else f"{value:.0f}"


_COLUMNS = (
    _Column("step", 4, ("step",), "{:d}".format, "optimizer updates made"),
    _Column("reward", 6, ("reward",), "{:.3f}".format, "mean reward of the batch that was trained on"),
    _Column(
        "ess",
        5,
        ("ess",),
        "{:.3f}".format,
        "effective sample size / batch size, of the part that the lag has made where it is known: 1 where all "
        "sequences count alike; "
        f"{_ALARM.ess_steps} steps below {_ALARM.ess_ratio:g}: a warning",
    ),
    _Column("lr x", 4, ("lr_multiplier",), "{:.2f}".format, "factor on the learning rate"),
    _Column("grad", 7, ("grad_norm",), "{:.3g}".format, "norm of the gradient, before clipping"),
    _Column(
        "kl",
        7,
        ("kl",),
        "{:.2g}".format,
        "KL(rollout || policy) per token, nats: how far the trainer is from the sampler; "
        f"{_ALARM.kl_steps} steps above {_ALARM.kl:g}: a warning",
    ),
    _Column(
        "lag", 11, ("lag_min", "lag_mean", "lag_max"), _lag, "updates between sampling and training: least/mean/largest"
    ),
    _Column("tok/s", 6, ("tokens_per_s",), "{:.0f}".format, "tokens trained on per second"),
    _Column(
        "idle %",
        7,
        ("trainer_idle_share", "sampler_idle_share"),
        lambda share: f"{100 * share:.0f}",
        "share of the step without work: trainer/samplers",
    ),
    _Column(HELD_OUT, 8, ("val_accuracy",), "{:.1%}".format, "accuracy on held-out prompts"),
)
MEANINGS = {column.heading: column.meaning for column in _COLUMNS}
"""The meaning of each column in one line, by heading."""


class StepTable:
    """The table of a run, with explanations before the first row, and headings every `_ROWS_PER_HEADING` rows.

    Args:
        answered: how held-out prompts are answered, such as "greedy"; "": not said.
    """

    def __init__(self, answered: str = "") -> None:
        self._rows = 0
        self._answered = f"; answers: {answered}" if answered else ""

    def lines(self, line: dict[str, Any]) -> list[str]:
        """Return the console's lines for a line of `metrics.jsonl`."""
        before = []
        if not self._rows:
            meanings = MEANINGS | {HELD_OUT: MEANINGS[HELD_OUT] + self._answered}
            before = [f"{heading:>8}  {meaning}" for heading, meaning in meanings.items()]
        if self._rows % _ROWS_PER_HEADING == 0:
            before.append(_row([column.heading for column in _COLUMNS]))
        self._rows += 1
        return [*before, row(line), *_notes(line)]


def row(line: dict[str, Any]) -> str:
    """Return the row of a line of `metrics.jsonl`; step 0, before training, has an accuracy only."""
    before_training = line["reward"] is None
    line = line | {"ess": ess_ratio_of_lag(line)}
    return _row(
        "" if before_training and column.heading not in ("step", HELD_OUT) else _cell(line, column)
        for column in _COLUMNS
    )


def _cell(line: dict[str, Any], column: _Column) -> str:
    return "/".join("-" if line.get(name) is None else column.shown(line[name]) for name in column.names)


def _row(cells: Iterable[str]) -> str:
    return " ".join(f"{cell:>{column.width}}" for cell, column in zip(cells, _COLUMNS, strict=True)).rstrip()


def _notes(line: dict[str, Any]) -> list[str]:
    notes, accuracies = [], line.get("val_accuracies") or {}
    if line.get("actor/vcpo/skipped_updates"):
        counts = (f"{n} {line.get(f'actor/vcpo/{n}_sequences') or 0:g}" for n in ("excluded", "dropped"))
        notes.append(f"step {line['step']}: update SKIPPED: no sequence to train on ({', '.join(counts)})")
    if len(accuracies) > 1:  # the mean of one source says the same
        shown = (f"{source} {'-' if value is None else format(value, '.1%')}" for source, value in accuracies.items())
        notes.append(f"step {line['step']}: held out, the mean of {', '.join(shown)}")
    return notes
