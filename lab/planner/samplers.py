"""Samplers at token level: slots, batch-dependent speed, prefill, pauses, a queue for each."""

import heapq
import itertools
import math
from collections import deque

from lab.planner.rates import SamplerRate

_NEVER = math.inf
_ALMOST = 1e-6  # of a token: rounding


class Response:
    """A response on its way: what is left of it, and where it is."""

    __slots__ = ("cached", "context", "prompt", "sampler", "tokens", "turns", "version", "wait_s", "worker")

    def __init__(self, prompt: int, worker: int, context: float, tokens: float, turns: int, wait_s: float) -> None:
        self.prompt, self.worker, self.context = prompt, worker, context
        self.tokens, self.turns = tokens, turns
        """Tokens of each turn; turns that are left."""
        self.wait_s = wait_s
        """Seconds that a tool takes before a turn."""
        self.version = -1
        """The policy that sampled the first token."""
        self.cached = -1
        """The policy whose keys and values of the context the sampler still has."""
        self.sampler: Sampler | None = None


class Sampler:
    """All running requests advance together, a token in an iteration. Time passes in `advance` only.

    Prefill is work that comes before any further token of the sampler: what vLLM interleaves takes as long.
    """

    __slots__ = (
        "_contexts",
        "_debt_s",
        "_iteration_s",
        "_number",
        "_prefill_s",
        "_progress",
        "_rate",
        "_running",
        "begun",
        "idle_s",
        "in_flight",
        "index",
        "now",
        "paused",
        "running_s",
        "speed",
        "stamp",
        "waiting",
    )

    def __init__(self, index: int, rate: SamplerRate) -> None:
        self.index, self._rate = index, rate
        self._iteration_s = [rate.seconds(n) for n in range(rate.slots + 1)]
        self._prefill_s = rate.prefill_s / rate.engines
        self._running: list[tuple[float, int, Response]] = []
        self._number = itertools.count()
        self._progress = self._debt_s = 0.0
        self._contexts = 0.0  # of running requests, less the progress at which each started
        self.waiting: deque[Response] = deque()
        self.in_flight = self.stamp = self.begun = 0
        self.now = self.idle_s = self.running_s = 0.0
        self.speed, self.paused = 1.0, False

    @property
    def computes(self) -> bool:
        """Whether it has a request that runs."""
        return bool(self._running) and not self.paused

    @property
    def has_slot(self) -> bool:
        return len(self._running) < self._rate.slots and not self.paused

    def advance(self, now: float) -> None:
        """Let time pass until `now`, within which no request ends."""
        elapsed, self.now = now - self.now, now
        if not self.in_flight:
            self.idle_s += elapsed
            return
        running = len(self._running)
        self.running_s += elapsed * running
        if self.paused or not running:
            return
        work = elapsed * self.speed
        if self._debt_s:
            paid = min(work, self._debt_s)
            self._debt_s -= paid
            work -= paid
        self._progress += work / self._iteration_s[running]

    def take(self) -> None:
        """A request is on its way to it; `advance` was called for this moment."""
        self.begun += not self.in_flight
        self.in_flight += 1

    def start(self, response: Response, version: int) -> None:
        """Give a response a slot; `advance` was called for this moment."""
        if response.version < 0:
            response.version = version
        if response.cached != version:
            self._debt_s += response.context * self._prefill_s
        self._contexts += response.context - self._progress
        heapq.heappush(self._running, (self._progress + response.tokens, next(self._number), response))

    def ended(self, version: int) -> list[Response]:
        """Take out the responses whose turn has ended by now, under the policy `version`."""
        ended = []
        while self._running and self._running[0][0] <= self._progress + _ALMOST:
            response = heapq.heappop(self._running)[2]
            response.context += response.tokens
            response.cached = version
            self._contexts -= response.context - self._progress
            ended.append(response)
        return ended

    def next_end(self) -> float:
        """When the next response ends a turn, if nothing else happens."""
        if self.paused or not self._running:
            return _NEVER
        left = (self._running[0][0] - self._progress) * self._iteration_s[len(self._running)]
        return self.now + (self._debt_s + max(left, 0.0)) / self.speed

    def compute_anew(self) -> None:
        """The contexts of all running requests are computed again, with new weights."""
        self._debt_s += (self._contexts + len(self._running) * self._progress) * self._prefill_s
