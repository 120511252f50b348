"""Random schedules of the control loop, each run over a simulated clock, samplers and trainer."""

import contextlib
import heapq
import math
import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

from verl_vcpo.cpu import environment

environment.apply()
os.environ.setdefault("VERL_LOGGING_LEVEL", "WARN")

import numpy as np  # noqa: E402
from omegaconf import OmegaConf  # noqa: E402
from verl.trainer.ppo.v1 import replay_buffer as verl_replay_buffer  # noqa: E402
from verl.trainer.ppo.v1 import trainer_base  # noqa: E402
from verl.trainer.ppo.v1.trainer_separate_async import HybridEngineMode  # noqa: E402
from verl.utils import tensordict_utils as tu  # noqa: E402

from verl_vcpo.trainer.ppo.v1 import agent_loop, replay_buffer, trainer_lag_k  # noqa: E402
from verl_vcpo.trainer.ppo.v1.agent_loop import LagKAgentLoopManager  # noqa: E402
from verl_vcpo.trainer.ppo.v1.deadlines import OnDeadline  # noqa: E402
from verl_vcpo.trainer.ppo.v1.replay_buffer import MAX_ATTEMPTS, LagKReplayBuffer, prompt_of  # noqa: E402


@dataclass(frozen=True)
class Schedule:
    """What is random about a run."""

    seed: int
    lag: float
    on_deadline: OnDeadline
    exact: bool
    batch_size: int
    steps: int
    capacity: int
    """Prompts that the samplers work on at a time."""
    straggler: float
    """Share of prompts that take 30 times as long."""
    failure: float
    """Probability that an attempt fails."""
    sync_s: float

    @staticmethod
    def draw(seed: int) -> "Schedule":
        rng = random.Random(seed)
        exact = rng.random() < 0.15
        lag = rng.choice([0, 1, 2, 3, 5, 8, 16]) if exact or rng.random() < 0.7 else round(rng.uniform(0, 5), 1)
        reissue = not exact and lag > 0 and rng.random() < 0.4
        return Schedule(
            seed=seed,
            lag=lag,
            on_deadline=OnDeadline.REISSUE if reissue else OnDeadline.WAIT,
            exact=exact,
            batch_size=rng.randint(1, 4),
            steps=rng.randint(3, 10),
            capacity=rng.choice([1, 2, 4, 16, 1000]),
            straggler=rng.choice([0.0, 0.05, 0.3]),
            failure=rng.choice([0.0, 0.0, 0.1, 0.4]),
            sync_s=rng.choice([0.0, 0.1, 3.0]),
        )


@dataclass
class Outcome:
    """What one or many schedules did."""

    schedules: int = 0
    trained: int = 0
    lag_violations: int = 0
    deadlocks: int = 0
    lost: int = 0
    duplicated: int = 0
    reissued: int = 0
    retried: int = 0

    def add(self, other: "Outcome") -> None:
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def ok(self) -> bool:
        return not (self.lag_violations or self.deadlocks or self.lost or self.duplicated)


class Deadlock(Exception):
    """The trainer waits and nothing will ever happen."""


@dataclass
class Clock:
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


class Samplers:
    """In place of agent loops and vLLM: prompts take their time, some fail, weight updates pause all of them."""

    def __init__(self, schedule: Schedule, clock: Clock, queue: MemoryQueue) -> None:
        self.version = 0
        self._schedule, self._clock, self._queue = schedule, clock, queue
        self._rng = random.Random(schedule.seed + 1)
        self._waiting: list[str] = []
        self._running: dict[str, int] = {}  # uid -> its attempt
        self._attempt: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._pauses = 0.0

    def generate_sequences(self, batch: Any) -> None:
        self._waiting += [str(uid) for uid in batch["uid"]]
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
        self._clock.run(self._schedule.sync_s)
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

        self._clock.after(seconds, finish)

    def _publish(self, uid: str, version: int) -> None:
        fails = self._rng.random() < self._schedule.failure and self._failures[uid] < MAX_ATTEMPTS - 1
        self._failures[uid] += fails
        if not fails:
            tag = {"seq_len": 2, "min_global_steps": version, "max_global_steps": self.version}
            self._queue.tags["train"][f"{uid}_0_0"] = tag
        self._queue.tags["train"][uid]["status"] = "failure" if fails else "finished"


def _dataset() -> Iterator[dict[str, Any]]:
    """An endless data loader of one prompt at a time."""
    for index in range(sys.maxsize):
        yield {"raw_prompt": np.array([f"prompt {index}"], dtype=object), "index": np.array([index], dtype=object)}


def _trainer(schedule: Schedule, clock: Clock, samplers: Samplers) -> trainer_lag_k.LagKTrainer:
    """The real trainer, without its workers."""
    trainer = trainer_lag_k.LagKTrainer.__new__(trainer_lag_k.LagKTrainer)
    settings = {"lag": schedule.lag, "on_deadline": str(schedule.on_deadline), "exact_lag": schedule.exact}
    trainer.config = OmegaConf.create(
        {
            "async": settings,
            "data": {"train_batch_size": schedule.batch_size, "gen_batch_size": 1},
            "skip": {"rollout_tq": {"enable": False}},
        }
    )
    trainer.trainer_mode, trainer.global_steps = "lag_k", 0
    trainer.current_mode, trainer.prev_step_profile = HybridEngineMode.TRAINER, False
    trainer.hybrid_rollout_config = SimpleNamespace(enable_switch=False)
    trainer.timing_raw, trainer._restored_tq_prompt_count = {}, 0
    trainer.train_dataloader = trainer.train_dataloader_it = _dataset()
    trainer.sampler_keeper, trainer.actor_rollout_wg = mock.Mock(), mock.Mock()
    trainer.agent_loop_manager = trainer.standalone_checkpoint_manager = samplers
    trainer.replay_buffer = LagKReplayBuffer(
        lag=schedule.lag,
        reissue_fn=trainer._resubmit,
        on_deadline=schedule.on_deadline,
        exact=schedule.exact,
        trainer_mode="lag_k",
        trainer_config={},
        max_off_policy_threshold=None,
        max_off_policy_strategy="wait",
        sampler_kwargs={},
        refill_fn=trainer._add_prompts_to_generate,
    )
    trainer.replay_buffer.sleep = clock.wait
    trainer.replay_buffer.clock = lambda: clock.now
    return trainer


def run(schedule: Schedule) -> Outcome:
    """One schedule, from the first step to the last."""
    clock, queue, rng = Clock(), MemoryQueue(), random.Random(schedule.seed + 2)
    samplers = Samplers(schedule, clock, queue)
    trainer = _trainer(schedule, clock, samplers)
    outcome, trained, fed = Outcome(schedules=1), Counter[str](), set[str]()
    submit = samplers.generate_sequences

    def count_fed(batch: Any) -> None:
        fed.update(str(uid) for uid in batch["uid"])
        submit(batch)

    samplers.generate_sequences = count_fed  # type: ignore[method-assign]
    modules = (verl_replay_buffer, trainer_base, agent_loop)
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "tq", queue))
        stack.enter_context(mock.patch.object(replay_buffer, "print_line"))  # of every prompt that fails
        trainer.global_steps = 1
        try:
            trainer.on_train_begin()
            for step in range(1, schedule.steps + 1):
                trainer.global_steps = step
                trainer.prepare_step()
                batch, metrics = trainer.replay_buffer.sample(step, "train", schedule.batch_size)
                lags = [step - 1 - tag["min_global_steps"] for tag in batch.tags]
                outcome.lag_violations += sum(lag > math.ceil(schedule.lag) for lag in lags)
                if schedule.exact and not schedule.failure:
                    outcome.lag_violations += sum(lag != min(step - 1, schedule.lag) for lag in lags)
                trained.update(prompt_of(key) for key in batch.keys)
                outcome.reissued += int(metrics["vcpo/async/reissued_prompts"])
                outcome.retried += int(metrics["vcpo/async/retried_prompts"])
                clock.run(rng.expovariate(0.3))
                trainer.on_step_end()
                queue.kv_clear(batch.keys, "train")
        except Deadlock:
            outcome.deadlocks = 1
    known = {uid for uid, tag in queue.tags["train"].items() if tag.get("is_prompt")}
    outcome.trained = trained.total()
    outcome.duplicated = sum(times - 1 for times in trained.values()) + len(known & trained.keys())
    outcome.lost = len(fed - known - trained.keys())
    if not outcome.deadlocks:
        outcome.lost += schedule.steps * schedule.batch_size - len(trained)
    return outcome
