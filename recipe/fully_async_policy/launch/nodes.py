"""A run leaves nothing behind on the other nodes of its cluster either.

processes.py cleans up on the node of the driver. On every other node the run has a `NodeCleaner`, a Ray actor with a
reaper: a process that outlives the actor and cleans up the node. Ray ends the actor when the driver ends or is killed,
and when the raylet of the node dies; the actor ends itself when the node has lost the network. That wakes the reaper.
"""

import contextlib
import os
import socket
import threading
import time
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from recipe.fully_async_policy.launch.processes import RunOnMachine, dismiss, start_reaper
from verl_vcpo.common.run_folder import run_folder

_CLEAN_UP_S = 60.0
_LOOK_S, _CUT_OFF_S = 10.0, 120.0  # Ray takes a node that does not answer for dead after about a minute


class NodeCleaner:
    """Cleans up the node that it is on. ActorWatch knows it by its name."""

    def __init__(self, run_id: str) -> None:
        # Ray kills the children of a worker process that ends.
        folder = run_folder(run_id)
        self._run, self._reaper = RunOnMachine(run_id, folder), start_reaper(run_id, folder, detached=True)
        threading.Thread(target=end_when_cut_off, args=(ray.get_runtime_context().gcs_address,), daemon=True).start()

    def observe(self) -> None:
        """Note the shared memory of the run's processes on this node."""
        self._run.observe()

    def clean_up(self) -> None:
        """End every other process of the run on this node, then remove the run's shared memory and sockets."""
        self._run.clean_up()
        dismiss(self._reaper)


def end_when_cut_off(head: str, look_s: float = _LOOK_S, cut_off_s: float = _CUT_OFF_S) -> None:
    """End this process once Ray's head, at the address `head`, has not been reached for `cut_off_s`.

    The raylet of a node that is cut off is up for longer than that, and with it the processes that it started.
    """
    host, _, port = head.rpartition(":")
    reached = time.monotonic()
    while time.monotonic() - reached < cut_off_s:
        time.sleep(look_s)
        with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), timeout=look_s):
            reached = time.monotonic()
    os._exit(1)


class RunOnNodes:
    """A run on all nodes of its cluster. Ray is connected.

    Args:
        here: the run on the driver's node.
    """

    def __init__(self, here: RunOnMachine) -> None:
        self._here = here
        self._own_node = ray.get_runtime_context().get_node_id()
        self._cleaners: dict[str, Any] = {}
        self._start_cleaners()

    def observe(self) -> None:
        """Note the run's shared memory on every node, so that it can be removed after a crash."""
        self._here.observe()
        self._start_cleaners()
        for cleaner in self._cleaners.values():
            cleaner.observe.remote()

    def clean_up_elsewhere(self) -> None:
        """End the run's processes, and remove what they leave, on the nodes other than the driver's."""
        answers = {node: cleaner.clean_up.remote() for node, cleaner in self._cleaners.items()}
        if answers:
            ray.wait(list(answers.values()), num_returns=len(answers), timeout=_CLEAN_UP_S)
        for node, answer in answers.items():
            try:
                ray.get(answer, timeout=0)
            except (ray.exceptions.RayError, TimeoutError) as error:
                print(f"node {node} does not answer ({type(error).__name__}): what the run has there ends by itself")

    def _start_cleaners(self) -> None:
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        for node in alive - self._cleaners.keys() - {self._own_node}:
            on_node = NodeAffinitySchedulingStrategy(node, soft=False)
            self._cleaners[node] = _CLEANER.options(scheduling_strategy=on_node).remote(self._here.run_id)


_CLEANER = ray.remote(num_cpus=0)(NodeCleaner)
