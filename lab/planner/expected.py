"""What a step of a launch would take, from counted operations and a data sheet: a guess, for a dry run.

The trainer's operations for N parameters and T tokens:

    forward and backward      6 N T
    recomputation             2 N T more, in every pass; of the share of layers that are recomputed
    gradient norms            0.4 of a pass more (NORMS_SHARE)
    critic                    its own 6 N T
"""

from dataclasses import dataclass, replace

from omegaconf import DictConfig

from lab.planner.answers import Forecast, forecast
from lab.planner.device import DEVICES, TRAINER_SHARE, guess
from lab.planner.like import of_config
from lab.planner.rates import Layout, Rates
from recipe.fully_async_policy.plan.model_shape import ModelShape
from verl_vcpo.actor.vcpo_settings import VCPOSettings

NORMS_SHARE = 0.4
"""Of a pass. Counted are 0.05 to 0.6, by task (docs/explanation/packed-norms.md); 0.3 for MATH and Countdown."""
_PROMPT_TOKENS = 200
_SHARE_OF_LONGEST = 4  # a mean response has a quarter of the longest one's tokens
_RECOMPUTATION = 1 / 3  # of a forward and a backward
_RESPONSES, _STEPS, _LAG = 20_000, 4, 16
"""That are simulated, in a second or two: a larger lag hardly changes a step's time."""


@dataclass(frozen=True)
class Expectation:
    """The guess, and what it is made of."""

    device: str
    response_tokens: float
    """Of a mean response."""
    rates: Rates
    row: Forecast

    def in_words(self, steps: int) -> str:
        """Some lines for a terminal."""
        row, sampler = self.row, self.rates.sampler
        trained = self.rates.workload.tokens / self.rates.trainer.seconds(self.rates.workload.tokens, row.trainer_gpus)
        sampled = sampler.most_tokens_per_s * row.sampler_gpus / sampler.gpus
        return (
            f"Time, a guess and no measurement: {_duration(row.step_s)} a step, {_duration(row.step_s * steps)} for "
            f"{steps} steps. It takes responses to have {self.response_tokens:.0f} tokens on average (a quarter of the "
            f"longest), tools no time, and the trainer to reach {TRAINER_SHARE:.0%} of the operations of an "
            f"{self.device}. The trainer trains on {trained:,.0f} tokens a second, the samplers give {sampled:,.0f} at "
            f"most; the trainer waits {row.trainer_idle:.0%} of the time, the samplers {row.sampler_idle:.0%}.\n"
            f"What binds: {row.binds}."
        )


def _duration(seconds: float) -> str:
    if seconds < 180:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3 * 3600 else f"{seconds / 3600:.0f} h"


def expected(config: DictConfig, shape: ModelShape) -> Expectation:
    """What a step of this launch takes on GPUs of `gpu_memory_gib`.

    Raises:
        PlanError: a sampler does not hold the model and one response.
    """
    layout, rollout = of_config(config), config.actor_rollout_ref.rollout
    device = device_of(config.gpu_memory_gib)
    response = config.data.max_response_length / _SHARE_OF_LONGEST
    rates = guess(
        shape,
        device,
        batch=layout.batch,
        samples=layout.samples,
        prompt_tokens=min(_PROMPT_TOKENS, config.data.max_prompt_length),
        response_tokens=response,
        longest=config.data.max_response_length,
        trainer_unit=layout.trainer_unit,
        sampler_gpus=layout.gpus_of_sampler,
        slots=layout.slots,
    )
    rates = replace(
        rates,
        trainer=replace(rates.trainer, token_s=rates.trainer.token_s * passes(config, shape)),
        recompute=rollout.custom.kv_cache == "recompute",
    )
    split = Layout(layout.trainer_gpus, layout.sampler_gpus, min(layout.lag, _LAG))
    return Expectation(device, response, rates, forecast(rates, split, layout.steps, _RESPONSES, _STEPS))


def device_of(gib: float) -> str:
    """The device whose memory is closest; of two with the same, the newer."""
    return min(reversed(DEVICES), key=lambda name: abs(DEVICES[name].memory / 2**30 - gib))


def passes(config: DictConfig, shape: ModelShape) -> float:
    """The trainer's operations for a token, in units of a forward and a backward without recomputation."""
    vcpo = VCPOSettings.of(config.vcpo)
    one = 1.0 + _RECOMPUTATION * _recomputed(config.actor_rollout_ref.actor.megatron, shape)
    times = one + (1.0 if config.critic.enable else 0.0)
    if not vcpo.packs_gradient_norms:
        return times
    return times + NORMS_SHARE


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
