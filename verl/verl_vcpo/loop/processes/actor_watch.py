"""A watch that ends the run when a Ray actor dies that cannot be replaced: the trainer would wait for it for ever.

Samplers are replaced (samplers/keeper.py). The death of any other actor ends the run with one line that names the
actor. `trainer.resume_mode=auto` continues a run from the last checkpoint.
"""

import os
import signal
import threading
from typing import Any

import ray

_INTERVAL_S = 1.0
# The ends of class names of actors that may die: the Ray actors of a sampler, and the cleaner of a node.
_REPLACEABLE = ("vLLMHttpServer", "CheckpointEngineWorker", "NodeCleaner")


class ActorWatch:
    """A thread that watches the run's Ray actors from `start` to `stop`. `reason` names the actor that died."""

    def __init__(self) -> None:
        self.reason: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="actor-watch", daemon=True)

    def start(self) -> None:
        """Watch the actors that are alive now."""
        self._alive = {actor_id for actor_id, actor in _actors().items() if actor["State"] == "ALIVE"}
        self._thread.start()

    def stop(self) -> None:
        """Stop watching: at the end of a run its actors end."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(_INTERVAL_S):
            try:
                actors = _actors()
            except Exception:  # Ray's control process may be too busy to answer in time
                continue
            for actor_id in self._alive:
                actor = actors.get(actor_id)
                if actor is None or actor["State"] != "DEAD" or actor["ActorClassName"].endswith(_REPLACEABLE):
                    continue
                if not self._stop.is_set():
                    self.reason = f"{actor['ActorClassName']} (process {actor['Pid']}) died"
                    os.kill(os.getpid(), signal.SIGTERM)  # the main thread may be in a call to the dead actor
                return


def _actors() -> dict[str, dict[str, Any]]:
    """Return the Ray actors of this run; other runs on the cluster have their own, which end with those runs."""
    return ray._private.state.actors(job_id=ray.JobID.from_hex(ray.get_runtime_context().get_job_id()))
