"""The real trainer and replay buffer over a simulated clock, samplers and update, with TransferQueue in memory."""

import contextlib
import functools
import heapq
import math
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
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

from tests.reliability.memory_queue import MemoryQueue  # noqa: E402
from tests.reliability.schedules import Schedule, ScheduleOutcome  # noqa: E402
from verl_vcpo.common import stored_tags  # noqa: E402
from verl_vcpo.common.step_lines import read_lines  # noqa: E402
from verl_vcpo.common.stored_tags import prompt_of  # noqa: E402
from verl_vcpo.loop import trainer as lag_k  # noqa: E402
from verl_vcpo.loop.prompts import failed_prompts, replay_buffer, withheld_prompts  # noqa: E402
from verl_vcpo.loop.prompts.failed_prompts import MAX_ATTEMPTS  # noqa: E402
from verl_vcpo.report.run_log import HEADLINES, SKIPPED, SKIPPED_FILE  # noqa: E402
from verl_vcpo.samplers import agent_loop  # noqa: E402
from verl_vcpo.samplers.agent_loop import LagKAgentLoopManager  # noqa: E402


class Deadlock(Exception):
    """The error of a trainer that waits although nothing will ever happen."""


@dataclass
class SimulatedClock:
    """A simulated clock, which makes callbacks in the order of their times."""

    now: float = 0.0
    _events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _count: int = 0

    def after(self, seconds: float, callback: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, callback))

    def wait(self, _: float) -> None:
        """Go on to the next event, as polling more often would do."""
        if not self._events:
            raise Deadlock
        self.now, _, callback = heapq.heappop(self._events)
        callback()

    def run(self, seconds: float) -> None:
        """Make all callbacks of the next `seconds`."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.wait(0)
        self.now = end


class SimulatedSamplers:
    """A stand-in for agent loops and vLLM: prompts take time, some fail, weight updates pause all of them."""

    def __init__(self, schedule: Schedule, clock: SimulatedClock, queue: MemoryQueue, config: DictConfig) -> None:
        self.version, self.config = 0, config
        self.clock, self._schedule, self.queue, self.seed = clock, schedule, queue, schedule.seed
        self._rng = random.Random(schedule.seed + 1)
        self.submitted: set[str] = set()
        """All prompts submitted so far."""
        self._waiting: list[str] = []
        self._running: dict[str, int] = {}  # uid -> its attempt
        self._unfinished: Counter[str] = Counter()  # responses of a running prompt
        self._failed: set[str] = set()  # running prompts with a failed response
        self._attempt: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._row: dict[str, int] = {}
        self._pauses = 0.0

    def generate_sequences(self, batch: Any) -> None:
        uids = [str(uid) for uid in batch["uid"]]
        self.submitted.update(uids)
        self._row |= zip(uids, batch["index"], strict=True)
        self._waiting += uids
        self._start()

    def raise_errors(self) -> None:
        """Do nothing: no worker fails to take prompts."""

    def raise_blocked(self) -> None:
        """Do nothing: nothing blocks a worker."""

    resubmit, prompts_of = LagKAgentLoopManager.resubmit, LagKAgentLoopManager.prompts_of
    """The real methods, over `stop` and `generate_sequences` of this class."""

    def stop(self, uids: list[str]) -> None:
        """Stop prompts, as workers do."""
        stopped = [uid for uid in uids if uid in self._running or uid in self._waiting]
        for uid in stopped:
            self._running.pop(uid, None)
        self._waiting = [uid for uid in self._waiting if uid not in stopped]
        self._start()

    def update_weights(self, version: int) -> dict[str, float]:
        """Pause all running prompts, which go on with the new weights and keep the version that they started with."""
        self._pauses += self._schedule.sync_s
        self.clock.run(self._schedule.sync_s)
        self.version = version
        return {}

    def _start(self) -> None:
        while self._waiting and len(self._running) < self._schedule.capacity:
            uid = self._waiting.pop(0)
            self._attempt[uid] += 1
            self._running[uid] = self._attempt[uid]
            self.queue.tags["train"][uid]["status"] = "running"
            self._unfinished[uid] = self._schedule.samples
            self._failed.discard(uid)
            for session in range(self._schedule.samples):
                seconds = self._rng.expovariate(1.0) * (30 if self._rng.random() < self._schedule.straggler else 1)
                self._finish_later(uid, session, self._attempt[uid], self.version, seconds)

    def _finish_later(self, uid: str, session: int, attempt: int, version: int, seconds: float) -> None:
        pauses = self._pauses

        def finish() -> None:
            if self._running.get(uid) != attempt:
                return  # cancelled
            if self._pauses > pauses:
                self._finish_later(uid, session, attempt, version, self._pauses - pauses)
                return
            self._publish(uid, session, version)
            self._unfinished[uid] -= 1
            if not self._unfinished[uid]:
                del self._running[uid]
                self.queue.tags["train"][uid]["status"] = "failure" if uid in self._failed else "finished"
                self._start()

        self.clock.after(seconds, finish)

    def _publish(self, uid: str, session: int, version: int) -> None:
        fails = self._rng.random() < self._schedule.failure and self._failures[uid] < MAX_ATTEMPTS - 1
        if fails or (session == 0 and self._schedule.bad and self._row[uid] % self._schedule.bad == 0):
            self._failures[uid] += uid not in self._failed
            self._failed.add(uid)
        else:
            tag = {"seq_len": 2, "min_global_steps": version, "max_global_steps": self.version}
            self.queue.tags["train"][f"{uid}_{session}_0"] = tag


class Silent:
    """A stand-in for workers and displays, which takes every call and does nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> "Silent":
        return self

    def __getattr__(self, name: str) -> "Silent":
        return self

    def __enter__(self) -> "Silent":
        return self

    def __exit__(self, *error: object) -> None:
        return None


class SamplersThatLive:
    """A stand-in for `SamplerKeeper`: no sampler dies, and waiting lets simulated time pass."""

    def __init__(self, servers: Any, weights: SimulatedSamplers, **settings: Any) -> None:
        self.sleep, self.version = weights.clock.wait, 0

    def replace_dead(self) -> int:
        return 0


class SimulatedData:
    """A data loader of one prompt at a time, which goes on in the middle of an epoch.

    position: the number of prompts delivered in all epochs.
    """

    def __init__(self, rows: int, position: int = 0) -> None:
        self._rows, self.position = rows, position

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            index = self.position % self._rows
            self.position += 1
            columns = {"raw_prompt": [{"role": "user", "content": "2 + 2?"}], "index": index, "data_source": "sums"}
            yield {name: _one(value) for name, value in columns.items()}
            if self.position % self._rows == 0:
                return


def _one(value: Any) -> Any:
    """Return a column of one row."""
    column = np.empty(1, dtype=object)
    column[0] = value
    return column


class Crash(Exception):
    """The end of a run in the middle of a step."""


@dataclass(frozen=True)
class Saved:
    """The checkpoint of a simulated run."""

    step: int
    queue: MemoryQueue
    position: int
    """The position of the data loader."""
    submitted: frozenset[str]
    """All prompts submitted so far."""


class SimulatedTrainer(lag_k.LagKTrainer):
    """The real trainer, by its constructor and verl's `init` and `fit`, without processes, updates and metrics.

    batches: all trained batches: (step, batch, the replay buffer's metrics).
    saved: the last checkpoint.
    """

    def __init__(
        self,
        config: DictConfig,
        samplers: SimulatedSamplers,
        update_s: Callable[[], float],
        data: SimulatedData,
        crash_step: int | None,
    ) -> None:
        self._samplers, self._update_s, self._data, self._crash_step = samplers, update_s, data, crash_step
        self.batches: list[tuple[int, KVBatchMeta, dict[str, Any]]] = []
        self._signs = random.Random(samplers.seed)
        self.saved: Saved | None = None
        super().__init__(config, start_agent_loops=lambda: None)

    def _setup(self) -> None:
        """Set up as verl does, with stand-ins for everything that has processes."""
        self._init_dataloader()
        self._init_dump_executor()
        self.actor_rollout_wg, self.standalone_server_manager = Silent(), Silent()
        self.standalone_checkpoint_manager = self._samplers
        self.current_mode = HybridEngineMode.TRAINER
        self.replay_buffer.clock = lambda: self._samplers.clock.now
        self._load_checkpoint()

    def _end_unused_balancer(self) -> None:
        """Do nothing: no balancer was started."""

    def _init_dataloader(self) -> None:
        self.train_dataloader, self.train_dataloader_it = self._data, None
        self.total_training_steps, self.steps_per_epoch = self.config.trainer.total_training_steps, sys.maxsize

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, float], sample_batch_size: int) -> KVBatchMeta:
        batch, sampled = self.replay_buffer.sample(self.global_steps, "train", sample_batch_size)
        if self.global_steps == self._crash_step:
            raise Crash
        self.batches.append((self.global_steps, batch, sampled))
        metrics |= sampled
        metrics |= {HEADLINES["ess_ratio"]: self._signs.random(), HEADLINES["kl"]: 0.0}
        self._samplers.clock.run(self._update_s())
        return batch

    def _save_checkpoint(self) -> None:
        self._wait_if_exact()
        queue, submitted = self._samplers.queue.copy(), frozenset(self._samplers.submitted)
        self.saved = Saved(self.global_steps, queue, self._data.position, submitted)

    def _compute_metrics(self, batch: KVBatchMeta, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Keep the step's metrics; verl's need trajectories with tokens."""
        self.batches[-1] = self.global_steps, batch, metrics


@functools.cache
def _settings() -> DictConfig:
    """Compose the settings of all schedules once; each schedule changes them."""
    off = ["trainer.val_before_train=false", "trainer.test_freq=-1", "trainer.save_freq=-1"]
    off += ["samples_every=0", "save_model=false"]
    return compose(["+task=countdown", "hardware=cpu", "trainer.resume_mode=disable", "data.gen_batch_size=1", *off])


def _configured(schedule: Schedule, lag: float, batch_size: int, checkpoint: Path) -> DictConfig:
    config = _settings()
    config["async"].lag = lag
    config["async"].on_deadline = str(schedule.on_deadline)
    config["async"].exact_lag = schedule.exact
    config["async"].on_failure, config["async"].max_skipped = "skip", 1.0
    config.run_dir = str(checkpoint)
    config.data.train_batch_size = batch_size
    config.actor_rollout_ref.rollout.n = schedule.samples
    config.trainer.resume_from_path = str(checkpoint)
    config.trainer.total_training_steps = schedule.steps
    config.trainer.save_freq = schedule.resume.save_freq if schedule.resume else -1
    return config


@contextlib.contextmanager
def _in_memory(queue: MemoryQueue, loaded: Saved | None) -> Iterator[None]:
    """Make `queue` TransferQueue and `loaded` the checkpoint in the block; samplers live, and nothing is printed."""

    def load(trainer: SimulatedTrainer) -> None:
        trainer.global_steps = loaded.step if loaded else 0

    with contextlib.ExitStack() as stack:
        for module in (verl_replay_buffer, trainer_base, agent_loop, replay_buffer, stored_tags, withheld_prompts):
            stack.enter_context(mock.patch.object(module, "tq", queue))
        stack.enter_context(mock.patch.object(trainer_base.PPOTrainer, "_load_checkpoint", load))
        stack.enter_context(mock.patch.object(lag_k, "SamplerKeeper", SamplersThatLive))
        for module in (replay_buffer, failed_prompts):
            stack.enter_context(mock.patch.object(module, "print_line", Silent()))
        stack.enter_context(mock.patch.object(lag_k, "console", Silent()))
        for name in ("SkipManager", "Tracking", "OmegaConf", "tqdm", "pprint"):  # names in verl's `fit`
            stack.enter_context(mock.patch.object(trainer_base, name, Silent()))
        yield


def _trained(
    schedule: Schedule,
    outcome: ScheduleOutcome,
    lag: float,
    batch_size: int,
    checkpoint: Path,
    loaded: Saved | None = None,
) -> SimulatedTrainer:
    """Run one process of the run, from its first step to its last or to the crash."""
    queue, rng = loaded.queue.copy() if loaded else MemoryQueue(), random.Random(schedule.seed + 2)
    config = _configured(schedule, lag, batch_size, checkpoint)
    samplers = SimulatedSamplers(schedule, SimulatedClock(), queue, config)
    samplers.submitted.update(loaded.submitted if loaded else ())
    data = SimulatedData(schedule.rows, loaded.position if loaded else 0)
    crash_step = schedule.resume.crash_step if schedule.resume and not loaded else None
    with _in_memory(queue, loaded):
        trainer = SimulatedTrainer(config, samplers, lambda: rng.expovariate(0.3), data, crash_step)
        trainer.init()
        outcome.withheld += len(queue.tags.get("withheld", {}))
        with contextlib.suppress(Crash):
            try:
                trainer.fit(samplers)
            except Deadlock:
                outcome.deadlocks += 1
    return trainer


def run(schedule: Schedule) -> ScheduleOutcome:
    """Run one schedule, from the first step to the last."""
    with tempfile.TemporaryDirectory() as checkpoint:
        return _run(schedule, Path(checkpoint))


def _run(schedule: Schedule, checkpoint: Path) -> ScheduleOutcome:
    outcome, resume = ScheduleOutcome(schedules=1), schedule.resume
    trainer = _trained(schedule, outcome, schedule.lag, schedule.batch_size, checkpoint)
    steps = [(schedule.lag, *step) for step in trainer.batches]
    if resume and not outcome.deadlocks:
        assert trainer.saved is not None
        outcome.resumed = 1
        steps = [step for step in steps if step[1] <= trainer.saved.step]
        trainer = _trained(schedule, outcome, resume.lag, resume.batch_size, checkpoint, trainer.saved)
        steps += [(resume.lag, *step) for step in trainer.batches]
    trained = Counter[str]()
    as_before = not resume or (resume.lag, resume.batch_size) == (schedule.lag, schedule.batch_size)
    for lag, step, batch, metrics in steps:
        lags = [step - 1 - tag["min_global_steps"] for tag in batch.tags]
        outcome.lag_violations += sum(of_one > math.ceil(lag) for of_one in lags)
        if schedule.exact and not schedule.failure and as_before:
            outcome.lag_violations += sum(of_one != min(step - 1, lag) for of_one in lags)
        trained.update({prompt_of(key) for key in batch.keys})
        outcome.reissued += int(metrics["vcpo/async/reissued_prompts"])
        outcome.retried += int(metrics["vcpo/async/retried_prompts"])
        outcome.skipped += int(metrics[SKIPPED])
        outcome.lost += len({prompt_of(key) for key in batch.keys}) * schedule.samples - len(batch.keys)
    record = checkpoint / SKIPPED_FILE
    skipped = Counter(line["uid"] for line in (read_lines(record) if record.is_file() else ()))
    outcome.lost += abs(outcome.skipped - skipped.total()) if not outcome.deadlocks else 0
    _count_prompts(outcome, trainer, trained, skipped, steps)
    return outcome


def _count_prompts(
    outcome: ScheduleOutcome,
    trainer: SimulatedTrainer,
    trained: Counter[str],
    skipped: Counter[str],
    steps: list[tuple[Any, ...]],
) -> None:
    queue, left = trainer._samplers.queue, trained + skipped
    known = queue.prompts()
    outcome.trained = trained.total()
    outcome.duplicated = sum(times - 1 for times in left.values()) + len(known & left.keys())
    outcome.duplicated += len(skipped.keys() & {prompt_of(key) for tags in queue.tags.values() for key in tags})
    outcome.lost += len(trainer._samplers.submitted - known - left.keys())
    if not outcome.deadlocks:
        outcome.lost += trainer.config.trainer.total_training_steps - len(steps)
