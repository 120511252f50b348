"""Ends the run when a process dies that nothing can replace: without it the trainer would wait for ever.

Samplers are replaced (workers/rollout/sampler_keeper.py). Everything else ends the run with one line that names what
died; training goes on from the last checkpoint.
"""

import os
import signal
import threading
from typing import Any

import ray

_INTERVAL_S = 1.0
# Ray actors that make up a sampler, by the end of their class's name.
_REPLACEABLE = ("vLLMHttpServer", "CheckpointEngineWorker")


class ActorWatch:
    """Watches the run's Ray actors from `start` to `stop`, in a thread. `reason` says what died."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="actor-watch", daemon=True)

    def start(self) -> None:
        """Watch the actors that are alive now."""
        self._alive = {actor_id for actor_id, actor in _actors().items() if actor["State"] == "ALIVE"}
        self._thread.start()

    def stop(self) -> None:
        """Look away: the run is over, and its actors may end."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            actors = _actors()
            for actor_id in self._alive:
                actor = actors.get(actor_id)
                if actor is None or actor["State"] != "DEAD" or actor["ActorClassName"].endswith(_REPLACEABLE):
                    continue
                if not self._stop.is_set():
                    self.reason = f"{actor['ActorClassName']} (process {actor['Pid']}) died"
                    os.kill(os.getpid(), signal.SIGTERM)  # the main thread may be waiting for it
                return


def _actors() -> dict[str, dict[str, Any]]:
    return ray._private.state.actors()
