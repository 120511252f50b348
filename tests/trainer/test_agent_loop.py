"""Agent loops begin as the samplers have room for them, those with the earliest deadline first."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from ray.exceptions import RayActorError
from tensordict import TensorDict
from verl.trainer.ppo.v1 import agent_loop_tq

from verl_vcpo.trainer.ppo.v1 import agent_loop
from verl_vcpo.trainer.ppo.v1.agent_loop import LagKAgentLoopManager, LagKAgentLoopWorker
from verl_vcpo.trainer.ppo.v1.data_rows import row_number
from verl_vcpo.trainer.ppo.v1.trainer_lag_k import LagKTrainer
from verl_vcpo.workers.rollout.admission import AdmissionGate

VERLS_WORKER = LagKAgentLoopWorker.__mro__[1]
"""verl's worker, which the tests' workers extend."""


def worker_of(places: int, samples: int = 1) -> LagKAgentLoopWorker:
    """A worker that has `places` for agent loops, and runs `samples` of them for a prompt of training."""
    worker = object.__new__(LagKAgentLoopWorker)
    rollout = SimpleNamespace(n=samples, val_kwargs=SimpleNamespace(n=1))
    worker.config = DictConfig({"async": {"deterministic": False}}, flags={"allow_objects": True})
    worker.config.actor_rollout_ref = {"rollout": rollout}
    worker._loops, worker._task_of = AdmissionGate(places), {}
    return worker


async def run_prompts(worker: LagKAgentLoopWorker, submitted: list[tuple[bool, int]]) -> None:
    """Run a prompt for each (validation or not, step)."""
    trajectories = [{"validate": validate, "step": step, "sample_index": 0} for validate, step in submitted]
    await asyncio.gather(*[worker._run_prompt({"uid": str(i)}, {}, t) for i, t in enumerate(trajectories)])


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The statuses that are written to TransferQueue, in their order."""
    statuses: list[str] = []

    async def put(key: str, partition_id: str, tag: dict[str, Any]) -> None:
        statuses.append(tag["status"])

    monkeypatch.setattr(agent_loop_tq.tq, "async_kv_put", put)
    return statuses


@pytest.mark.usefixtures("stored")
def test_as_many_at_a_time_as_the_gate_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[tuple[bool, int]] = []
    at_a_time: list[int] = []
    running = 0

    async def respond(self: Any, sampling_params: Any, trajectory: dict[str, Any], **_: Any) -> None:
        nonlocal running
        running += 1
        at_a_time.append(running)
        begun.append((trajectory["validate"], trajectory["step"]))
        await asyncio.sleep(0)
        running -= 1

    monkeypatch.setattr(VERLS_WORKER, "_run_agent_loop", respond)
    asyncio.run(run_prompts(worker_of(2), [(False, step) for step in (5, 4, 3, 2, 1)] + [(True, 6)]))
    assert max(at_a_time) == 2
    first_come, waited = begun[:2], begun[2:]
    assert first_come == [(False, 5), (False, 4)], "there was room for them"
    assert waited == [(True, 6), (False, 1), (False, 2), (False, 3)], "a validation, then by step"


def test_a_prompt_waits_as_one_and_gives_its_places_back_one_by_one(
    monkeypatch: pytest.MonkeyPatch, stored: list[str]
) -> None:
    ends = [asyncio.Event() for _ in range(8)]
    begun: list[int] = []

    async def respond(self: Any, sampling_params: Any, trajectory: dict[str, Any], session_id: int, **_: Any) -> None:
        begun.append(session_id)
        await ends[len(begun) - 1].wait()

    monkeypatch.setattr(VERLS_WORKER, "_run_agent_loop", respond)
    worker = worker_of(3, samples=4)

    async def settled() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def scenario() -> None:
        both = asyncio.ensure_future(run_prompts(worker, [(False, 1), (False, 2)]))
        await settled()
        assert begun == [0, 1, 2, 3], "a place was free: the prompt may take one more than there are"
        assert stored == ["running"] and len(asyncio.all_tasks()) == 8, "the other waits: this task, both, 2 + 4"
        ends[0].set()
        await settled()
        assert len(begun) == 4, "all places are taken"
        ends[1].set()
        await settled()
        assert begun == [0, 1, 2, 3, 0, 1, 2, 3]
        for end in ends:
            end.set()
        await both

    asyncio.run(scenario())
    assert worker._loops._free == 3 and stored == ["running", "running", "finished", "finished"]


def test_a_prompt_that_is_cancelled_gives_its_places_back(monkeypatch: pytest.MonkeyPatch, stored: list[str]) -> None:
    async def respond(self: Any, sampling_params: Any, trajectory: dict[str, Any], **_: Any) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(VERLS_WORKER, "_run_agent_loop", respond)
    worker = worker_of(2, samples=2)

    async def scenario() -> None:
        running = [asyncio.ensure_future(run_prompts(worker, [(False, step)])) for step in (1, 2)]
        await asyncio.sleep(0.01)
        running[1].cancel()  # it waits at the gate
        running[0].cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.sleep(0)

    asyncio.run(scenario())
    assert worker._loops._free == 2 and stored == ["running"]


def test_a_row_of_the_data_may_have_a_name() -> None:
    assert [row_number(index) for index in (7, "7", np.int64(7))] == [7] * 3
    assert row_number("3f1a15a7") == row_number("3f1a15a7") != row_number("3f1a15a8")
    assert isinstance(row_number(None), int)


def test_no_other_loop_begins_while_prompts_are_cancelled() -> None:
    log: list[str] = []
    worker = object.__new__(LagKAgentLoopWorker)
    worker._loops, worker._task_of = AdmissionGate(2), {}

    async def loop(name: str) -> None:
        async with worker._loops.admitted(()):
            log.append(f"{name} begins")
            await asyncio.sleep(3600)

    async def scenario() -> None:
        worker._task_of = {name: asyncio.create_task(loop(name)) for name in ("late", "late too", "waits")}
        await asyncio.sleep(0)
        await worker.cancel(["late", "late too"])
        await asyncio.sleep(0)
        log.append("cancelled, and the reply is sent")
        await asyncio.sleep(2 * agent_loop._REPLY_S)
        await worker.cancel(["waits"])
        await asyncio.sleep(2 * agent_loop._REPLY_S)
        assert worker._loops._free == 2, "every place is given back"

    asyncio.run(scenario())
    assert log == ["late begins", "late too begins", "cancelled, and the reply is sent", "waits begins"]


class BusyWorker:
    """Of a Ray actor what the manager calls: calls are answered in an order and at a time that the test chooses."""

    def __init__(self, log: list[str]) -> None:
        self.generate_sequences = SimpleNamespace(remote=lambda chunk: log.append("sent") or "taken")
        self.cancel = SimpleNamespace(remote=lambda uids: log.append("cancel") or "cancelled")


def manager_of_busy_workers(log: list[str], monkeypatch: pytest.MonkeyPatch, taken: list[str]) -> LagKAgentLoopManager:
    """`taken`: what `ray.wait` finds done at once. `ray.get` logs what was waited for."""
    manager = object.__new__(LagKAgentLoopManager)
    manager.agent_loop_workers, manager._handing_over = [BusyWorker(log), BusyWorker(log)], []
    manager._row_in_validation = {}
    monkeypatch.setattr(agent_loop.ray, "wait", lambda refs, **_: (taken, [ref for ref in refs if ref not in taken]))
    monkeypatch.setattr(agent_loop.ray, "get", lambda refs, timeout=None: log.extend(f"got {ref}" for ref in refs))
    return manager


def test_prompts_are_submitted_without_a_wait_for_busy_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    manager = manager_of_busy_workers(log, monkeypatch, taken=[])
    prompts = TensorDict({"uid": torch.arange(4)}, batch_size=4)
    manager.generate_sequences(prompts)
    manager.generate_sequences(prompts)
    assert log == ["sent"] * 4


def test_a_prompt_is_with_its_worker_before_it_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []
    manager = manager_of_busy_workers(log, monkeypatch, taken=[])
    manager.generate_sequences(TensorDict({"uid": torch.arange(4)}, batch_size=4))
    manager.cancel(["0"])
    assert log == ["sent", "sent", "got taken", "got taken", "cancel", "cancel", "got cancelled", "got cancelled"]


def test_what_keeps_a_worker_from_taking_prompts_is_raised_while_their_samples_are_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manager = manager_of_busy_workers([], monkeypatch, taken=["taken"])

    def died(refs: list[str], timeout: float | None = None) -> None:
        if refs:
            raise RayActorError

    monkeypatch.setattr(agent_loop.ray, "get", died)
    manager.raise_errors()
    manager.generate_sequences(TensorDict({"uid": torch.arange(4)}, batch_size=4))
    trainer = object.__new__(LagKTrainer)
    trainer.agent_loop_manager = manager
    with pytest.raises(RayActorError):
        trainer._sleep(0.0)
