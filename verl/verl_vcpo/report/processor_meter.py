"""Processor time of a run's processes on the driver's machine, by what the processes work for.

Of runs without GPUs, whose trainer, samplers and agent loops share the machine's cores. How fast each of them is beside
the others follows from what each takes of the cores (lab/planner).
"""

import contextlib
import os
from enum import StrEnum

import psutil

from verl_vcpo.common.run_id import RUN_ID_VARIABLE


class Role(StrEnum):
    """What a process works for. The value is the metric with the processor seconds of a step."""

    TRAINER = "vcpo/processor/trainer_s"
    """The driver, and the workers with the trainer's model."""
    ENGINES = "vcpo/processor/engines_s"
    """vLLM's processes."""
    SERVERS = "vcpo/processor/servers_s"
    """What passes requests to the engines, and weights."""
    AGENT_LOOPS = "vcpo/processor/agent_loops_s"
    """The workers that run agent loops."""
    OTHERS = "vcpo/processor/others_s"
    """Rewards, the data plane and Ray."""


_TITLES = {
    "WorkerDict": Role.TRAINER,
    "VLLM::": Role.ENGINES,
    "vLLMHttpServer": Role.SERVERS,
    "CheckpointEngineWorker": Role.SERVERS,
    "AgentLoopWorker": Role.AGENT_LOOPS,
}
CORES = "vcpo/processor/cores"
"""The metric with the number of cores that the run may use."""


def role_of(process: psutil.Process) -> Role | None:
    """What a process of this process's run works for; None: it is of no run, or of another."""
    if process.pid == os.getpid():
        return Role.TRAINER
    try:
        of_run = process.environ().get(RUN_ID_VARIABLE)
    except psutil.AccessDenied:  # another user's
        return None
    if of_run is None or of_run != os.environ.get(RUN_ID_VARIABLE):
        return None
    title = " ".join(process.cmdline())
    return next((role for text, role in _TITLES.items() if text in title), Role.OTHERS)


class ProcessorMeter:
    """Adds up the seconds between two calls of `take`, of processes that are there at both."""

    def __init__(self) -> None:
        self._roles: dict[psutil.Process, Role | None] = {}
        self._seconds: dict[psutil.Process, float] = {}

    def take(self) -> dict[str, float]:
        """`vcpo/processor/*` since the last call; nothing at the first one."""
        spent, seconds = dict.fromkeys(Role, 0.0), {}
        known, self._roles = self._roles, {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # a process that has ended since
                role = self._roles[process] = known[process] if process in known else role_of(process)
                if role:
                    used = process.cpu_times()
                    seconds[process] = used.user + used.system
                    spent[role] += seconds[process] - self._seconds.get(process, seconds[process])
        first, self._seconds = not self._seconds, seconds
        return {} if first else {role.value: spent[role] for role in Role} | {CORES: len(os.sched_getaffinity(0))}
