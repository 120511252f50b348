"""The content of the page, as JSON."""

import heapq
import math
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipe.fully_async_policy.plan.gpu_plan import SETTINGS
from recipe.fully_async_policy.settings.method import description
from scripts.report.outcome import error_of, outcome
from scripts.report.runs import ReportedRun, labels
from scripts.report.table import NOTE, has_speed_ups, make_table
from vcpo.diagnostics import AlarmLevels
from verl_vcpo.actor.update.metrics import BINS, FIRST, GRADIENT_SHARE, REWARD, SHARE, WEIGHT
from verl_vcpo.common.step_lines import read_lines
from verl_vcpo.report.advice import BaselineWatch
from verl_vcpo.report.learning_signal import EQUAL_GROUPS, IN_A_ROW
from verl_vcpo.report.run_log import SAMPLES_FILE
from verl_vcpo.report.step_table import MEANINGS

_SERIES = (
    *("reward", "ess_ratio", "kl", "grad_norm", "lag_min", "lag_mean", "lag_max"),
    *("tokens_per_s", "trainer_idle_share", "sampler_idle_share"),
)
_NEWEST, _HEAVIEST = 500, 500
"""Samples that the page holds: the newest, and those of the largest weight."""
_OF_SAMPLE = ("step", "reward", "lag", "weight", "log_weight", "prompt", "response")
_OF_VCPO = "vcpo."
_MEANINGS = MEANINGS | {
    "equal groups": "share of the batch's prompts whose samples all got the same reward: they teach nothing"
}
_SIGNS = {
    "low_ess_ratio": "collapse ahead: the ESS ratio stays low",
    "vanished_gradient": "collapse ahead: the gradient norm jumped and then vanished",
    "kl_growth": "collapse ahead: KL(rollout || policy) stays large",
}


def make(runs: list[ReportedRun], waiting: tuple[str, ...] = ()) -> dict[str, Any]:
    """Everything that changes while runs go on; the rest of the page is the same for all runs.

    Args:
        waiting: what is said of folders that have no step yet.
    """
    table, levels = make_table(runs) if runs else [], AlarmLevels()
    return {
        "title": f"Runs: {', '.join(dict.fromkeys(run.task for run in runs))}" if runs else "Runs",
        "outcome": " ".join([outcome(runs), *waiting]).strip(),
        "meanings": _MEANINGS,
        "table": table,
        "note": NOTE if table and has_speed_ups(table) else None,
        "levels": {"ess_ratio": levels.ess_ratio, "kl": levels.kl},
        "runs": [_run(run, label) for run, label in zip(runs, labels(runs), strict=True)],
    }


def _run(run: ReportedRun, label: str) -> dict[str, Any]:
    series = {name: run.series(name)[1] for name in _SERIES} | {"equal_groups": run.series(EQUAL_GROUPS)[1]}
    return {
        "label": label,
        "folder": str(run.folder),
        "method": run.method,
        "description": description(str(run.config.method)),
        "lag": run.lag,
        "finished": run.finished,
        "planned": run.planned,
        "steps": run.series("reward")[0],
        "series": {name: [_rounded(value) for value in values] for name, values in series.items()},
        "validations": [
            [step, _rounded(accuracy), _rounded(error_of(run, accuracy))] for step, accuracy in run.own_accuracies
        ],
        "evaluations": [[_rounded(step), _rounded(accuracy)] for step, accuracy in run.beside],
        "validations_of_each": {
            source: [[step, _rounded(accuracy)] for step, accuracy in points]
            for source, points in run.accuracies_of_each.items()
        },
        "warnings": _warnings(run.lines),
        "command": run.command,
        "settings": _settings(run.config),
        "config": OmegaConf.to_yaml(run.config),
        "samples": read_samples(run.folder),
        "of_lags": of_lags(run.lines),
    }


def of_lags(lines: list[dict[str, Any]]) -> list[list[str]]:
    """A row for each bin of lags that has responses: their share, mean reward, mean weight, share of the gradient.

    The last is a dash where no norm was measured.
    """
    rows, measured = [], [line for line in lines if f"actor/{SHARE.format(FIRST)}" in line]
    for name in BINS:
        share, reward, weight = (
            [line.get(f"actor/{metric.format(name)}") or 0.0 for line in measured] for metric in (SHARE, REWARD, WEIGHT)
        )
        if total := sum(share):
            means = (sum(s * v for s, v in zip(share, values, strict=True)) / total for values in (reward, weight))
            gradient = _share_of_the_gradient(name, measured)
            rows.append([name, *(f"{mean:.3g}" for mean in means), f"{total / len(measured):.0%}", gradient])
    return rows


def _share_of_the_gradient(name: str, lines: list[dict[str, Any]]) -> str:
    """The mean over the steps that measured norms."""
    first, of = (f"actor/{GRADIENT_SHARE.format(bin_name)}" for bin_name in (FIRST, name))
    shares = [line.get(of) or 0.0 for line in lines if first in line]
    return f"{sum(shares) / len(shares):.0%}" if shares else "-"


def read_samples(folder: Path) -> dict[str, Any] | None:
    """The run's samples: `of`, how many it recorded, and `rows`; None where it recorded none.

    A row has what the run recorded, and `group`: the prompt's number, in the order of the file.
    """
    if not (folder / SAMPLES_FILE).is_file():
        return None
    groups: dict[str, int] = {}
    rows: list[dict[str, Any]] = []
    for line in read_lines(folder / SAMPLES_FILE):
        uid = line.get("uid")
        group = None if uid is None else groups.setdefault(uid, len(groups) + 1)
        rows.append({name: line.get(name) for name in _OF_SAMPLE} | {"group": group})
    heaviest = heapq.nlargest(_HEAVIEST, range(len(rows)), key=lambda number: _weight(rows[number]))
    kept = {*heaviest, *range(len(rows))[-_NEWEST:]}
    return {"of": len(rows), "rows": [rows[number] for number in sorted(kept)]}


def _weight(sample: dict[str, Any]) -> tuple[float, float]:
    """The order of samples by weight: truncation makes the largest weights equal, and not their logarithms."""
    log_weight = sample["log_weight"]
    return sample["weight"] or 0.0, -math.inf if log_weight is None else log_weight


def _rounded(value: float | None) -> float | None:
    """Six digits; None for what JSON does not have."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def _warnings(lines: list[dict[str, Any]]) -> list[str]:
    """One line for each kind: at how many steps, and the first of them."""
    steps: dict[str, list[int]] = {}
    baseline = BaselineWatch()
    for line in lines:
        said = [_SIGNS.get(sign, sign) for sign in line.get("collapse_signs") or []]
        if line.get("actor/vcpo/skipped_updates"):
            said.append("update skipped: no usable sequence")
        if line.get(IN_A_ROW):
            said.append("no signal: all rewards of every group are equal")
        if advice := baseline.look_at(line):
            said.append(advice)
        for kind in said:
            steps.setdefault(kind, []).append(line["step"])
    return [
        f"{kind}, at {f'{len(at)} steps, from' if len(at) > 1 else 'step'} {at[0]}"
        for kind, at in sorted(steps.items(), key=lambda each: each[1][0])
    ]


def _settings(config: DictConfig) -> dict[str, str]:
    shown = {}
    for setting in SETTINGS:
        if setting.startswith(_OF_VCPO) and not config.vcpo.enable:
            continue
        try:
            value = OmegaConf.select(config, setting)
        except OmegaConfBaseException:  # an interpolation of the environment that the run had
            continue
        if value is not None:
            shown[setting] = str(value)
    return shown
