"""Agent loops begin as the samplers have room for them, those with the earliest deadline first."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from verl_vcpo.trainer.ppo.v1.agent_loop import LagKAgentLoopWorker
from verl_vcpo.workers.rollout.admission import AdmissionGate


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

    monkeypatch.setattr(LagKAgentLoopWorker.__mro__[1], "_run_agent_loop", respond)
    worker = object.__new__(LagKAgentLoopWorker)
    worker.config = {"async": SimpleNamespace(deterministic=False)}
    worker._loops = AdmissionGate(2)

    async def scenario() -> None:
        steps = [(False, step) for step in (5, 4, 3, 2, 1)] + [(True, 6)]
        trajectories = [{"validate": validate, "step": step, "sample_index": 0} for validate, step in steps]
        await asyncio.gather(*[worker._run_agent_loop({}, t, uid="prompt") for t in trajectories])

    asyncio.run(scenario())
    assert max(at_a_time) == 2
    first_come, waited = begun[:2], begun[2:]
    assert first_come == [(False, 5), (False, 4)], "there was room for them"
    assert waited == [(True, 6), (False, 1), (False, 2), (False, 3)], "a validation, then by step"
