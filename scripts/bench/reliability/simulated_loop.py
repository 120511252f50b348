"""The real trainer and replay buffer over a simulated clock, samplers and update, with TransferQueue in memory."""

import contextlib
import functools
import heapq
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from recipe.fully_async_policy.main import compose, prepare_environment

prepare_environment(["hardware=cpu"])

import numpy as np  # noqa: E402
from omegaconf import DictConfig  # noqa: E402
from transfer_queue import KVBatchMeta  # noqa: E402
from verl.trainer.ppo.v1 import replay_buffer as verl_replay_buffer  # noqa: E402
from verl.trainer.ppo.v1 import trainer_base  # noqa: E402
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402

from scripts.bench.reliability.schedules import Schedule, ScheduleOutcome  # noqa: E402
from verl_vcpo.trainer.ppo.v1 import agent_loop, replay_buffer, trainer_lag_k  # noqa: E402
from verl_vcpo.trainer.ppo.v1.agent_loop import LagKAgentLoopManager  # noqa: E402
from verl_vcpo.trainer.ppo.v1.replay_buffer import MAX_ATTEMPTS, prompt_of  # noqa: E402


class Deadlock(Exception):
    """The trainer waits and nothing will ever happen."""


@dataclass
class SimulatedClock:
    """Simulated time: callbacks in the order of their times."""

    now: float = 0.0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _count: int = 0

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, callback))

    def wait(self, _: float) -> None:
        """Until the next event: what polling more often would come to."""
        if not self._events:
            raise Deadlock
        self.now, _, callback = heapq.heappop(self._events)
        callback()

    def run(self, seconds: float) -> None:
        """Everything that happens in the next `seconds`."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.wait(0)
        self.now = end


class MemoryQueue:
    """TransferQueue's key-value calls, in this process."""

    def __init__(self) -> None:
        self.tags: dict[str, dict[str, dict[str, Any]]] = {"train": {}}
        self._fields: dict[str, Any] = {}

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        return {partition: {k: dict(tag) for k, tag in keys.items()} for partition, keys in self.tags.items()}

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        for key in keys:
            self.tags[partition_id].pop(key, None)
            self._fields.pop(key, None)

    def kv_batch_put(
        self, keys: list[str], partition_id: str, fields: Any = None, tags: list[dict[str, Any]] | None = None
    ) -> None:
        for i, key in enumerate(keys):
            if tags is not None:
                self.tags[partition_id].setdefault(key, {}).update(tags[i])
            if fields is not None:
                self._fields[key] = fields[i : i + 1]

    def kv_batch_get(self, keys: list[str], partition_id: str) -> Any:
        return tu.concat_tensordict([self._fields[key] for key in keys])


class SimulatedSamplers:
    """In place of agent loops and vLLM: prompts take their time, some fail, weight updates pause all of them."""

    def __init__(self, schedule: Schedule, clock: SimulatedClock, queue: MemoryQueue) -> None:
        self.version = 0
        self.clock, self._schedule, self._queue = clock, schedule, queue
        self._rng = random.Random(schedule.seed + 1)
        self.submitted: set[str] = set()
        """Every prompt so far."""
        self._waiting: list[str] = []
        self._running: dict[str, int] = {}  # uid -> its attempt
        self._attempt: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._pauses = 0.0

    def generate_sequences(self, batch: Any) -> None:
        uids = [str(uid) for uid in batch["uid"]]
        self.submitted.update(uids)
        self._waiting += uids
        self._start()

    resubmit = LagKAgentLoopManager.resubmit  # the real method, over `cancel` and `generate_sequences` of this class

    def cancel(self, uids: list[str]) -> None:
        for uid in uids:
            self._running.pop(uid, None)
        self._waiting = [uid for uid in self._waiting if uid not in uids]
        self._start()

    def update_weights(self, version: int) -> dict[str, float]:
        """What runs goes on afterwards, with the new weights; it keeps the version that it started with."""
        self._pauses += self._schedule.sync_s
        self.clock.run(self._schedule.sync_s)
        self.version = version
        return {}

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._schedule.capacity:
            uid = self._waiting.pop(0)
            self._attempt[uid] += 1
            self._running[uid] = self._attempt[uid]
            self._queue.tags["train"][uid]["status"] = "running"
            seconds = self._rng.expovariate(1.0) * (30 if self._rng.random() < self._schedule.straggler else 1)
            self._finish_later(uid, self._attempt[uid], self.version, seconds)

    def _finish_later(self, uid: str, attempt: int, version: int, seconds: float) -> None:
        pauses = self._pauses

        def finish() -> None:
            if self._running.get(uid) != attempt:
                return  # cancelled
            if self._pauses > pauses:
                self._finish_later(uid, attempt, version, self._pauses - pauses)
                return
            del self._running[uid]
            self._publish(uid, version)
            self._start()

        self.clock.after(seconds, finish)

    def _publish(self, uid: str, version: int) -> None:
        fails = self._rng.random() < self._schedule.failure and self._failures[uid] < MAX_ATTEMPTS - 1
        self._failures[uid] += fails
        if not fails:
            tag = {"seq_len": 2, "min_global_steps": version, "max_global_steps": self.version}
            self._queue.tags["train"][f"{uid}_0_0"] = tag
        self._queue.tags["train"][uid]["status"] = "failure" if fails else "finished"


class Silent:
    """In place of what workers do and what a run shows: takes every call, and does nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> "Silent":
        return self

    def __getattr__(self, name: str) -> "Silent":
        return self


class SamplersThatLive:
    """In place of `SamplerKeeper`: no sampler dies, and waiting lets simulated time pass."""

    def __init__(self, servers: Any, weights: SimulatedSamplers, **settings: Any) -> None:
        self.sleep, self.version = weights.clock.wait, 0

    def replace_dead(self) -> int:
        return 0


def _dataset() -> Iterator[dict[str, Any]]:
    """An endless data loader of one prompt at a time."""
    for index in range(sys.maxsize):
        yield {"raw_prompt": np.array([f"prompt {index}"], dtype=object), "index": np.array([index], dtype=object)}


class SimulatedTrainer(trainer_lag_k.LagKTrainer):
    """The real trainer, by its constructor and verl's `init` and `fit`, without processes, updates and metrics.

    batches: what was trained on: (step, batch, the replay buffer's metrics).
    """

    def __init__(self, config: DictConfig, samplers: SimulatedSamplers, update_s: Callable[[], float]) -> None:
        self._samplers, self._update_s = samplers, update_s
        self.batches: list[tuple[int, KVBatchMeta, dict[str, Any]]] = []
        super().__init__(config)

    def _setup(self) -> None:
        """What verl's does, with stand-ins for everything that has processes."""
        self._init_dataloader()
        self._init_dump_executor()
        self.actor_rollout_wg, self.standalone_server_manager = Silent(), Silent()
        self.standalone_checkpoint_manager = self._samplers
        self.current_mode = HybridEngineMode.TRAINER
        self.replay_buffer.clock = lambda: self._samplers.clock.now
        self._load_checkpoint()

    def _init_dataloader(self) -> None:
        self.train_dataloader, self.train_dataloader_it = _dataset(), None
        self.total_training_steps, self.steps_per_epoch = self.config.trainer.total_training_steps, sys.maxsize

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, float], sample_batch_size: int) -> KVBatchMeta:
        batch, sampled = self.replay_buffer.sample(self.global_steps, "train", sample_batch_size)
        self.batches.append((self.global_steps, batch, sampled))
        self._samplers.clock.run(self._update_s())
        return batch

    def _compute_metrics(self, *args: Any, **kwargs: Any) -> None:
        """None: verl's are of trajectories that have tokens."""


@functools.cache
def _settings() -> DictConfig:
    """The settings of all schedules: composed once, changed for each."""
    off = ["trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1"]
    return compose(["+task=countdown", "hardware=cpu", "trainer.resume_mode=disable", "data.gen_batch_size=1", *off])


def _configured(schedule: Schedule) -> DictConfig:
    config = _settings()
    config["async"].lag, config["async"].on_deadline = schedule.lag, str(schedule.on_deadline)
    config["async"].exact_lag = schedule.exact
    config.data.train_batch_size = schedule.batch_size
    config.trainer.total_training_steps = schedule.steps
    return config


@contextlib.contextmanager
def _in_memory(queue: MemoryQueue) -> Iterator[None]:
    """TransferQueue is `queue`, samplers live, and nothing is printed or tracked."""
    with contextlib.ExitStack() as stack:
        for module in (verl_replay_buffer, trainer_base, agent_loop):
            stack.enter_context(mock.patch.object(module, "tq", queue))
        stack.enter_context(mock.patch.object(trainer_lag_k, "SamplerKeeper", SamplersThatLive))
        for module in (replay_buffer, trainer_lag_k):
            stack.enter_context(mock.patch.object(module, "print_line", Silent()))
        for name in ("SkipManager", "Tracking", "OmegaConf", "tqdm", "pprint"):  # of verl's `fit`
            stack.enter_context(mock.patch.object(trainer_base, name, Silent()))
        yield


def run(schedule: Schedule) -> ScheduleOutcome:
    """One schedule, from the first step to the last."""
    queue, rng = MemoryQueue(), random.Random(schedule.seed + 2)
    samplers = SimulatedSamplers(schedule, SimulatedClock(), queue)
    outcome = ScheduleOutcome(schedules=1)
    with _in_memory(queue):
        trainer = SimulatedTrainer(_configured(schedule), samplers, update_s=lambda: rng.expovariate(0.3))
        trainer.init()
        try:
            trainer.fit(samplers)
        except Deadlock:
            outcome.deadlocks = 1
    trained = Counter[str]()
    for step, batch, metrics in trainer.batches:
        lags = [step - 1 - tag["min_global_steps"] for tag in batch.tags]
        outcome.lag_violations += sum(lag > math.ceil(schedule.lag) for lag in lags)
        if schedule.exact and not schedule.failure:
            outcome.lag_violations += sum(lag != min(step - 1, schedule.lag) for lag in lags)
        trained.update(prompt_of(key) for key in batch.keys)
        outcome.reissued += int(metrics["vcpo/async/reissued_prompts"])
        outcome.retried += int(metrics["vcpo/async/retried_prompts"])
    known = {uid for uid, tag in queue.tags["train"].items() if tag.get("is_prompt")}
    outcome.trained = trained.total()
    outcome.duplicated = sum(times - 1 for times in trained.values()) + len(known & trained.keys())
    outcome.lost = len(samplers.submitted - known - trained.keys())
    if not outcome.deadlocks:
        outcome.lost += schedule.steps * schedule.batch_size - len(trained)
    return outcome
