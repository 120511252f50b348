"""The faults of an hour of chaos: actions on a run, each with the expected end.

docs/guide/troubleshooting.md's table "When something fails" has the expectations.
"""

import contextlib
import os
import random
import re
import signal
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

KINDS_OF_PROCESSES = {
    "trainer worker": r"^ray::WorkerDict",
    "vLLM engine": r"^VLLM::EngineCore",
    "vLLM server": r"^ray::CPUvLLMHttpServer",
    "receiver of weights": r"^ray::\w*CheckpointEngineWorker",
    "agent-loop worker": r"^ray::LagKAgentLoopWorker",
    "reward process": r" -m verl_vcpo\.user_code\.killable_process",
    "TransferQueue controller": r"^ray::TransferQueueController",
    "TransferQueue storage": r"^ray::SimpleStorageUnit",
    "load balancer": r"^ray::IdleTimeLoadBalancer",
    "raylet": r"/raylet/raylet ",
    "gcs": r"/gcs/gcs_server ",
    "agent of Ray": r"^ray::(DashboardAgent|RuntimeEnvAgent)",
    "log monitor of Ray": r"/ray/_private/log_monitor\.py",
    "dashboard of Ray": r"/ray/dashboard/dashboard\.py",
}
LIMITS = {
    "async.sampler_timeout_s": 60,
    "async.weight_update_timeout_s": 90,
    "async.reward_timeout_s": 30,
    "async.tool_timeout_s": 60,
    "async.trajectory_timeout_s": 240,
}
"""The settings of waits, far below their defaults; a machine with other work must still keep them."""
_SHORT_S = (3.0, 20.0)
_LONG_S = 75.0
_FIND_S = 120.0


class Target(Protocol):
    """The parts of a run that a fault can reach."""

    driver: psutil.Popen
    disk: Path | None
    clock: Path
    marks: Path
    run_dir: Path
    sandbox: Any

    def find(self, kind: str, rng: random.Random) -> psutil.Process: ...
    def run_id(self) -> str: ...
    def alive(self) -> bool: ...


class NotPossible(RuntimeError):
    """The error of a fault that cannot be tried here, with the reason."""


@dataclass(frozen=True)
class Fault:
    """One action on a run.

    does: the action; returns its victim, in words.
    code: the launcher's exit code if the run ends; None: any but 0.
    says: a text in the launcher's output after the fault.
    """

    name: str
    does: Callable[[Target, random.Random], str]
    ends: bool = False
    code: int | None = None
    says: str = ""


def kill(kind: str) -> Callable[[Target, random.Random], str]:
    def does(run: Target, rng: random.Random) -> str:
        process = run.find(kind, rng)
        process.kill()
        return f"process {process.pid}"

    return does


def stop(kind: str, seconds: float | None = None) -> Callable[[Target, random.Random], str]:
    """Return a fault: SIGSTOP, and SIGCONT after so many seconds; None: 3 to 20, by chance."""

    def does(run: Target, rng: random.Random) -> str:
        took = seconds or rng.uniform(*_SHORT_S)
        process = run.driver if kind == "driver" else run.find(kind, rng)
        return _stopped(process, took)

    return does


def _stopped(process: Any, seconds: float) -> str:
    process.send_signal(signal.SIGSTOP)
    time.sleep(seconds)
    try:
        process.send_signal(signal.SIGCONT)
    except (psutil.Error, ProcessLookupError):
        return f"process {process.pid}, for {seconds:.0f} s, and it has ended meanwhile"
    return f"process {process.pid}, for {seconds:.0f} s"


def hang_engine(run: Target, rng: random.Random) -> str:
    process = run.find("vLLM engine", rng)
    process.send_signal(signal.SIGSTOP)
    return f"process {process.pid}, for ever"


def stall_weights(run: Target, rng: random.Random) -> str:
    """Stop a receiver of weights, as soon as the weights are there, for longer than an update may take."""
    deadline, name = time.monotonic() + _FIND_S, re.compile(rf"vcpo-{run.run_id()}-weights-v")
    process = run.find("receiver of weights", rng)
    while not any(map(name.match, os.listdir("/dev/shm"))):
        if time.monotonic() > deadline or not run.alive():
            raise NotPossible("no weight update came")
        time.sleep(0.002)
    process.send_signal(signal.SIGSTOP)
    return f"process {process.pid}"


def signal_driver(signum: int) -> Callable[[Target, random.Random], str]:
    def does(run: Target, rng: random.Random) -> str:
        run.driver.send_signal(signum)
        return f"process {run.driver.pid}"

    return does


def fill_disk(run: Target, rng: random.Random) -> str:
    """Write until not a byte fits; the hour removes the file after the launch."""
    if run.disk is None:
        raise NotPossible("no right to mount a small file system")
    written = 0
    with open(run.disk / "filler", "wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    written += file.write(b"\1" * size)
            except OSError:
                continue
    return f"{written >> 20} MiB"


def jump_clock(seconds: float) -> Callable[[Target, random.Random], str]:
    def does(run: Target, rng: random.Random) -> str:
        with open(run.clock, "r+b") as file:
            file.write(struct.pack("d", seconds))
        return f"{seconds:+.0f} s"

    return does


def fail_reward(how: str) -> Callable[[Target, random.Random], str]:
    def does(run: Target, rng: random.Random) -> str:
        (run.marks / how).touch()
        deadline = time.monotonic() + _FIND_S
        while (run.marks / how).exists() and time.monotonic() < deadline and run.alive():
            time.sleep(0.1)
        return "the next call"

    return does


def append_to_metrics(content: bytes) -> Callable[[Target, random.Random], str]:
    """Return a fault that appends a whole line in one write: the lines of steps stay whole."""

    def does(run: Target, rng: random.Random) -> str:
        with open(run.run_dir / "metrics.jsonl", "ab", buffering=0) as file:
            file.write(content)
        return f"{len(content)} bytes"

    return does


def kill_sandbox(run: Target, rng: random.Random) -> str:
    run.sandbox.kill()
    time.sleep(rng.uniform(1, 8))
    run.sandbox.start()
    return "the server, which comes back"


def kill_program(run: Target, rng: random.Random) -> str:
    children = run.sandbox.process.children(recursive=True)
    for child in rng.sample(children, min(3, len(children))):
        with contextlib.suppress(psutil.NoSuchProcess):  # a program that has just ended
            child.kill()
    return f"{min(3, len(children))} of {len(children)} processes of programs"


def stop_sandbox(run: Target, rng: random.Random) -> str:
    return _stopped(run.sandbox.process, rng.uniform(*_SHORT_S))


_REPLACED = ("vLLM engine", "vLLM server", "receiver of weights", "reward process")
_NOT_NEEDED = ("log monitor of Ray", "dashboard of Ray")
_NEEDED = tuple(kind for kind in KINDS_OF_PROCESSES if kind not in (*_REPLACED, *_NOT_NEEDED))
_STOPPED = ("driver", *(kind for kind in KINDS_OF_PROCESSES if kind not in ("reward process", *_NOT_NEEDED)))

GOES_ON = [
    *(Fault(f"kill -9: {kind}", kill(kind)) for kind in (*_REPLACED, *_NOT_NEEDED)),
    *(Fault(f"stop and go on: {kind}", stop(kind)) for kind in _STOPPED),
    Fault("stop for ever: vLLM engine", hang_engine, says="A sampler died"),
    Fault(f"stop for {_LONG_S:.0f} s: trainer worker", stop("trainer worker", _LONG_S)),
    *(Fault(f"reward: {how}", fail_reward(how), says="sampled again") for how in ("hang", "die", "nan")),
    Fault("clock: a day later", jump_clock(86400.0)),
    Fault("clock: an hour earlier", jump_clock(-3600.0)),
    Fault("metrics.jsonl: NUL, while it runs", append_to_metrics(b"\0" * 99 + b"\n")),
    Fault("metrics.jsonl: garbage, while it runs", append_to_metrics(b'\xff\xfe{]"step": \n')),
    Fault("kill -9: sandbox", kill_sandbox),
    Fault("kill -9: programs in the sandbox", kill_program),
    Fault("stop and go on: sandbox", stop_sandbox),
]
_ERROR = "error:"
ENDS = [
    *(Fault(f"kill -9: {kind}", kill(kind), True, 1, _ERROR) for kind in _NEEDED),
    Fault("kill -9: driver", signal_driver(signal.SIGKILL), True, -9),
    Fault("SIGTERM: driver", signal_driver(signal.SIGTERM), True, 143, "interrupted"),
    Fault("SIGINT: driver", signal_driver(signal.SIGINT), True, 130, "interrupted"),
    Fault("disk full", fill_disk, True, 1, _ERROR),
    Fault("weights stall", stall_weights, True, 1, "async.weight_update_timeout_s"),
]
AT_START = [fault for fault in ENDS if fault.name.endswith(": driver")]
"""The faults that may also come before the first step."""


class Deck:
    """A deck that deals all its things in a random order, then all again in another order."""

    def __init__(self, things: list[Any], seed: str) -> None:
        self._things, self._rng, self._left = things, random.Random(seed), list[Any]()

    def deal(self) -> Any:
        if not self._left:
            self._left = self._rng.sample(self._things, len(self._things))
        return self._left.pop()
