"""Samplers die before, during and after a weight update, and the next update reaches their replacements.

verl's `NCCLCheckpointEngine`, the engine of this package on top of it, Ray's `ray.util.collective` and ZeroMQ are the
real ones, each engine in an operating-system process, which dies by SIGKILL. Stand-ins, for this test only: gloo for
NCCL (gloo_in_place_of_nccl.py says how their difference is modelled), numpy for cupy, CPU memory for "cuda", files for
Ray's key-value store. Nothing here has run on a GPU.
"""

import importlib
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from verl import checkpoint_engine
from verl.checkpoint_engine.base import CheckpointEngineRegistry

from tests.weights.update_processes import UPSTREAM, Died, Driver

pytestmark = pytest.mark.slow

OURS = "verl_vcpo.weights.nccl"
FIRST, LAST, SEVERAL, ALL = (0,), (2,), (0, 2), (0, 1, 2)
DEATHS = pytest.mark.parametrize("dead", [FIRST, LAST, SEVERAL, ALL], ids=["first", "last", "several", "all"])
# Each kind of death, with one sender or with relays; the other pairs are nightly.
PAIRS = pytest.mark.parametrize(
    ("dead", "multi_sender"),
    [
        pytest.param(dead, relays, marks=[] if relays == (dead in (LAST, SEVERAL)) else [pytest.mark.nightly])
        for dead in (FIRST, LAST, SEVERAL, ALL)
        for relays in (False, True)
    ],
    ids=str,
)
SENDERS = pytest.mark.parametrize("multi_sender", [False, True], ids=["one sender", "relays"])


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Our engine class, as it is where cupy is installed."""
    for name in (UPSTREAM, OURS):  # imported anew here, and after the test as it was before
        package, _, short = name.rpartition(".")
        monkeypatch.setattr(importlib.import_module(package), short, None, raising=False)
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    monkeypatch.setitem(sys.modules, "cupy", np)
    monkeypatch.setattr(CheckpointEngineRegistry, "_registry", dict(CheckpointEngineRegistry._registry))
    verls = importlib.import_module(UPSTREAM).NCCLCheckpointEngine
    monkeypatch.setattr(checkpoint_engine, "NCCLCheckpointEngine", verls)
    module = importlib.import_module(OURS)
    store = SimpleNamespace(
        _internal_kv_put=lambda key, value: (tmp_path / key).write_bytes(value),
        _internal_kv_exists=lambda key: (tmp_path / key).exists(),
    )
    monkeypatch.setattr(module, "internal_kv", store)
    monkeypatch.setattr(module, "_POLL_S", 0.05)
    assert CheckpointEngineRegistry.get("nccl") is module.RegroupingNCCLCheckpointEngine
    return SimpleNamespace(ours=module.RegroupingNCCLCheckpointEngine)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    """Starts the processes of a run, and ends them after the test."""
    drivers = []

    def start(engine: Any, **settings: Any) -> Driver:
        drivers.append(Driver(engine, tmp_path, **settings))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.end()


@SENDERS
def test_a_group_whose_members_stay_is_formed_once(engines: SimpleNamespace, run: Any, multi_sender: bool) -> None:
    driver = run(engines.ours, multi_sender=multi_sender)
    for version in range(4):
        driver.update(version)
    assert driver.each("formed") == [1, int(multi_sender), 1, 1, 1]


@PAIRS
def test_death_before_an_update(engines: SimpleNamespace, run: Any, dead: tuple[int, ...], multi_sender: bool) -> None:
    driver = run(engines.ours, multi_sender=multi_sender)
    driver.update(1)
    for rank in dead:
        driver.samplers[rank].kill()
    driver.replace(dead)
    driver.update(2)
    driver.update(3)
    kept = 3 - len(dead)
    assert driver.each("formed") == [2, 2 * multi_sender, *[2] * kept, *[1] * len(dead)]


@PAIRS
def test_death_during_an_update(engines: SimpleNamespace, run: Any, dead: tuple[int, ...], multi_sender: bool) -> None:
    driver = run(engines.ours, multi_sender=multi_sender)
    driver.update(1)
    with pytest.raises(Died):
        driver.update(2, dying=dead)
    engines.ours.give_up()
    driver.replace(dead)
    driver.update(2)
    driver.update(3)


@DEATHS
def test_death_after_the_transfer(engines: SimpleNamespace, run: Any, dead: tuple[int, ...]) -> None:
    driver = run(engines.ours)
    driver.prepare_update()
    driver.transfer(1)
    for rank in dead:
        driver.samplers[rank].kill()
    with pytest.raises(Died):
        driver.each("finalize")
    engines.ours.give_up()
    driver.replace(dead)
    driver.update(1)
    driver.update(2)


@SENDERS
def test_what_a_death_leaves_is_freed(engines: SimpleNamespace, run: Any, multi_sender: bool) -> None:
    """Catches a ZeroMQ context that is collected with its socket: its process stays in the collection for ever."""
    driver = run(engines.ours, multi_sender=multi_sender)
    driver.update(1)
    with pytest.raises(Died):
        driver.update(2, dying=LAST)
    engines.ours.give_up()
    driver.replace(LAST)
    driver.update(2)
    driver.each("collect")
    driver.update(3)


@pytest.mark.parametrize("held", ["before", "after"])
def test_a_thread_that_is_late(engines: SimpleNamespace, run: Any, held: str) -> None:
    """A broadcast of the failed transfer, or what follows it, comes when the next group is there already."""
    driver = run(engines.ours, multi_sender=False)
    driver.update(1)
    driver.prepare_update()
    with pytest.raises(Died):
        driver.transfer(2, held=held)
    engines.ours.give_up()
    driver.replace(LAST)
    driver.update(2)
    driver.update(3)


def test_a_subscription_that_is_late(engines: SimpleNamespace, run: Any) -> None:
    """Catches weights that are sent before: the sampler would wait for ever for the first of them."""
    driver = run(engines.ours)
    driver.each("subscribe_late", 0.5)
    driver.update(1)
    driver.update(2)


def test_a_subscription_that_never_comes(engines: SimpleNamespace, run: Any) -> None:
    driver = run(engines.ours)
    driver.each("subscribe_late", 1000.0)
    with ThreadPoolExecutor(1) as pool:
        update = pool.submit(driver.prepare_update)
        while not engines.ours._members_of_latest and not update.done():
            time.sleep(0.01)
        engines.ours.give_up()
        with pytest.raises(RuntimeError, match="trainer 0: RuntimeError: another process of this weight update died"):
            update.result()
