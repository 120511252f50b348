"""The samplers' weights through a file in shared memory (a verl CheckpointEngine, backend "weight_file").

The trainer's node has the file during one synchronisation. Samplers of that node map the file; a sampler of any other
node copies the file into shared memory there, by Ray's object store (node_file.py). The file's name contains the run's
id: two runs have different files, and clean-up finds the files of a killed process. Processes of a node send each other
the file's name, and vLLM's worker maps the file (vllm_worker.py).
"""

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from verl_vcpo.common.disk import why_not_written
from verl_vcpo.cpu import node_file

BACKEND = "weight_file"
_POLL_S = 0.01
_FILE_NAME = "vcpo_weight_file"


def weights_of(sent: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """Return the weights of the file whose name `receive_weights` has yielded; the file is mapped.

    Tensors, which verl's synchronous trainer sends instead, are copied: the sender reuses its buffer.
    """
    if [name for name, _ in sent] != [_FILE_NAME]:
        return [(name, weight.clone()) for name, weight in sent]
    file_name = bytes(sent[0][1].tolist()).decode()
    return list(torch.load(file_name, weights_only=True, mmap=True).items())


@CheckpointEngineRegistry.register(BACKEND)
class WeightFileCheckpointEngine(CheckpointEngine):
    """A checkpoint engine with one sender, the trainer's rank 0, and any number of receivers, on any node.

    Args:
        bucket_size: an argument of all checkpoint engines; unused, the file holds all weights.
        is_master: whether this process is the sender.
        timeout_s: the longest that a receiver waits for the file.
        directory: a folder of a file system in memory, of the same name on every node.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        run_id: str = "",
        *,
        timeout_s: float,
        directory: str = "/dev/shm",
    ) -> None:
        if not run_id:
            raise ValueError("checkpoint_engine.engine_kwargs.weight_file.run_id is empty: every run needs another")
        self.is_master = is_master
        self.timeout_s = timeout_s
        self._path = Path(directory) / f"vcpo-{run_id}-weights"
        self._staged: int | None = None
        self._sender: dict[str, str] | None = None  # None: the sender is on this node

    def _file(self, global_steps: int | None) -> Path:
        return self._path.with_name(f"{self._path.name}-v{global_steps}")

    def prepare(self) -> dict[str, str]:
        """Return the node and address of the calling process."""
        return {"node": node_file.node_id(), "host": ray.util.get_node_ip_address()}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, str]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Tell everybody where the sender is: `metadata` begins with the trainer's rank 0."""
        return (
            {"rank": list(range(actor_wg_world_size)), "sender": [metadata[0]] * actor_wg_world_size},
            {"rank": [-1] * rollout_world_size, "sender": [metadata[0]] * rollout_world_size},
        )

    def init_process_group(self, rank: int, sender: dict[str, str]) -> None:
        """Note whether the sender is on another node, so that the file has to be fetched."""
        self._sender = None if sender["node"] == node_file.node_id() else sender

    def finalize(self) -> None:
        """Remove the file, or this node's copy of it: every receiver has read it."""
        self._staged = None
        if self.is_master or self._sender:
            for path in self._path.parent.glob(f"{self._path.name}-v*"):
                path.unlink(missing_ok=True)

    async def send_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Write version `global_steps` into the file, unless `stage_weights` has done so already."""
        if global_steps is None or global_steps != self._staged:
            self.stage_weights(weights, global_steps)
        return {}

    def stage_weights(self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        """Write the file of version `global_steps`."""
        # Every rank iterates over the weights, because gathering a tensor is collective; only the master keeps them.
        tensors = {}
        for name, weight in weights:
            if self.is_master:
                tensors[name] = weight.detach().cpu().clone()
        self._staged = global_steps
        if not self.is_master:
            return
        size = sum(weight.nbytes for weight in tensors.values())
        _write_whole(self._file(global_steps), size, lambda partial: torch.save(tensors, partial))

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the name of version `global_steps`'s file on this node, as bytes; `weights_of` reads it.

        Raises:
            TimeoutError: the file did not appear in `timeout_s`, naming what was waited for.
        """
        path = self._file(global_steps)
        try:
            if self._sender:
                content = await node_file.read(self._sender["node"], path, self.timeout_s)
                path = path.with_name(f"{path.name}-{uuid.uuid4().hex[:8]}")
                _write_whole(path, len(content), lambda partial: partial.write_bytes(content))
            async with asyncio.timeout(self.timeout_s):
                while not path.exists():
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise self._late(path, global_steps) from None
        yield _FILE_NAME, torch.tensor(list(str(path).encode()), dtype=torch.uint8)

    def _late(self, path: Path, version: int | None) -> TimeoutError:
        where = f"{path} on {self._sender['host']}" if self._sender else str(path)
        cause = "failed or is slow" + (", or its node cannot be reached" if self._sender else "")
        return TimeoutError(
            f"the sampler waited {self.timeout_s:g} s for the trainer's weights, version {version} ({where}): the "
            f"trainer {cause}; its log says which (actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs."
            "weight_file.timeout_s sets the limit)"
        )


def _write_whole(path: Path, size: int, write: Callable[[Path], object]) -> None:
    """Write `size` bytes under a temporary name first, so that nobody reads a part.

    Raises:
        RuntimeError: the folder does not take the file, and why.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.unlink(missing_ok=True)
        # Other users of the machine can enter the folder: from its creation on only this user can open the file.
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        write(partial)
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError where the folder is full
        raise RuntimeError(
            f"the samplers' weights were not written: {path.parent} has {why_not_written(path.parent, error)}, and the "
            f"weights take {size / 1e6:.3g} MB; remove files there, or make it larger (docker run --shm-size)"
        ) from error
