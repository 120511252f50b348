"""Rates without a run: from a model's shape and a device's data sheet. A guess, and called one."""

from dataclasses import dataclass

import numpy as np

from lab.planner.rates import PlanError, Rates, SamplerRate, TrainerRate, Workload
from recipe.fully_async_policy.plan.model_shape import ModelShape

TRAINER_SHARE, PREFILL_SHARE, MEMORY_SHARE = 0.35, 0.5, 0.7
"""Guesses of what is reached of the data sheet's operations and memory bandwidth."""
_ITERATION_S = 0.003  # of a sampler's host, for each iteration
_NETWORK = 25e9  # bytes per second between trainer and samplers
_KV_SHARE = 0.8  # of a sampler's memory, for weights and KV cache
_TRAINED_BYTES = 6
"""Of a parameter that is trained, at least: bfloat16 weights and float32 gradients. Experts may be split further."""
_DRAWS, _SPREAD = 4096, 0.8  # standard deviation of a response's log length
_START_S = 300.0


@dataclass(frozen=True)
class Device:
    """From the data sheet: dense bfloat16 operations and bytes of memory bandwidth per second, bytes of memory."""

    operations: float
    bandwidth: float
    memory: float


DEVICES = {
    "a100": Device(312e12, 2.0e12, 80e9),
    "h100": Device(989e12, 3.35e12, 80e9),
    "h200": Device(989e12, 4.8e12, 141e9),
    "b200": Device(2250e12, 8.0e12, 192e9),
}


def guess(
    shape: ModelShape,
    device: str,
    *,
    batch: int,
    samples: int,
    prompt_tokens: float,
    response_tokens: float,
    longest: float,
    trainer_unit: int = 1,
    sampler_gpus: int = 1,
    slots: int = 256,
) -> Rates:
    """Rates of a model on a device.

    Args:
        shape: the model's.
        device: a name in `DEVICES`.
        batch: prompts of a step.
        samples: responses for each prompt.
        prompt_tokens: mean length of a prompt.
        response_tokens: mean length of a response; lengths are taken to be log-normal.
        longest: no response is longer.
        trainer_unit: GPUs of one replica of the trainer's model.
        sampler_gpus: GPUs of one sampler.
        slots: requests that a sampler runs at a time, if its memory holds as many of the longest.

    Raises:
        PlanError: there is no data sheet of that name, or the model does not fit.
    """
    if device not in DEVICES:
        raise PlanError(f"--device {device}: no data sheet; choose one of {', '.join(DEVICES)}")
    sheet, used = DEVICES[device], _used_parameters(shape)
    lengths = np.exp(np.random.default_rng(0).normal(0, _SPREAD, _DRAWS) - _SPREAD**2 / 2) * response_tokens
    context = prompt_tokens + response_tokens / 2
    kv_bytes = 2 * 2 * shape.layers * shape.keys  # of a token
    free = sheet.memory * _KV_SHARE * sampler_gpus - 2 * shape.parameters
    slots = min(slots, int(free / (kv_bytes * (prompt_tokens + longest))))
    if slots < 1:
        raise PlanError(
            f"--device {device}: nothing fits: a sampler of {sampler_gpus} cannot hold the model and one response; "
            "give a larger device, or --like with a script whose samplers have more GPUs"
        )
    held = _TRAINED_BYTES * shape.parameters / trainer_unit
    if shape.experts is None and held > sheet.memory:
        raise PlanError(
            f"--device {device}: nothing fits: weights and gradients take {held / 1e9:.0f} GB of each of the trainer's "
            f"GPUs, which have {sheet.memory / 1e9:.0f}; give --like with a script whose trainer splits the model more"
        )
    bytes_per_s = sheet.bandwidth * MEMORY_SHARE * sampler_gpus
    sampler = SamplerRate(
        iteration_s=_ITERATION_S + 2 * shape.parameters / bytes_per_s,
        request_s=kv_bytes * context / bytes_per_s,
        prefill_s=2 * used / (sheet.operations * PREFILL_SHARE * sampler_gpus),
        slots=slots,
        gpus=sampler_gpus,
    )
    trainer = TrainerRate(0.0, 6 * used / (sheet.operations * TRAINER_SHARE * trainer_unit), trainer_unit, trainer_unit)
    return Rates(
        trainer,
        sampler,
        Workload(batch, samples, prompt_tokens, np.minimum(lengths, longest), np.zeros(1)),
        sync_s=2 * shape.parameters / _NETWORK,
        start_s=_START_S,
        source=f"a guess: the data sheet of {device}, no run",
        assumptions=[
            f"a guess: the trainer reaches {TRAINER_SHARE:.0%} of the operations, prefill {PREFILL_SHARE:.0%}, "
            f"decoding {MEMORY_SHARE:.0%} of the memory's bandwidth and {_ITERATION_S * 1000:.0f} ms per iteration",
            "a guess: lengths are log-normal, with a standard deviation of "
            f"{_SPREAD} of their logarithm; {_START_S:.0f} s until the first step; weights: {_NETWORK / 1e9:.0f} GB/s",
            "the trainer's speed grows with its GPUs: linear, an assumption",
            "the optimizer's state and activations fit; a launch script's DRY_RUN=1 counts them",
        ],
    )


def _used_parameters(shape: ModelShape) -> float:
    """Parameters that one token uses."""
    if shape.experts is None:
        return shape.parameters
    unused = shape.expert_parameters * (1 - shape.experts.per_token / shape.experts.number)
    return shape.parameters - shape.layers * unused
