"""How long a step of a launch takes, forecast from an earlier run's own rates."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from recipe.fully_async_policy.plan.gpu_memory import Layout, read_layout
from recipe.fully_async_policy.plan.model_shape import read_shape
from recipe.fully_async_policy.settings.errors import SettingError, shown
from verl_vcpo.common.console import duration
from verl_vcpo.report.metrics_file import METRICS_FILE, read_metrics

_WARM_UP, _FEWEST = 2, 4  # steps whose kernels, caches and buffers are made; steps after these
_NEEDED = ("trainer_idle_share", "sampler_idle_share", "weight_sync_s", "perf/total_num_tokens")

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_ALIKE = (
    *("trainer.device", "gpu_memory_gib", "data.max_prompt_length", "data.max_response_length", "method"),
    *(f"{_ACTOR}.megatron.{name}" for name in (*_SIZES, "expert_model_parallel_size", "expert_tensor_parallel_size")),
    f"{_ROLLOUT}.tensor_model_parallel_size",
    *(f"{_ACTOR}.{name}" for name in ("use_dynamic_bsz", "ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu")),
    *(f"{_ACTOR}.megatron.{name}" for name in ("dtype", "optimizer_offload", "param_offload")),
    f"{_ACTOR}.megatron.override_transformer_config",
    "actor_rollout_ref.model.lora.rank",
    f"{_ROLLOUT}.dtype",
    f"{_ROLLOUT}.agent.default_agent_loop",
)
"""Settings on which the rates of a side depend, other than in proportion."""
_FARTHEST = 4
"""How many times the responses for each GPU may grow or shrink: rates change with the size of a batch."""


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

    Raises SettingError where the run has no rates, or those of another model, hardware, layout, length or batch.
    """
    (layout, responses, lag), (steps, earlier) = _sizes(config), _read(run)
    before, drawn, _ = _sizes(earlier)
    if differs := list(_differences(config, earlier)):
        more = f" (and {len(differs) - 3} more)" if len(differs) > 3 else ""
        here = "a forecast needs a short run of this plan: async.lag=2 trainer.total_training_steps=10"
        raise SettingError(f"--forecast {run}: is not comparable: {', '.join(differs[:3])}{more}; {here}")
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
    turns = " They take turns: the lag is 0." if lag == 0 else ""
    planned = config.trainer.total_training_steps
    return (
        f"Time, by {len(steps)} steps of {run}: {time.step_s:.1f} s a step, {duration(time.step_s * planned)} for "
        f"{planned} steps.\n"
        f"What binds: {slower} {more_s:.1f} s for the {time.tokens:,.0f} tokens of a step; {faster} {less_s:.1f} "
        f"s, {1 - less_s / more_s:.0%} less.{turns}\n"
        "Assumed: a side's seconds grow with the responses of a step, and shrink with its GPUs, in proportion; "
        "responses are as long as in that run, of the same model, GPUs and layout."
    )


def _sizes(config: DictConfig) -> tuple[Layout, int, float]:
    """GPUs, responses of a step, and lag."""
    responses = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    return read_layout(config), responses, config["async"].lag


def _differences(config: DictConfig, earlier: DictConfig) -> Iterator[str]:
    """What the rates of an earlier run depend on and this plan has otherwise: `setting=there (here HERE)`."""
    there, here = (str(each.actor_rollout_ref.model.path) for each in (earlier, config))
    if Path(there).name != Path(here).name and (read_shape(there) is None or read_shape(there) != read_shape(here)):
        yield f"actor_rollout_ref.model.path={there} (here {here})"
    for name in _ALIKE:
        one, other = (_plain(OmegaConf.select(each, name)) for each in (earlier, config))
        if one != other:
            yield f"{name}={shown(one)} (here {shown(other)})"
    (before, drawn, _), (layout, responses, _) = _sizes(earlier), _sizes(config)
    for side, gpus, now in (
        ("trainer", before.trainer_gpus, layout.trainer_gpus),
        ("sampler", before.sampler_gpus, layout.sampler_gpus),
    ):
        of_one, of_other = drawn / gpus, responses / now
        if not 1 / _FARTHEST <= of_other / of_one <= _FARTHEST:
            yield f"{of_one:g} responses a step for each {side} GPU (here {of_other:g})"


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _read(run: Path) -> tuple[list[dict[str, Any]], DictConfig]:
    """The run's steps after the warm-up, with the seconds since the step before, and the run's configuration."""
    try:
        steps = [line for line in read_metrics(run) if line.get("step_s") is not None]
        earlier = OmegaConf.load(run / "config.yaml")
        if not isinstance(earlier, DictConfig):
            raise TypeError
        OmegaConf.resolve(earlier)
        _sizes(earlier)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException, AttributeError, TypeError):
        raise SettingError(f"--forecast {run}: give a run's folder (run_dir): {METRICS_FILE}, config.yaml") from None
    if len(steps) < _WARM_UP + _FEWEST:
        raise SettingError(f"--forecast {run}: {len(steps)} steps; a forecast needs {_WARM_UP + _FEWEST} or more")
    for before, step in itertools.pairwise(steps):
        step["period_s"] = step["wall_clock_s"] - before["wall_clock_s"]
    kept = steps[_WARM_UP:]
    if lacking := [name for name in _NEEDED if any(step.get(name) is None for step in kept)]:
        raise SettingError(f"--forecast {run}: its {METRICS_FILE} has no {lacking[0]}; give a run of this version")
    return kept, earlier
