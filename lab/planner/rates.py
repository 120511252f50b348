"""What a forecast is computed from: how fast each part works, and on what."""

import math
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from recipe.fully_async_policy.settings.errors import SettingError

DRIVER_S = 0.00034
"""Processor time of the driver per trajectory of a step, by `tests.reliability.scale` (docs/measurements/scale.md)."""


class PlanError(SettingError):
    """A forecast is not possible. The message is one line: what is wrong, and what to give instead."""


@dataclass(frozen=True)
class TrainerRate:
    """The trainer's seconds for a step, without waiting and without the weight update."""

    fixed_s: float
    token_s: float
    """Seconds for each token (prompt and response) on `gpus` GPUs."""
    gpus: int
    unit: int = 1
    """GPUs of one replica of the model (TP x PP x CP): the trainer gets multiples of them."""
    exponent: float = 1.0
    """Speed grows with GPUs ** exponent: 1 is the assumption of linear scaling."""

    def seconds(self, tokens: float, gpus: int) -> float:
        """For a step of `tokens` on `gpus` GPUs."""
        return self.fixed_s + self.token_s * tokens * (self.gpus / gpus) ** self.exponent


@dataclass(frozen=True)
class SamplerRate:
    """One sampler: an iteration gives each of the n running requests of an engine a token in `iteration_s + n *
    request_s`. A sampler's requests are spread evenly over its engines."""

    iteration_s: float
    request_s: float
    prefill_s: float
    """Seconds per token of context that is computed before the first token, or anew after a weight update."""
    slots: int
    """Requests that run at a time, of all engines: `max_num_seqs` each."""
    gpus: int = 1
    engines: int = 1
    """`data_parallel_size`."""

    def seconds(self, running: int) -> float:
        """Of an iteration with so many requests."""
        return self.iteration_s + running / self.engines * self.request_s

    def faster(self, times: float) -> "SamplerRate":
        """A sampler all of whose work takes that many times less."""
        iteration_s, request_s, prefill_s = (s / times for s in (self.iteration_s, self.request_s, self.prefill_s))
        return replace(self, iteration_s=iteration_s, request_s=request_s, prefill_s=prefill_s)

    @property
    def most_tokens_per_s(self) -> float:
        """With all slots taken."""
        return self.slots / self.seconds(self.slots)


@dataclass(frozen=True)
class Workload:
    """What a step trains on, and what responses are like. Lengths and waits of responses are independent draws."""

    prompts: int
    samples: int
    prompt_tokens: float
    lengths: NDArray[np.float64]
    """Tokens of responses, to draw from."""
    outside_s: NDArray[np.float64]
    """Seconds that a response waits for tools, in all its calls together, to draw from."""
    calls: int = 0
    """Of a tool, in each response. 0: what it waits, it waits before its first token."""
    reward_s: float = 0.0

    @property
    def responses(self) -> int:
        """Of a step."""
        return self.prompts * self.samples

    @property
    def tokens(self) -> float:
        """Of a step, on average: prompts and responses."""
        return self.responses * (self.prompt_tokens + float(self.lengths.mean()))


@dataclass(frozen=True)
class SharedCores:
    """What the parts of a run ask for of the cores of one machine, in cores."""

    count: float
    trainer: float
    """While it works."""
    looking: float
    """While it waits for rollouts: it looks for them."""
    sampler: float
    """While a request runs, with the sampler's server."""
    agents: float
    """Of an agent-loop worker that works on a response, with what the data plane and Ray do for it."""

    def speed(self, asked: float) -> float:
        """Of everything, where so many cores are asked for: all parts are slowed down alike."""
        return self.count / asked if asked > self.count else 1.0


@dataclass(frozen=True)
class Rates:
    """A calibration."""

    trainer: TrainerRate
    sampler: SamplerRate
    workload: Workload
    sync_s: float
    """For which a weight update stops the samplers and the trainer."""
    start_s: float
    recompute: bool = True
    """Contexts are computed anew after a weight update (`async.kv_cache`)."""
    between_s: float = 0.0
    """The trainer's metrics and logs between two steps, in which samplers sample."""
    poll_s: float = 0.0
    """The trainer, where it waits, looks for finished prompts so often."""
    cores: SharedCores | None = None
    """Where trainer, samplers and agent loops share a machine's cores; None: nobody waits for a core."""
    call_s: float = 0.0
    """Of a request on its way to an engine, and of its response on the way back: half each. Its sampler has it
    meanwhile, and is not idle. The way back hides behind what the agent-loop worker does for the response."""
    workers: int = 8
    """Agent-loop workers."""
    agent_s: float = 0.0
    """Of an agent-loop worker's work for a response, half before the sampler, half after. It takes turns among them."""
    source: str = ""
    assumptions: list[str] = field(default_factory=list)
    fits: dict[str, float] = field(default_factory=dict)
    """What of the calibration's own steps the fitted rates do not explain, as shares."""


@dataclass(frozen=True)
class Layout:
    """A split of GPUs, and the lag."""

    trainer_gpus: int
    sampler_gpus: int
    lag: float
    exact: bool = False
    """`async.exact_lag`: a step waits until all that was submitted is finished."""

    @property
    def gpus(self) -> int:
        return self.trainer_gpus + self.sampler_gpus

    @property
    def bound(self) -> int:
        """The largest lag of a trajectory."""
        return math.ceil(self.lag)
