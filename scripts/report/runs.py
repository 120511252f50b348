"""A run, read from its folder: what it was, how far it got, what it cost."""

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from recipe.evaluate import results
from recipe.evaluate.results import Evaluation
from recipe.fully_async_policy.settings.method import decided_by
from vcpo import VCPOConfig
from verl_vcpo.report.run_log import (
    ACCURACIES,
    ANSWERS,
    COMMAND_FILE,
    CONFIG_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    how_answered,
    read_metrics,
)

TASKS = {"countdown": "Countdown", "gsm8k": "GSM8K", "math": "MATH-500", "tool_use": "AIME 2025"}

_CONTROLS = ("step_size_rule", "baseline", "opob_scope")


class RunError(ValueError):
    """A folder that is no run. The message is one line."""


_NOT_OF_A_RUN = (
    OSError,
    json.JSONDecodeError,
    KeyError,
    yaml.YAMLError,
    OmegaConfBaseException,
    AttributeError,
    TypeError,
)
"""The errors of reading files that are not, or not yet, those of a run."""
_SIMULATOR = "lab.simulator"


@dataclass(frozen=True)
class ReportedRun:
    """One run.

    lag: the bound of the lag.
    method: as `method=NAME` named it, with the settings that were given to VCPO's two controls besides.
    task: what it was evaluated on.
    devices, device: how many GPUs trained and sampled; on CPU, the machine's cores.
    lines: metrics.jsonl, one dictionary per step; step 0 is before training.
    wall_clock_s: over all the processes of a resumed run; with the start-up of one that was not.
    planned: trainer.total_training_steps.
    config: the whole configuration, interpolations not resolved.
    command: what the run was started with; None where the run did not record it.
    evaluations: of the run's models, beside the run (`recipe.evaluate --follow`).
    """

    folder: Path
    method: str
    task: str
    lag: float
    devices: int
    device: str
    lines: list[dict[str, Any]]
    wall_clock_s: float
    planned: int
    finished: bool
    config: DictConfig
    command: str | None
    evaluations: list[Evaluation]

    @property
    def label(self) -> str:
        lag = "synchronous" if self.lag == 0 else f"lag {self.lag:g}"
        return f"{self.method}, {lag}{', simulated' if _SIMULATOR in (self.command or '') else ''}"

    @property
    def steps(self) -> int:
        """Optimizer steps done."""
        return max(line["step"] for line in self.lines)

    @property
    def hours(self) -> float:
        """GPU hours (CPU hours): wall-clock time of all devices that took part, working or not."""
        return self.wall_clock_s / 3600 * self.devices

    @property
    def own_accuracies(self) -> list[tuple[int, float]]:
        """(step, held-out accuracy) of each validation of the run itself."""
        return [(line["step"], line["val_accuracy"]) for line in self.lines if line.get("val_accuracy") is not None]

    @property
    def accuracies(self) -> list[tuple[int, float]]:
        """`own_accuracies`, and between them those of evaluations beside the run with the run's own settings."""
        beside = {result.step: result.accuracy for result in self._as_the_run()}
        return sorted((beside | dict(self.own_accuracies)).items())

    @property
    def beside(self) -> list[tuple[float, float]]:
        """(step, held-out accuracy) of each evaluation; NaN between two whose settings differ, which no line joins."""
        points: list[tuple[float, float]] = []
        for before, result in zip([None, *self.evaluations], self.evaluations, strict=False):
            if before is not None and before.settings != result.settings:
                points.append((math.nan, math.nan))
            points.append((result.step, result.accuracy))
        return points

    @property
    def accuracies_of_each(self) -> dict[str, list[tuple[int, float | None]]]:
        """`accuracies` of each data source, where there are several."""
        sources = _by_source(self.lines, self._as_the_run())
        return sources if len(sources) > 1 else {}

    def _as_the_run(self) -> list[Evaluation]:
        return [result for result in self.evaluations if result.as_the_run]

    @property
    def accuracy(self) -> float | None:
        """The last one."""
        return self.accuracies[-1][1] if self.accuracies else None

    @property
    def base_accuracy(self) -> float | None:
        """Before training."""
        return self.accuracies[0][1] if self.accuracies and self.accuracies[0][0] == 0 else None

    @property
    def answers(self) -> int | None:
        """Over how many answers a held-out accuracy is the mean; None where the run did not record it."""
        own = next((line[ANSWERS] for line in self.lines if line.get(ANSWERS)), None)
        return own or next((result.answers for result in self._as_the_run()), None)

    @property
    def answered(self) -> str | None:
        """How held-out prompts were answered; None where the configuration does not say."""
        sampling = OmegaConf.select(self.config, "actor_rollout_ref.rollout.val_kwargs")
        return sampling and how_answered(sampling)

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """(steps, values) of a metric of the training steps; NaN where it was not measured."""
        steps = [line for line in self.lines if line.get("reward") is not None]
        values = [line.get(name) for line in steps]
        return [line["step"] for line in steps], [math.nan if value is None else value for value in values]

    def cost_of(self, accuracy: float) -> tuple[int, float] | None:
        """(steps, device hours) until the held-out accuracy was first at least this; None: never."""
        clock = {line["step"]: line["wall_clock_s"] for line in self.lines}
        for step, reached in self.accuracies:
            if step > 0 and reached >= accuracy and step in clock:
                return step, clock[step] / 3600 * self.devices
        return None


def labels(runs: list[ReportedRun]) -> list[str]:
    """Of each run, one that no other has."""
    names = [run.label for run in runs]
    return [
        f"{label} ({run.folder})" if names.count(label) > 1 else label for run, label in zip(runs, names, strict=True)
    ]


def read_run(folder: Path) -> ReportedRun:
    """Read a run's folder.

    Raises:
        RunError: it holds no run, or one without a step yet.
    """
    for name in (METRICS_FILE, CONFIG_FILE):
        if not (folder / name).is_file():
            raise RunError(f"{folder}: no {name}; give the folder (run_dir) of a run")
    try:
        lines = read_metrics(folder)
        config = OmegaConf.load(folder / CONFIG_FILE)
        summary = folder / SUMMARY_FILE
        took_s = json.loads(summary.read_text())["wall_clock_s"] if summary.is_file() else 0.0
        if not lines:
            raise RunError(f"{folder}: {METRICS_FILE} has no step yet")
        return _run(folder, config, lines, took_s, finished=summary.is_file())
    except _NOT_OF_A_RUN as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RunError(f"{folder}: not the files of a run ({type(error).__name__}: {reason})") from None


def _by_source(lines: list[dict[str, Any]], beside: list[Evaluation]) -> dict[str, list[tuple[int, float | None]]]:
    """(step, held-out accuracy) of each validation, by data source; nothing of runs that recorded the mean alone."""
    of_step = {result.step: result.accuracies for result in beside}
    of_step |= {line["step"]: line[ACCURACIES] for line in lines if line.get(ACCURACIES)}
    found: dict[str, list[tuple[int, float | None]]] = {}
    for step, accuracies in sorted(of_step.items()):
        for source, accuracy in accuracies.items():
            found.setdefault(source, []).append((step, accuracy))
    return found


def _run(folder: Path, config: DictConfig, lines: list[dict[str, Any]], took_s: float, finished: bool) -> ReportedRun:
    rollout, on_cpu = config.actor_rollout_ref.rollout, config.trainer.device == "cpu"
    gpus = config.trainer.n_gpus_per_node * config.trainer.nnodes + rollout.n_gpus_per_node * rollout.nnodes
    val_files = config.data.val_files
    task = Path(val_files if isinstance(val_files, str) else val_files[0]).parent.name
    evaluations = [result for result in results.read(folder) if result.step <= lines[-1]["step"]]
    sources = _by_source(lines, [result for result in evaluations if result.as_the_run])
    return ReportedRun(
        folder=folder,
        method=method(config),
        task=f"Mean of {', '.join(sources)}" if len(sources) > 1 else TASKS.get(task, task or "held-out"),
        lag=config["async"].lag,
        devices=(os.cpu_count() or 1) if on_cpu else gpus,
        device="CPU" if on_cpu else "GPU",
        lines=lines,
        wall_clock_s=max(took_s, lines[-1]["wall_clock_s"]),
        planned=config.trainer.total_training_steps,
        finished=finished,
        config=config,
        command=(folder / COMMAND_FILE).read_text().strip() if (folder / COMMAND_FILE).is_file() else None,
        evaluations=evaluations,
    )


def method(config: DictConfig) -> str:
    """The method's name, and what the run's settings make of VCPO's two controls where that is not the name's."""
    if not config.vcpo.enable:
        return str(config.method)
    usual = {f"vcpo.{name}": getattr(VCPOConfig, name) for name in _CONTROLS} | decided_by(config.method)
    given = {f"vcpo.{name}": config.vcpo[name] for name in _CONTROLS}
    return " ".join([str(config.method), *(f"{k}={v}" for k, v in given.items() if v != usual[k])])
