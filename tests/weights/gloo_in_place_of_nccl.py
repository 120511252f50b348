"""Ray's collective group "NCCL" as a checkpoint engine sees it, over gloo and in CPU memory.

What a machine without GPUs has no copy of is modelled as NCCL documents it. gloo differs in each of these points:

    a communicator's id      made by rank 0, stored under the group's name, good for one communicator
    collective calls         are enqueued, and done one after the other; `synchronize` waits for them. The root's buffer
                             can be written again at once, because CUDA's default stream waits for the calls' stream:
                             here the root sends a copy
    a call to a dead member  neither ends nor raises an error, until the communicator is aborted
    an orderly destroy       waits for all members
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from torch import distributed

LIMIT_S = 20.0
_formed: list["Communicator"] = []


def formed() -> int:
    """How many communicators this process has been in."""
    return len(_formed)


def synchronize() -> None:
    """In place of `torch.cuda.synchronize`: returns when everything that is enqueued has ended."""
    for communicator in _formed:
        communicator.wait()


class Communicator:
    """One member's end of a communicator; the constructor waits for the others."""

    def __init__(self, folder: Path, name: str, rank: int, world_size: int) -> None:
        self._files = [folder / f"{name}.left.{member}" for member in range(world_size)]
        self._rank = rank
        try:
            (folder / f"{name}.joined.{rank}").open("x").close()
        except FileExistsError:
            time.sleep(LIMIT_S)
            raise RuntimeError(f"the id of {name} is used: its communicator has a rank {rank}") from None
        store = distributed.FileStore(str(folder / f"{name}.store"), world_size)
        self._gloo = distributed.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=LIMIT_S))
        self._stream = ThreadPoolExecutor(1)
        self._enqueued: deque[Future[None]] = deque()
        self._aborted = threading.Event()
        _formed.append(self)  # kept for ever: gloo's destructor waits for calls that never end

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        options = distributed.BroadcastOptions()
        options.rootRank = root
        sent = tensor.clone() if self._rank == root else tensor
        self._enqueue(lambda: self._gloo.broadcast([sent], options))

    def barrier(self) -> None:
        self._enqueue(lambda: self._gloo.allreduce([torch.ones(1)]))

    def _enqueue(self, call: Callable[[], Any]) -> None:
        if self._aborted.is_set():
            raise RuntimeError("NCCL_ERROR_INVALID_ARGUMENT: the communicator was aborted")
        self._enqueued.append(self._stream.submit(self._run, call))

    def _run(self, call: Callable[[], Any]) -> None:
        try:
            call().wait()
        except RuntimeError:  # a member died: NCCL would not tell
            self._aborted.wait(LIMIT_S)

    def wait(self) -> None:
        """Wait for the calls that are enqueued."""
        while self._enqueued and not self._aborted.is_set():
            if self._enqueued[0].done():
                self._enqueued.popleft()
            else:
                time.sleep(0.002)

    def abort(self) -> None:
        self._aborted.set()

    def destroy(self) -> None:
        if self._aborted.is_set():
            return
        self._files[self._rank].touch()
        deadline = time.monotonic() + LIMIT_S
        while not all(file.exists() for file in self._files):
            if time.monotonic() > deadline:
                raise RuntimeError("a member has not left the communicator")
            time.sleep(0.01)


class GlooInPlaceOfNCCL(BaseGroup):
    """Ray's `NCCLGroup`: the communicator is formed at the first call."""

    folder: Path

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._dev_comm_map: dict[str, list[Communicator]] = {}

    def _communicator(self) -> Communicator:
        if not self._dev_comm_map:
            self._dev_comm_map["0"] = [Communicator(self.folder, self.group_name, self.rank, self.world_size)]
        return self._dev_comm_map["0"][0]

    @classmethod
    def check_backend_availability(cls) -> bool:
        return True

    def broadcast(self, tensors: list[Any], options: Any) -> None:
        self._communicator().broadcast(torch.as_tensor(tensors[0]), options.root_rank)

    def barrier(self, options: Any = None) -> None:
        self._communicator().barrier()

    def destroy_group(self) -> None:
        for communicators in self._dev_comm_map.values():
            for communicator in communicators:
                communicator.destroy()

    def _not_used(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError

    allreduce = reduce = allgather = reducescatter = send = recv = _not_used
