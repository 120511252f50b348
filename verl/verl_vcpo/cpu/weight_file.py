"""Trainer -> sampler weights through one file in shared memory (a verl CheckpointEngine, backend "weight_file").

The file exists during one synchronisation. Its name contains the run's id, so that two runs have different files and
the driver can remove the files of a killed process. Trainer and samplers share the machine: processes send each other
the file's name, and vLLM's worker maps the file (vllm_worker.py).
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

BACKEND = "weight_file"
_POLL_S = 0.01
_FILE_NAME = "vcpo_weight_file"


def weight_files(run_id: str, directory: str = "/dev/shm") -> list[Path]:
    """The weight files of a run that are in shared memory now; between synchronisations there are none."""
    return sorted(Path(directory).glob(f"vcpo-{run_id}-*"))


def weights_of(sent: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """The weights of a bucket that verl's sender delivered, in memory that stays valid.

    `receive_weights` yields the name of the file, which is mapped here. Tensors, which verl's synchronous trainer sends
    instead, are copied: the sender reuses its buffer.
    """
    if [name for name, _ in sent] != [_FILE_NAME]:
        return [(name, weight.clone()) for name, weight in sent]
    file_name = bytes(sent[0][1].tolist()).decode()
    return list(torch.load(file_name, weights_only=True, mmap=True).items())


@CheckpointEngineRegistry.register(BACKEND)
class WeightFileCheckpointEngine(CheckpointEngine):
    """One sender (the trainer's rank 0), any number of receivers on the same machine.

    Args:
        bucket_size: an argument of all checkpoint engines; unused, the file holds all weights.
        is_master: whether this process is the sender.
        run_id: a part of the file's name, different in every run.
        timeout_s: a receiver waits for the file at most so long.
        directory: a folder of a file system in memory.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        run_id: str = "",
        timeout_s: float = 300.0,
        directory: str = "/dev/shm",
    ) -> None:
        if not run_id:
            raise ValueError("checkpoint_engine.engine_kwargs.weight_file.run_id is empty: every run needs another")
        self.is_master = is_master
        self.timeout_s = timeout_s
        self._path = Path(directory) / f"vcpo-{run_id}-weights"
        self._staged: int | None = None

    def _file(self, global_steps: int | None) -> Path:
        return self._path.with_name(f"{self._path.name}-v{global_steps}")

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        return {"rank": list(range(actor_wg_world_size))}, {"rank": [-1] * rollout_world_size}

    def init_process_group(self, rank: int) -> None:
        """Nothing to do: sender and receivers know the file's name from their settings."""

    def finalize(self) -> None:
        """Remove the file, which every receiver has read."""
        self._staged = None
        if self.is_master:
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
        """Write the file of version `global_steps`: under a temporary name first, so that no receiver reads a part."""
        # Every rank iterates over the weights, because gathering a tensor is collective; only the master keeps them.
        tensors = {}
        for name, weight in weights:
            if self.is_master:
                tensors[name] = weight.detach().cpu().clone()
        self._staged = global_steps
        if not self.is_master:
            return
        path = self._file(global_steps)
        partial = path.with_name(f"{path.name}.partial")
        partial.unlink(missing_ok=True)
        # Other users of the machine can enter the folder: from its creation on only this user can open the file.
        os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        torch.save(tensors, partial)
        os.replace(partial, path)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the name of version `global_steps`'s file, as bytes; `weights_of` reads it.

        Raises:
            TimeoutError: the file did not appear in `timeout_s`, naming what was waited for.
        """
        path = self._file(global_steps)
        deadline = time.monotonic() + self.timeout_s
        while not path.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"the sampler waited {self.timeout_s:g} s for the trainer's weights, version {global_steps} "
                    f"({path}): the trainer failed or is slow; its log says which "
                    "(checkpoint_engine.engine_kwargs.weight_file.timeout_s sets the limit)"
                )
            await asyncio.sleep(_POLL_S)
        yield _FILE_NAME, torch.tensor(list(str(path).encode()), dtype=torch.uint8)
