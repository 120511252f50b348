"""Samplers that start in a thread: when, and what verl's trainer gets of them."""

import asyncio
import contextlib
import gc
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from verl.trainer.ppo.v1 import trainer_separate_async
from verl.workers.rollout.llm_server import LLMServerManager

from verl_vcpo.loop.trainer import LagKTrainer
from verl_vcpo.samplers import early_start as module
from verl_vcpo.samplers.early_start import early_start

LIMIT_S = 20.0


class Samplers:
    """In place of `BalancerFirst`: `how` is what its start does."""

    how: Callable[[], Any]

    def __init__(self, config: dict[str, Any]) -> None:
        self.config, self.began, self.cancelled = config, threading.Event(), threading.Event()

    async def start(self) -> None:
        self.began.set()
        try:
            await type(self).how()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


@pytest.fixture(autouse=True)
def samplers(monkeypatch: pytest.MonkeyPatch) -> type[Samplers]:
    monkeypatch.setattr(module, "BalancerFirst", Samplers)
    monkeypatch.setattr(Samplers, "how", lambda: asyncio.sleep(0), raising=False)
    return Samplers


def created(config: Any) -> Any:
    """What verl's trainer does after its own start."""
    return trainer_separate_async.LLMServerManager.create(config=config, start_rank=0)


def thread_ends() -> None:
    deadline = time.monotonic() + LIMIT_S
    while module.THREAD in [thread.name for thread in threading.enumerate()]:
        assert time.monotonic() < deadline, "the thread goes on"
        time.sleep(0.01)


def test_they_start_once_the_trainer_has_its_devices() -> None:
    pools = {"trainer": SimpleNamespace(pgs=None)}
    trainer = SimpleNamespace(resource_pool_manager=SimpleNamespace(resource_pool_dict=pools))
    with early_start({"lag": 1}, lambda: LagKTrainer._has_devices(trainer)) as manager:
        assert not manager.began.wait(0.2)
        pools["trainer"].pgs = ["a placement group"]
        assert manager.began.wait(LIMIT_S), "before the trainer asks for them"
        assert created({}) is manager
    assert trainer_separate_async.LLMServerManager is LLMServerManager
    assert manager.config == {"lag": 1}


def test_they_start_at_the_latest_when_the_trainer_asks_for_them() -> None:
    with early_start({}, lambda: False) as manager:
        assert created({}) is manager
        assert manager.began.is_set()


def test_what_keeps_them_from_starting_is_raised_in_the_trainer(
    samplers: type[Samplers], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> None:
        raise ValueError("no such model")

    monkeypatch.setattr(samplers, "how", fail)
    with pytest.raises(ValueError, match="no such model"), early_start({}, lambda: True):
        created({})
    assert trainer_separate_async.LLMServerManager is LLMServerManager


def test_where_the_trainer_fails_they_stop(samplers: type[Samplers], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "how", lambda: asyncio.sleep(3600))
    with pytest.raises(KeyboardInterrupt), early_start({}, lambda: True) as manager:
        assert manager.began.wait(LIMIT_S)
        raise KeyboardInterrupt
    assert manager.cancelled.wait(LIMIT_S)
    thread_ends()


def test_a_start_that_never_ends_has_a_limit(samplers: type[Samplers], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "how", lambda: asyncio.sleep(3600))
    monkeypatch.setattr(module, "START_S", 0.05)
    late = pytest.raises(RuntimeError, match="the samplers were not up 0 s after the trainer was")
    with late, early_start({}, lambda: True) as manager:
        created({})
    assert manager.cancelled.wait(LIMIT_S)
    thread_ends()


async def _two_that_end_later() -> None:
    """As verl starts samplers: each needs a moment to end once it is cancelled, and one of them fails then."""

    async def sampler(fails: bool) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            with contextlib.suppress(asyncio.CancelledError):  # the end of the event loop cancels again
                await asyncio.sleep(0.01)
            if fails:
                raise ValueError("the sampler has gone")

    await asyncio.gather(sampler(False), sampler(True))


def test_a_start_that_is_given_up_says_nothing(
    samplers: type[Samplers], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(samplers, "how", _two_that_end_later)
    with pytest.raises(KeyboardInterrupt), early_start({}, lambda: True) as manager:
        assert manager.began.wait(LIMIT_S)
        raise KeyboardInterrupt
    thread_ends()
    del manager
    gc.collect()  # asyncio complains of a task or a future when that is destroyed
    assert caplog.text == ""
