"""A run on a simulated clock: the trainer's own feeding rule and gates around samplers that count tokens.

What may be submitted, taken, and admitted is decided by the functions that decide it in a run:
verl_vcpo/loop/deadlines.py and verl_vcpo/samplers/admission.py.
"""

import heapq
import itertools
import math
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from lab.planner.clock import Clock, Happens, Worker
from lab.planner.rates import Layout, PlanError, Rates
from lab.planner.samplers import Response, Sampler
from verl_vcpo.loop.deadlines import deadlines_hold, deadlines_without_oldest, in_flight
from verl_vcpo.samplers.admission import LOOPS_PER_REQUEST, Line, admitted


@dataclass
class SimulatedStep:
    """What one step took, in seconds, and what it trained on."""

    seconds: float
    """Until the next step began."""
    wait_s: float
    """The trainer waited for rollouts."""
    deadline_wait_s: float
    """Of that: enough prompts were finished, but others were due."""
    trainer_s: float
    sampler_idle: float
    """Share of the step that a sampler had no request, mean over samplers."""
    running: float
    """Requests that ran at a time, of one sampler."""
    tokens: float
    cores_full_s: float = 0.0
    """More was asked of shared cores than there is."""
    lags: list[int] = field(default_factory=list)


@dataclass
class _Prompt:
    step: int
    number: int
    left: int
    tokens: float = 0.0
    versions: list[int] = field(default_factory=list)


class Simulation:
    """One run.

    Args:
        share: a fraction of the samplers, with the same fraction of the prompts, stands for all.
    """

    def __init__(self, rates: Rates, layout: Layout, *, seed: int = 0, share: float = 1.0) -> None:
        work, samplers = rates.workload, layout.sampler_gpus // rates.sampler.gpus
        if samplers < 1 or layout.trainer_gpus < 1:
            raise PlanError(
                f"{layout.trainer_gpus} + {layout.sampler_gpus} GPUs: a sampler takes {rates.sampler.gpus}, and the "
                "trainer at least one; give --gpus more"
            )
        simulated = max(1, round(samplers * share))
        self._share = simulated / samplers
        self._rates, self._layout, self._work = rates, layout, work
        self._batch = max(1, round(work.prompts * self._share))
        self._scale = work.prompts / self._batch  # tokens of the run for each that is simulated
        self._samplers = [Sampler(i, rates.sampler) for i in range(simulated)]
        self._by_load = [(0, i) for i in range(simulated)]
        slots = rates.sampler.slots * simulated
        workers = max(1, min(rates.workers, self._batch))
        self._requests = [Line(admitted(slots, workers)) for _ in range(workers)]
        self._loops = [Line(LOOPS_PER_REQUEST * admitted(slots, workers)) for _ in range(workers)]
        self._random = np.random.default_rng(seed)
        self._clock = Clock()
        self._trainer = Worker(self._clock, self._share_cores)
        self._agents = [Worker(self._clock, self._share_cores) for _ in range(workers)]
        self._prompt_numbers = itertools.count()
        self._prompts: dict[int, _Prompt] = {}
        self._submitted, self._finished = Counter[int](), Counter[int]()
        self._ready: list[tuple[int, int]] = []
        self.version = self.step = 0
        self.steps: list[SimulatedStep] = []
        self._waiting, self._held_since, self._held_s = False, math.nan, 0.0
        self._started = self._idle_before = self._running_before = 0.0
        self._taken: SimulatedStep
        self._speed, self._speed_since, self._looks = 1.0, 0.0, False
        self._cores_full_s = 0.0

    @property
    def begun(self) -> float:
        """How often a sampler without requests was given one, on average over the samplers."""
        return sum(sampler.begun for sampler in self._samplers) / len(self._samplers)

    def run(self, steps: int) -> list[SimulatedStep]:
        """The first `steps` steps."""
        self.step = 1
        self._submit(in_flight(self._layout.lag, self._batch))
        self._begin_step()
        while len(self.steps) < steps:
            self._clock.next()
        return self.steps

    # The prompts' way: a gate for agent loops, tools, an agent-loop worker, a gate for requests, a sampler, the reward,
    # the worker again.

    def _submit(self, count: int) -> None:
        n, work = self._work.samples, self._work
        lengths = self._random.choice(work.lengths, (count, n)).tolist()
        waits = self._random.choice(work.outside_s, (count, n)).tolist()
        turns = work.calls + 1
        for i in range(count):
            number = next(self._prompt_numbers)
            prompt = self._prompts[number] = _Prompt(self.step, number, n)
            worker = i * len(self._loops) // count
            prompt.tokens = n * work.prompt_tokens + sum(lengths[i])
            responses = [
                Response(number, worker, work.prompt_tokens, length / turns, turns, wait / max(1, work.calls))
                for length, wait in zip(lengths[i], waits[i], strict=True)
            ]
            self._loops[worker].enter((self.step, number), n, partial(self._begin, responses))
        self._submitted[self.step] += count

    def _begin(self, responses: list[Response]) -> bool:
        for response in responses:
            wait_s = response.wait_s if self._work.calls == 0 else 0.0
            self._work_on(response, wait_s, partial(self._request, response))
        return True

    def _work_on(self, response: Response, wait_s: float, then: Happens) -> None:
        """Half of what its agent-loop worker does for a response. What the response waits for passes meanwhile."""
        over = self._clock.now + wait_s

        def done() -> None:
            if self._clock.now < over:
                self._clock.after(over - self._clock.now, then)
            else:
                then()

        self._agents[response.worker].do(self._rates.agent_s / 2, done)

    def _request(self, response: Response) -> None:
        order = self._prompts[response.prompt].step, response.prompt
        self._requests[response.worker].enter(order, 1, partial(self._send, response))

    def _send(self, response: Response) -> bool:
        sampler = response.sampler = response.sampler or self._least_loaded()
        sampler.advance(self._clock.now)
        sampler.take()
        heapq.heappush(self._by_load, (sampler.in_flight, sampler.index))
        if self._rates.call_s:
            self._clock.after(self._rates.call_s / 2 / self._speed, partial(self._arrive, response, sampler))
        else:
            self._arrive(response, sampler)
        return True

    def _arrive(self, response: Response, sampler: Sampler) -> None:
        sampler.advance(self._clock.now)
        if sampler.has_slot:
            sampler.start(response, self.version)
        else:
            sampler.waiting.append(response)
        self._look_at(sampler)

    def _least_loaded(self) -> Sampler:
        while True:
            load, index = self._by_load[0]
            if self._samplers[index].in_flight == load:
                return self._samplers[index]
            heapq.heappop(self._by_load)

    def _look_at(self, sampler: Sampler) -> None:
        """Expect the sampler's next end anew, and what trainer and samplers take from each other."""
        self._share_cores()
        sampler.stamp += 1
        stamp, at = sampler.stamp, sampler.next_end()
        if at < math.inf:
            self._clock.after(at - self._clock.now, partial(self._turn_ended, sampler, stamp))

    def _turn_ended(self, sampler: Sampler, stamp: int) -> None:
        if stamp != sampler.stamp:
            return
        sampler.advance(self._clock.now)
        ended = sampler.ended(self.version)
        if self._rates.call_s:
            self._clock.after(self._rates.call_s / 2 / self._speed, partial(self._release, sampler, len(ended)))
        else:
            self._release(sampler, len(ended))
        self._fill(sampler)
        self._look_at(sampler)
        for response in ended:
            response.turns -= 1
            if response.turns:
                self._clock.after(response.wait_s, partial(self._request, response))
            else:
                self._work_on(response, self._work.reward_s, partial(self._stored, response))
            self._requests[response.worker].leave(1)

    def _release(self, sampler: Sampler, requests: int) -> None:
        sampler.advance(self._clock.now)
        sampler.in_flight -= requests
        heapq.heappush(self._by_load, (sampler.in_flight, sampler.index))

    def _fill(self, sampler: Sampler) -> None:
        while sampler.waiting and sampler.has_slot:
            sampler.start(sampler.waiting.popleft(), self.version)

    def _stored(self, response: Response) -> None:
        prompt = self._prompts[response.prompt]
        prompt.left -= 1
        prompt.versions.append(response.version)
        if not prompt.left:
            self._finished[prompt.step] += 1
            heapq.heappush(self._ready, (prompt.step, prompt.number))
            self._look_for_batch()
        self._loops[response.worker].leave(1)

    # The trainer's way: submit, wait, train, send the weights.

    def _begin_step(self) -> None:
        self._started, self._held_s, self._held_since = self._clock.now, 0.0, math.nan
        for sampler in self._samplers:
            sampler.advance(self._clock.now)
        self._idle_before = sum(sampler.idle_s for sampler in self._samplers)
        self._running_before = sum(sampler.running_s for sampler in self._samplers)
        self._submit(self._batch)
        self._waiting = True
        self._take_if_due()
        self._share_cores()

    def _look_for_batch(self) -> None:
        """Expect the trainer's next look at the samples, if it waits for any."""
        if not self._waiting or self._looks:
            return
        if self._rates.poll_s == 0:
            self._take_if_due()
            return
        self._looks = True
        looks = math.ceil((self._clock.now - self._started) / self._rates.poll_s)
        self._clock.after(self._started + looks * self._rates.poll_s - self._clock.now, self._take_if_due)

    def _take_if_due(self) -> None:
        self._looks = False
        if not self._waiting or len(self._ready) < self._batch:
            return
        if self._layout.exact:
            if self._submitted == self._finished:
                self._take()
            return
        bound = self._layout.bound
        remaining = deadlines_without_oldest(self._submitted, self._finished, bound=bound, batch_size=self._batch)
        if not deadlines_hold(remaining, self.step, self._batch):
            if math.isnan(self._held_since):
                self._held_since = self._clock.now
            return
        self._take()

    def _take(self) -> None:
        self._waiting = False
        if not math.isnan(self._held_since):
            self._held_s = self._clock.now - self._held_since
        batch = [self._prompts.pop(heapq.heappop(self._ready)[1]) for _ in range(self._batch)]
        for prompt in batch:
            self._finished[prompt.step] -= 1
            self._submitted[prompt.step] -= 1
        self._submitted, self._finished = +self._submitted, +self._finished
        self._train(batch)

    def _train(self, batch: list[_Prompt]) -> None:
        tokens = sum(prompt.tokens for prompt in batch) * self._scale
        seconds = self._rates.trainer.seconds(tokens, self._layout.trainer_gpus)
        lags = [self.step - 1 - version for prompt in batch for version in prompt.versions]
        wait_s = self._clock.now - self._started
        self._taken = SimulatedStep(0.0, wait_s, self._held_s, seconds, 0.0, 0.0, tokens, lags=lags)
        self._trainer.do(seconds, self._trained)

    def _share_cores(self) -> None:
        """The speed of all that works, where it works on the same cores."""
        cores = self._rates.cores
        if cores is None:
            return
        asked = (
            cores.trainer * self._trainer.works
            + cores.looking * self._waiting
            + cores.sampler * sum(sampler.computes for sampler in self._samplers)
            + cores.agents * sum(agent.works for agent in self._agents)
        )
        speed = cores.speed(asked)
        if speed == self._speed:
            return
        self._count_full_cores()
        self._speed = speed
        for worker in (self._trainer, *self._agents):
            worker.set_speed(speed)
        for sampler in self._samplers:
            sampler.advance(self._clock.now)
            sampler.speed = speed
            self._look_at(sampler)

    def _count_full_cores(self) -> None:
        if self._speed < 1:
            self._cores_full_s += self._clock.now - self._speed_since
        self._speed_since = self._clock.now

    def _trained(self) -> None:
        for sampler in self._samplers:
            sampler.advance(self._clock.now)
            sampler.paused = True
            self._look_at(sampler)
        self._clock.after(self._rates.sync_s, self._updated)

    def _updated(self) -> None:
        self.version = self.step
        for sampler in self._samplers:
            sampler.advance(self._clock.now)
            sampler.paused = False
            if self._rates.recompute:
                sampler.compute_anew()
            self._fill(sampler)
            self._look_at(sampler)
        self._trainer.do(self._rates.between_s, self._next_step)

    def _next_step(self) -> None:
        self._end_step()
        self.step += 1
        self._begin_step()

    def _end_step(self) -> None:
        step, samplers = self._taken, len(self._samplers)
        step.seconds = self._clock.now - self._started
        passed = max(step.seconds, 1e-12) * samplers
        step.sampler_idle = (sum(s.idle_s for s in self._samplers) - self._idle_before) / passed
        step.running = (sum(s.running_s for s in self._samplers) - self._running_before) / passed
        self._count_full_cores()
        step.cores_full_s, self._cores_full_s = self._cores_full_s, 0.0
        self.steps.append(step)
