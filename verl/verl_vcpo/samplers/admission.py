"""Admission control: some requests of a run are at the samplers, and all others wait their turn.

`async.lag` + 1 batches of prompts are in flight: for the paper's layouts up to 33,000 requests for each sampler. A vLLM
engine works on `max_num_seqs` requests at a time. If all requests were at the samplers, control calls, validations and
time limits would wait behind them, and every weight update would abort all requests and have them sent again. So the
samplers get at most `REQUESTS_PER_SLOT` requests for each of their slots, earliest deadline first; the others wait in
the agent-loop workers. A request that is released later starts with newer weights: the realised lag falls, and the
bound, which counts from the prompt's submission, is untouched.
"""

import asyncio
import contextlib
import heapq
import itertools
import math
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

REQUESTS_PER_SLOT = 2
"""Requests for each slot: one that the engine works on, and one that waits, so that the engine never runs dry."""

LOOPS_PER_REQUEST = 4
"""The agent loops that are under way for each admitted request: some wait for tools and rewards, which need no slot. If
all agent loops were under way, a worker would prepare prompts for minutes before any finished response gets its turn. A
prompt waits as a whole, before its n agent loops are made: a worker can have to stop thousands of prompts at once.
"""

CONTROL_CALLS = 64
"""The most calls of a server's actor at a time that are no requests: probes, aborts, weight updates."""

request_order: ContextVar[tuple[int, ...]] = ContextVar("request_order", default=())
"""The place of an agent loop's requests in the queue, smallest first: validation, step of submission, ..."""


def is_training_request() -> bool:
    """Return True in an agent loop whose responses are trained on, False in a validation and outside of agent loops."""
    return bool(request_order.get()[:1] == (True,))


def slots_of_sampler(rollout: Any) -> int:
    """Return the requests that a sampler works on at a time: `max_num_seqs` for each of its engines.

    Args:
        rollout: the settings `actor_rollout_ref.rollout`, as in the functions below.
    """
    return int(rollout.data_parallel_size * rollout.max_num_seqs)


def admitted_per_worker(rollout: Any) -> int:
    """Return the requests that an agent-loop worker of a layout may have at the samplers."""
    each = rollout.tensor_model_parallel_size * rollout.pipeline_model_parallel_size * rollout.data_parallel_size
    samplers = max(1, rollout.n_gpus_per_node * rollout.nnodes // each)
    return math.ceil(REQUESTS_PER_SLOT * samplers * slots_of_sampler(rollout) / rollout.agent.num_workers)


def agent_loops_per_worker(rollout: Any) -> int:
    """Return the responses that an agent-loop worker may work on at a time, tools and rewards included."""
    return LOOPS_PER_REQUEST * admitted_per_worker(rollout)


def most_calls(rollout: Any) -> int:
    """Return the most calls that one server can have at a time: all admitted requests, if all other servers died."""
    return admitted_per_worker(rollout) * rollout.agent.num_workers + CONTROL_CALLS


class Places:
    """The places of a gate that were taken together, to be given back one by one."""

    def __init__(self, gate: "AdmissionGate", count: int) -> None:
        self._gate, self._held = gate, count

    def give_back(self, count: int = 1) -> None:
        """Give back `count` of the places, or as many as are still held."""
        given, self._held = min(count, self._held), max(0, self._held - count)
        self._gate.leave(given)


class AdmissionGate:
    """A number of free places, and tasks that wait for one: the smallest order enters first."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._waiting: list[tuple[tuple[int, ...], int, int, asyncio.Future[None]]] = []
        self._arrivals = itertools.count()

    @contextlib.asynccontextmanager
    async def admitted(self, order: tuple[int, ...], places: int = 1) -> AsyncIterator[Places]:
        """Wait for a place, and take `places` at once, for the block or until they are given back.

        One free place is enough to take several: up to `places` - 1 more than there are may be taken.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (order, next(self._arrivals), places, turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the place was given at the same moment
                self.leave(places)
            raise
        held = Places(self, places)
        try:
            yield held
        finally:
            held.give_back(places)

    def leave(self, places: int) -> None:
        """Give places back."""
        self._free += places
        self._admit()

    def _admit(self) -> None:
        while self._free > 0 and self._waiting:
            _, _, places, turn = heapq.heappop(self._waiting)
            if not turn.done():  # its task was cancelled
                self._free -= places
                turn.set_result(None)
