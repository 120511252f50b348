"""The processes of a weight update, each with a checkpoint engine, and a driver that calls as verl's manager does."""

import asyncio
import gc
import importlib
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
import zmq
from ray.util.collective import collective
from ray.util.collective.backend_registry import register_collective_backend
from torch import distributed

from tests.weights import gloo_in_place_of_nccl as stand_in

TRAINERS = 2
_BUCKET = 64  # bytes: every update takes several broadcasts, and one weight is larger than a bucket
BROADCASTS = 6  # of an update
UPSTREAM = "verl.checkpoint_engine.nccl_checkpoint_engine"
_fork = multiprocessing.get_context("fork")


class Died(Exception):
    """A process died, as `ray.get` tells."""


class NoAnswer(Exception):
    """Processes that did not answer in time."""


def weights_of(version: int) -> list[tuple[str, torch.Tensor]]:
    return [(f"layer {i}", torch.arange(size, dtype=torch.float32) + version) for i, size in enumerate((7, 12, 50, 9))]


class Process:
    """One engine in a process of its own. Calls run one after the other, like those of a Ray actor with a loop."""

    def __init__(self, name: str, engine: Callable[[], Any], folder: Path, trainer_rank: int | None = None) -> None:
        self.name = name
        self.answers, theirs = _fork.Pipe()
        self.process = _fork.Process(target=_serve, args=(theirs, engine, folder, trainer_rank), daemon=True)
        self.process.start()
        theirs.close()
        self._numbers = itertools.count()

    def call(self, method: str, *args: Any, **kwargs: Any) -> int:
        number = next(self._numbers)
        try:
            self.answers.send((number, method, args, kwargs))
        except ConnectionError:
            raise Died(self.name) from None
        return number

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(10)


def answers(calls: dict[Process, int], limit_s: float) -> list[Any]:
    """What all processes answer, in the order of `calls`; a death or an error is raised at once."""
    found: dict[Process, Any] = {}
    deadline = time.monotonic() + limit_s
    while len(found) < len(calls):
        waiting = {process.answers: process for process in calls if process not in found}
        ready = connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise NoAnswer(", ".join(process.name for process in waiting.values()))
        for pipe in ready:
            process = waiting[pipe]
            try:
                number, error, answer = pipe.recv()
            except (EOFError, ConnectionError):
                raise Died(process.name) from None
            if number == calls[process]:  # others are of an update that failed
                if error is not None:
                    raise RuntimeError(f"{process.name}: {error}")
                found[process] = answer
    return [found[process] for process in calls]


class Driver:
    """Trainers and samplers of one run; `update` makes the calls of verl's `CheckpointEngineManager.update_weights`."""

    def __init__(self, engine: Any, folder: Path, samplers: int = 3, **settings: Any) -> None:
        self._engine, self._folder, self._settings = engine, folder, settings
        self.limit_s = 120.0
        self.trainers = [self._started(f"trainer {rank}", rank) for rank in range(TRAINERS)]
        self.samplers = [self._started(f"sampler {rank}") for rank in range(samplers)]

    def _started(self, name: str, trainer_rank: int | None = None) -> Process:
        is_master = trainer_rank == 0
        return Process(
            name,
            lambda: self._engine(bucket_size=_BUCKET, is_master=is_master, **self._settings),
            self._folder,
            trainer_rank,
        )

    @property
    def _all(self) -> list[Process]:
        return [*self.trainers, *self.samplers]

    def each(self, method: str, *args: Any) -> list[Any]:
        return answers({process: process.call(method, *args) for process in self._all}, self.limit_s)

    def prepare_update(self) -> None:
        metadata = self.each("prepare")
        topology = self._engine.build_topology(len(self.trainers), len(self.samplers), metadata)
        calls = {}
        for kwargs, processes in zip(topology, (self.trainers, self.samplers), strict=True):
            for i, process in enumerate(processes):
                of_process = {name: values[i] for name, values in kwargs.items()}
                calls[process] = process.call("init_process_group", **of_process)
        answers(calls, self.limit_s)

    def transfer(self, version: int, dying: tuple[int, ...] = (), held: str = "") -> None:
        """Of the weights.

        Args:
            version: of the weights.
            dying: samplers that are killed when they have received one weight of several.
            held: where the first trainer's last thread but one stops; the last sampler is killed as soon as it has.
        """
        if held:
            answers({self.trainers[0]: self.trainers[0].call("hold", held)}, self.limit_s)
        calls = {trainer: trainer.call("send", version) for trainer in self.trainers}
        for rank, sampler in enumerate(self.samplers):
            calls[sampler] = sampler.call("receive", version, dies=rank in dying)
        if held:
            answers({self.trainers[0]: self.trainers[0].call("is_held")}, self.limit_s)
            self.samplers[-1].kill()
        answers(calls, self.limit_s)

    def update(self, version: int, dying: tuple[int, ...] = ()) -> None:
        self.prepare_update()
        self.transfer(version, dying)
        self.each("finalize")

    def replace(self, dead: tuple[int, ...]) -> None:
        """As `SamplerKeeper._replace`: the new samplers come last."""
        fresh = [self._started(f"another {self.samplers[rank].name}") for rank in dead]
        self.samplers = [*(s for rank, s in enumerate(self.samplers) if rank not in dead), *fresh]

    def end(self) -> None:
        for process in self._all:
            process.kill()


def _serve(pipe: connection.Connection, engine: Callable[[], Any], folder: Path, trainer_rank: int | None) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what pytest has made is no matter of this process's collections
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # errors are answers
    _put_in_place(folder)
    trainers = None
    if trainer_rank is not None:
        store = distributed.FileStore(str(folder / "trainers"), TRAINERS)
        trainers = distributed.ProcessGroupGloo(store, trainer_rank, TRAINERS)
    served, loop = _Served(engine(), trainers), asyncio.new_event_loop()

    async def handle(number: int, method: str, args: Any, kwargs: Any) -> None:
        try:
            answer = getattr(served, method)(*args, **kwargs)
            if asyncio.iscoroutine(answer):
                answer = await answer
            pipe.send((number, None, answer))
        except Exception as error:
            pipe.send((number, f"{type(error).__name__}: {error}", None))

    def read() -> None:
        while True:
            try:
                call = pipe.recv()
            except EOFError:
                os._exit(0)
            asyncio.run_coroutine_threadsafe(handle(*call), loop)

    threading.Thread(target=read, daemon=True).start()
    loop.run_forever()


class _Served:
    """What Ray's workers have: the engine's own methods, and the weights."""

    def __init__(self, engine: Any, trainers: Any) -> None:
        self._engine, self._trainers = engine, trainers
        self._held, self._next_group = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def formed(self) -> int:
        return stand_in.formed()

    def collect(self) -> None:
        """What Python does at any time: it frees what only a cycle of references keeps."""
        gc.collect()

    def subscribe_late(self, seconds: float) -> None:
        """From now on a subscription follows the connection after `seconds`, as on a busy machine."""
        subscribe = zmq.Socket.setsockopt_string

        def late(*args: Any) -> None:
            timer = threading.Timer(seconds, subscribe, args)
            timer.daemon = True
            timer.start()

        setattr(zmq.Socket, "setsockopt_string", late)  # noqa: B010

    def init_process_group(self, **kwargs: Any) -> None:
        self._engine.init_process_group(**kwargs)
        self._next_group.set()

    def hold(self, where: str) -> None:
        """Stop a thread of the next transfer before or after its broadcast until the next group is there."""
        self._next_group, operation = threading.Event(), importlib.import_module(UPSTREAM).BroadcastOperation
        broadcast, numbers = operation._run, itertools.count(1)

        def run(this: Any) -> None:
            is_held = next(numbers) == BROADCASTS - 1
            if not is_held:
                broadcast(this)
                return
            if where == "after":
                broadcast(this)
            self._held.set()
            self._next_group.wait(stand_in.LIMIT_S)
            if where == "before":
                broadcast(this)

        operation._run = run

    async def is_held(self) -> None:
        while not self._held.is_set():
            await asyncio.sleep(0.01)

    async def send(self, version: int) -> None:
        await self._engine.send_weights(self._gathered(version), global_steps=version)

    def _gathered(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights; each is collective over the trainers, as Megatron's gathers are."""
        for name, weight in weights_of(version):
            self._trainers.allreduce([torch.ones(1)]).wait()
            yield name, weight

    async def receive(self, version: int, dies: bool) -> None:
        received = {}
        async for name, weight in self._engine.receive_weights(global_steps=version):
            received[name] = weight.view(torch.float32).clone()
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
        sent = dict(weights_of(version))
        assert received.keys() == sent.keys(), f"{sorted(received)} arrived"
        wrong = [name for name in sent if not torch.equal(sent[name], received[name].flatten())]
        assert not wrong, f"{wrong} are not what was sent"


def _put_in_place(folder: Path) -> None:
    """Exchange what needs a GPU or a Ray cluster, in this process."""
    stand_in.GlooInPlaceOfNCCL.folder = folder
    register_collective_backend("NCCL", stand_in.GlooInPlaceOfNCCL)
    setattr(collective, "_check_inside_actor", lambda: None)  # noqa: B010
    zeros = torch.zeros
    for owner, name, value in (
        (torch, "zeros", lambda *args, device=None, **kwargs: zeros(*args, **kwargs)),
        (torch.cuda, "synchronize", stand_in.synchronize),
        (ray, "get_actor", _no_actor),
        (ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "the only node")),
        (ray.util, "get_node_ip_address", lambda: "127.0.0.1"),
    ):
        setattr(owner, name, value)


def _no_actor(name: str, *args: Any) -> None:
    raise ValueError(f"there is no actor {name}")
