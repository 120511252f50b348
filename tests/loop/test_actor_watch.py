"""The death of a Ray actor is seen, also after looks at Ray's actors that failed."""

import time
from typing import Any

import pytest

from verl_vcpo.loop.processes import actor_watch
from verl_vcpo.loop.processes.actor_watch import ActorWatch

LIMIT_S = 20.0


def test_it_goes_on_after_failed_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0
    killed: list[int] = []

    def actors() -> dict[str, dict[str, Any]]:
        nonlocal looks
        looks += 1
        if 1 < looks <= 5:
            raise RuntimeError("GCS: rpc error, deadline exceeded")
        return {"a": {"State": "ALIVE" if looks < 8 else "DEAD", "ActorClassName": "LagKAgentLoopWorker", "Pid": 7}}

    monkeypatch.setattr(actor_watch, "_actors", actors)
    monkeypatch.setattr(actor_watch, "_INTERVAL_S", 0.001)
    monkeypatch.setattr(actor_watch.os, "kill", lambda pid, signal: killed.append(pid))
    watch = ActorWatch()
    watch.start()
    deadline = time.monotonic() + LIMIT_S
    while not killed and time.monotonic() < deadline:
        time.sleep(0.01)
    watch.stop()
    assert watch.reason == "LagKAgentLoopWorker (process 7) died"
