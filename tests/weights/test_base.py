"""A weight update ends in time, whatever hangs, and the error names what did not finish.

verl's manager and worker groups, the manager of this package on top of them, and Ray are the real ones; trainers and
samplers are Ray actors that do nothing, until one of them is told to hang or to die in one of its methods.
"""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from verl.checkpoint_engine.base import CheckpointEngineRegistry, _worker_cls
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.workers.config import CheckpointEngineConfig
from verl.workers.rollout.replica import RolloutReplica

from recipe.fully_async_policy import main
from recipe.fully_async_policy.launch import ray_access
from verl_vcpo.cpu.weight_file import WeightFileCheckpointEngine
from verl_vcpo.weights import manager as bounded
from verl_vcpo.weights import nccl as nccl_checkpoint_engine
from verl_vcpo.weights.manager import BoundedCheckpointEngineManager, WeightUpdateTimeout

pytestmark = pytest.mark.slow

BACKEND, LIMIT_S = "actors that do nothing", 3.0


def _actor_class() -> Any:
    """Made in a function: Ray then sends the class to its workers, which need not import this module."""

    class Idle:
        """A worker of the trainer, or a worker and the server of a sampler."""

        fault = ("", "")

        def _pass(self, method: str) -> dict[str, Any]:
            import os
            import signal
            import time

            if self.fault == ("dies", method):
                os.kill(os.getpid(), signal.SIGKILL)
            end = time.monotonic() + 60
            while self.fault in (("hangs", method), ("engine died", method)) and time.monotonic() < end:
                time.sleep(0.05)
            return {}

        def set_fault(self, what: str = "", method: str = "") -> None:
            self.fault = (what, method)

        def execute_checkpoint_engine(self, method: str, **kwargs: Any) -> dict[str, Any]:
            return self._pass(method)

        def update_weights(self, global_steps: int, mode: str = "") -> dict[str, Any]:
            return self._pass("update_weights")

        def abort_all_requests(self, reject_request: bool = False) -> dict[str, Any]:
            return self._pass("abort_all_requests")

        def release_kv_cache(self) -> dict[str, Any]:
            return self._pass("release_kv_cache")

        def resume_kv_cache(self) -> dict[str, Any]:
            return self._pass("resume_kv_cache")

        def resume_generation(self) -> dict[str, Any]:
            return self._pass("resume_generation")

        def probe(self) -> None:
            if self.fault[0] == "engine died":
                raise RuntimeError("the engine is dead")

        def is_given_up(self, key: str) -> bool:
            from ray.experimental import internal_kv

            return internal_kv._internal_kv_exists(key)

    return ray.remote(num_cpus=0, max_concurrency=8)(Idle)


class Replica(RolloutReplica):
    """A sampler of one process, with verl's methods to stop it and to let it go on."""

    def __init__(self, rank: int, actor: Any) -> None:
        self.replica_rank, self.workers, self.servers = rank, [actor], [actor]

    async def launch_servers(self) -> None:
        """It has one."""


class Engine(WeightFileCheckpointEngine):
    """Only its topology is asked for; `given_up` counts the updates that failed."""

    given_up = 0

    @classmethod
    def give_up(cls) -> None:
        cls.given_up += 1


@pytest.fixture(scope="module")
def actors() -> Iterator[list[Any]]:
    """Two workers of the trainer, then two samplers."""
    main.prepare_environment(["hardware=cpu"])
    with ray_access.started({"num_cpus": 4, "include_dashboard": False, "log_to_driver": False}):
        started = [_actor_class().remote() for _ in range(4)]
        ray.get([actor.set_fault.remote() for actor in started], timeout=120)
        yield started


@pytest.fixture
def manager(actors: list[Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[BoundedCheckpointEngineManager]:
    monkeypatch.setattr(CheckpointEngineRegistry, "_registry", {BACKEND: Engine})
    monkeypatch.setattr(Engine, "given_up", 0)
    trainers = RayWorkerGroup(worker_handles=actors[:2], ray_cls_with_init=RayClassWithInitArgs(cls=_worker_cls))
    replicas = [Replica(rank, actor) for rank, actor in enumerate(actors[2:])]
    yield BoundedCheckpointEngineManager(CheckpointEngineConfig(backend=BACKEND), trainers, replicas, LIMIT_S)
    ray.get([actor.set_fault.remote() for actor in actors], timeout=60)


def _fault(actor: Any, what: str, method: str) -> None:
    ray.get(actor.set_fault.remote(what, method), timeout=60)


def test_an_update_in_which_nothing_hangs(manager: BoundedCheckpointEngineManager) -> None:
    for version in range(3):
        assert manager.update_weights(version) == {}
    assert Engine.given_up == 0


@pytest.mark.parametrize(
    "method",
    [
        *("abort_all_requests", "release_kv_cache", "prepare", "init_process_group", "update_weights", "finalize"),
        *("resume_kv_cache", "resume_generation"),
    ],
)
def test_a_sampler_that_hangs(manager: BoundedCheckpointEngineManager, actors: list[Any], method: str) -> None:
    _fault(actors[3], "hangs", method)
    start, threads = time.monotonic(), set(threading.enumerate())
    with pytest.raises(WeightUpdateTimeout) as error:
        manager.update_weights(7)
    assert LIMIT_S <= time.monotonic() - start < LIMIT_S + 10
    assert not isinstance(error.value, ray.exceptions.RayError), "the trainer replaces samplers after one of these"
    line = str(error.value)
    assert line.startswith("async.weight_update_timeout_s=3: in the weight update to version 7 sampler 1 ")
    assert "sampler 0" not in line and "trainer" not in line and "\n" not in line
    assert not set(threading.enumerate()) - threads, "a thread is left, for which Python would wait at its end"


def test_a_trainer_that_hangs(manager: BoundedCheckpointEngineManager, actors: list[Any]) -> None:
    _fault(actors[1], "hangs", "update_weights")
    with pytest.raises(WeightUpdateTimeout, match="in the weight update to version 7 trainer rank 1 did not finish"):
        manager.update_weights(7)


def test_a_death_is_told_at_once_though_others_hang(manager: BoundedCheckpointEngineManager, actors: list[Any]) -> None:
    """As in a broadcast with NCCL: the sender waits for the dead sampler. The next update is another one's."""
    manager._timeout_s = 30.0
    _fault(actors[0], "hangs", "update_weights")
    _fault(actors[3], "dies", "update_weights")
    start = time.monotonic()
    with pytest.raises(ray.exceptions.RayActorError):
        manager.update_weights(7)
    assert time.monotonic() - start < 20
    assert Engine.given_up == 1
    _fault(actors[0], "", "")
    actors[3] = _actor_class().remote()
    manager.replicas = [manager.replicas[0], Replica(1, actors[3])]
    manager.update_weights(7)


def test_a_worker_that_waits_for_a_dead_engine(
    manager: BoundedCheckpointEngineManager, actors: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As verl's worker of a sampler, whose weights nobody takes any more."""
    monkeypatch.setattr(bounded, "_PROBE_S", 0.2)
    manager._timeout_s = 30.0
    _fault(actors[3], "engine died", "update_weights")
    start = time.monotonic()
    with pytest.raises(ray.exceptions.RayError, match="the engine is dead"):
        manager.update_weights(7)
    assert time.monotonic() - start < 20


def test_a_slow_update_with_engines_that_live(
    manager: BoundedCheckpointEngineManager, actors: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded, "_PROBE_S", 0.05)
    manager._timeout_s = 30.0
    _fault(actors[3], "hangs", "update_weights")
    threading.Timer(1.0, lambda: actors[3].set_fault.remote()).start()
    assert manager.update_weights(7) == {}


def test_every_process_sees_that_an_update_was_given_up(actors: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = nccl_checkpoint_engine.RegroupingNCCLCheckpointEngine
    monkeypatch.setattr(engine, "_members_of_latest", "these members")
    keys = [nccl_checkpoint_engine._GIVEN_UP + members for members in ("these members", "other members")]

    def seen() -> list[bool]:
        return ray.get([actors[0].is_given_up.remote(key) for key in keys], timeout=60)

    assert seen() == [False, False]
    engine.give_up()
    assert seen() == [True, False]
