"""How long a step of a launch takes, forecast from an earlier run's own rates."""

import itertools
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from recipe.fully_async_policy.plan.gpu_memory import Layout, read_layout
from recipe.fully_async_policy.settings.errors import SettingError
from verl_vcpo.common.console import duration
from verl_vcpo.report.metrics_file import METRICS_FILE, read_metrics

_WARM_UP, _FEWEST = 2, 4  # steps whose kernels, caches and buffers are made; steps after these
_NEEDED = ("trainer_idle_share", "sampler_idle_share", "weight_sync_s", "perf/total_num_tokens")


class StepTime(NamedTuple):
    """The seconds that each side needs for the tokens of a step."""

    trainer_s: float
    samplers_s: float
    sync_s: float
    tokens: float
    lag: float

    @property
    def step_s(self) -> float:
        """From lag 1 on the slower side's seconds, at lag 0 both sides', and those of the weight update."""
        return max(self.samplers_s, self.trainer_s + max(0.0, 1 - self.lag) * self.samplers_s) + self.sync_s


def forecast(config: DictConfig, run: Path) -> str:
    """The time of a step by the rates of an earlier run's median steps, in three lines.

    Raises SettingError where the run has no rates.
    """
    (layout, responses, lag), (steps, (before, drawn, _)) = _sizes(config), _read(run)
    trainer_s = median(s["period_s"] - s["trainer_idle_share"] * s["step_s"] - s["weight_sync_s"] for s in steps)
    samplers_s = median(s["period_s"] * (1 - s["sampler_idle_share"]) for s in steps)
    work = responses / drawn
    time = StepTime(
        work * trainer_s * before.trainer_gpus / layout.trainer_gpus,
        work * samplers_s * before.sampler_gpus / layout.sampler_gpus,
        median(s["weight_sync_s"] for s in steps),
        work * median(s["perf/total_num_tokens"] for s in steps),
        lag,
    )
    sides = [(time.trainer_s, "the trainer needs"), (time.samplers_s, "the samplers need")]
    (less_s, faster), (more_s, slower) = sorted(sides)
    turns = " They take turns: the lag is 0, or exact." if lag == 0 else ""
    planned = config.trainer.total_training_steps
    return (
        f"Time, by {len(steps)} steps of {run}: {time.step_s:.1f} s a step, {duration(time.step_s * planned)} for "
        f"{planned} steps.\n"
        f"What binds: {slower} {more_s:.1f} s for the {time.tokens:,.0f} tokens of a step; {faster} {less_s:.1f} "
        f"s, {1 - less_s / more_s:.0%} less.{turns}\n"
        "Assumed: a side's seconds grow with the responses of a step, and shrink with its GPUs, in proportion; model, "
        "GPUs, lengths and tools are those of that run."
    )


def _sizes(config: DictConfig) -> tuple[Layout, int, float]:
    """GPUs, responses of a step, and lag: 0 where it is exact, for then trainer and samplers take turns."""
    settings, responses = config["async"], config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    return read_layout(config), responses, 0.0 if settings.exact_lag else settings.lag


def _read(run: Path) -> tuple[list[dict[str, Any]], tuple[Layout, int, float]]:
    """The run's steps after the warm-up, with the seconds since the step before, and the run's sizes."""
    try:
        steps = [line for line in read_metrics(run) if line.get("step_s") is not None]
        sizes = _sizes(OmegaConf.load(run / "config.yaml"))
    except (OSError, YAMLError, OmegaConfBaseException, AttributeError, TypeError):
        raise SettingError(f"--forecast {run}: give a run's folder (run_dir): {METRICS_FILE}, config.yaml") from None
    if len(steps) < _WARM_UP + _FEWEST:
        raise SettingError(f"--forecast {run}: {len(steps)} steps; a forecast needs {_WARM_UP + _FEWEST} or more")
    for before, step in itertools.pairwise(steps):
        step["period_s"] = step["wall_clock_s"] - before["wall_clock_s"]
    kept = steps[_WARM_UP:]
    if lacking := [name for name in _NEEDED if any(step.get(name) is None for step in kept)]:
        raise SettingError(f"--forecast {run}: its {METRICS_FILE} has no {lacking[0]}; give a run of this version")
    return kept, sizes
