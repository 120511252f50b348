"""How long a step of a launch takes: guessed from a data sheet, or forecast from an earlier run's own rates.

The trainer's operations are 6 N T in each of its `passes`, for N parameters and T tokens. An iteration of a sampler
gives each of n requests a token in `iteration_s + n * request_s`. Its iterations are as many as its slots leave for the
tokens of a step, or as the longest response needs, which has lag + 1 steps for them.
"""

import itertools
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from recipe.fully_async_policy.plan.gpu_memory import Layout, read_layout
from recipe.fully_async_policy.plan.model_shape import ModelShape
from recipe.fully_async_policy.settings.errors import SettingError
from verl_vcpo.actor.vcpo_settings import VCPOSettings
from verl_vcpo.common.console import duration
from verl_vcpo.report.metrics_file import METRICS_FILE, read_metrics

TRAINER_SHARE, MEMORY_SHARE = 0.35, 0.7
"""Guesses of what is reached of the data sheet's operations and memory bandwidth."""
NORMS_SHARE = 0.4
"""Of a pass. Counted are 0.05 to 0.6, by task (docs/explanation/packed-norms.md); 0.3 for MATH and Countdown."""
_RECOMPUTATION = 1 / 3  # of a forward and a backward
_WITHOUT_WEIGHTS = 2 / 3  # of a forward and a backward: a first backward that forms no gradients of weights
_ITERATION_S = 0.003  # of a sampler's host, for each iteration
_NETWORK = 25e9  # bytes per second between trainer and samplers
_PROMPT_TOKENS, _SHARE_OF_LONGEST = 200, 4  # a mean response has a quarter of the longest one's tokens
_WARM_UP, _FEWEST = 2, 4  # steps whose kernels, caches and buffers are made; steps after these
_NEEDED = ("trainer_idle_share", "sampler_idle_share", "weight_sync_s", "perf/total_num_tokens")
DEVICES = {
    "a100": (312e12, 2.0e12, 80e9),
    "h100": (989e12, 3.35e12, 80e9),
    "h200": (989e12, 4.8e12, 141e9),
    "b200": (2250e12, 8.0e12, 192e9),
}
"""From the data sheets: dense bfloat16 operations and bytes of memory bandwidth per second, bytes of memory."""


class StepTime(NamedTuple):
    """The seconds that each side needs for the tokens of a step, and what is taken for granted."""

    source: str
    trainer_s: float
    samplers_s: float
    sync_s: float
    tokens: float
    lag: float
    assumed: str

    @property
    def step_s(self) -> float:
        """From lag 1 on the slower side's seconds, at lag 0 both sides', and those of the weight update."""
        return max(self.samplers_s, self.trainer_s + max(0.0, 1 - self.lag) * self.samplers_s) + self.sync_s

    def in_words(self, steps: int) -> str:
        """Three lines for a terminal."""
        sides = [(self.trainer_s, "the trainer needs"), (self.samplers_s, "the samplers need")]
        (less_s, faster), (more_s, slower) = sorted(sides)
        turns = " They take turns: the lag is 0, or exact." if self.lag == 0 else ""
        return (
            f"{self.source}: {self.step_s:.1f} s a step, {duration(self.step_s * steps)} for {steps} steps.\n"
            f"What binds: {slower} {more_s:.1f} s for the {self.tokens:,.0f} tokens of a step; {faster} {less_s:.1f} "
            f"s, {1 - less_s / more_s:.0%} less.{turns}\nAssumed: {self.assumed}."
        )


def guess(config: DictConfig, shape: ModelShape) -> StepTime:
    """The time of a step on GPUs of `gpu_memory_gib`."""
    (layout, responses, lag), longest = _sizes(config), config.data.max_response_length
    prompt, response = min(_PROMPT_TOKENS, config.data.max_prompt_length), longest / _SHARE_OF_LONGEST
    device, tokens = device_of(config.gpu_memory_gib), responses * (prompt + response)
    operations_per_s, bandwidth, _ = DEVICES[device]
    operations = passes(config, shape) * 6 * shape.used_parameters * tokens
    bytes_per_s = bandwidth * MEMORY_SHARE * layout.sampler_tp
    iteration_s = _ITERATION_S + 2 * shape.parameters / bytes_per_s
    request_s = 4 * shape.layers * shape.keys * (prompt + response / 2) / bytes_per_s
    sampled = responses * response / layout.samplers
    iterations = max(sampled / config.actor_rollout_ref.rollout.max_num_seqs, longest / (lag + 1))
    return StepTime(
        "Time, a guess and no measurement",
        operations / (TRAINER_SHARE * operations_per_s * layout.trainer_gpus),
        iterations * iteration_s + sampled * request_s,
        2 * shape.parameters / _NETWORK,
        tokens,
        lag,
        f"responses have {response:.0f} tokens on average, a quarter of the longest; tools take no time; the trainer "
        f"reaches {TRAINER_SHARE:.0%} of the {device}'s operations, decoding {MEMORY_SHARE:.0%} of its bandwidth",
    )


def forecast(config: DictConfig, run: Path) -> StepTime:
    """The time of a step by the rates of an earlier run's median steps. Raises SettingError where it has none."""
    (layout, responses, lag), (steps, (before, drawn, _)) = _sizes(config), _read(run)
    trainer_s = median(s["period_s"] - s["trainer_idle_share"] * s["step_s"] - s["weight_sync_s"] for s in steps)
    samplers_s = median(s["period_s"] * (1 - s["sampler_idle_share"]) for s in steps)
    work = responses / drawn
    return StepTime(
        f"Time, by {len(steps)} steps of {run}",
        work * trainer_s * before.trainer_gpus / layout.trainer_gpus,
        work * samplers_s * before.sampler_gpus / layout.sampler_gpus,
        median(s["weight_sync_s"] for s in steps),
        work * median(s["perf/total_num_tokens"] for s in steps),
        lag,
        "a side's seconds grow with the responses of a step, and shrink with its GPUs, in proportion; model, GPUs, "
        "lengths and tools are those of that run",
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


def device_of(gib: float) -> str:
    """The device whose memory is closest; of two with the same, the newer."""
    return min(reversed(DEVICES), key=lambda name: abs(DEVICES[name][2] / 2**30 - gib))


def passes(config: DictConfig, shape: ModelShape) -> float:
    """The trainer's operations for a token, in units of a forward and a backward without recomputation."""
    vcpo = VCPOSettings.of(config.vcpo)
    norms = NORMS_SHARE if vcpo.packs_gradient_norms else 0.0
    if norms and (shape.experts or not vcpo.fits_two_sums):
        norms += _WITHOUT_WEIGHTS
    recomputation = _RECOMPUTATION * _recomputed(config.actor_rollout_ref.actor.megatron, shape)
    return 1.0 + recomputation + bool(config.critic.enable) + norms


def _recomputed(megatron: DictConfig, shape: ModelShape) -> float:
    """The share of the layers whose forward a backward does again."""
    settings = megatron.override_transformer_config
    if settings.get("recompute_granularity") != "full":
        return 0.0
    if settings.get("recompute_method") != "block":
        return 1.0
    of_stage = shape.layers / megatron.pipeline_model_parallel_size
    number = (settings.get("recompute_num_layers") or 1) * (megatron.virtual_pipeline_model_parallel_size or 1)
    return min(1.0, number / of_stage)
