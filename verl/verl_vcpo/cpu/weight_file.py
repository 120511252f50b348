"""Trainer -> sampler weights through one file in shared memory (a verl CheckpointEngine, backend "weight_file").

The file lives for one synchronisation. Its name carries the run's id, so that two runs never meet and the
driver can remove what a killed process left behind. Trainer and samplers share the machine: what travels from process
to process is the file's name, and vLLM's worker maps the file (vllm_worker.py).
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
    """The files that the run has in shared memory now: none between synchronisations."""
    return sorted(Path(directory).glob(f"vcpo-{run_id}-*"))


def weights_of(sent: list[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """The weights in a bucket that verl's sender delivered, in memory that stays.

    What `receive_weights` yields stands for the whole file, which is mapped. Tensors themselves, as verl's synchronous
    trainer sends them, are copied: the sender's buffer is used again.
    """
    if [name for name, _ in sent] != [_FILE_NAME]:
        return [(name, weight.clone()) for name, weight in sent]
    file_name = bytes(sent[0][1].tolist()).decode()
    return list(torch.load(file_name, weights_only=True, mmap=True).items())


@CheckpointEngineRegistry.register(BACKEND)
class WeightFileCheckpointEngine(CheckpointEngine):
    """One sender (the trainer's rank 0), any number of receivers on the same machine.

    Args:
        bucket_size: verl's; unused, the file holds all weights.
        is_master: whether this process is the sender.
        run_id: what makes the file's name unique to the run.
        timeout_s: how long a receiver waits for the file.
        directory: a folder in memory.
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
            raise ValueError("checkpoint_engine.engine_kwargs.weight_file.run_id is empty: give every run its own")
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
        """There is none: the file's name is agreed on from the start."""

    def finalize(self) -> None:
        """Every receiver has read the file: remove it."""
        self._staged = None
        if self.is_master:
            for path in self._path.parent.glob(f"{self._path.name}-v*"):
                path.unlink(missing_ok=True)

    async def send_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Have version `global_steps` in the file, which `stage_weights` may have written already."""
        if global_steps is None or global_steps != self._staged:
            self.stage_weights(weights, global_steps)
        return {}

    def stage_weights(self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None) -> None:
        """Write version `global_steps`: under a temporary name first, so that it is whole when it appears."""
        # Every rank walks the generator, because gathering a tensor is collective; only the master keeps it.
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
        # Other users of the machine can enter the folder: no moment passes in which they can open the file.
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
