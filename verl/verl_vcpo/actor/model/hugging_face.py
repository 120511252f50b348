"""A policy as a Hugging Face folder."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from verl_vcpo.common import model_files
from verl_vcpo.common.disk import why_not_written
from verl_vcpo.common.whole_file import whole_folder

_SHARD_BYTES = 4_000_000_000
_INDEX = "model.safetensors.index.json"


def write_folder(write: Callable[[Path], None], files: Mapping[str, bytes], folder: Path) -> None:
    """Write weights, and the files beside them. Collective: rank 0 writes.

    Args:
        write: a collective function that writes the weights into a folder, as `write_weights` does.
        files: what `model_files.read` has returned.
        folder: on a file system of rank 0's node; appears when it is complete, and replaces an older one.

    Raises:
        RuntimeError: on rank 0, in one line, where the disk does not take the folder.
    """
    if dist.get_rank() != 0:
        write(folder)
        return
    try:
        with whole_folder(folder) as partial:
            write(partial)
            model_files.write(files, partial)
    except (OSError, SafetensorError) as error:
        has = why_not_written(folder.parent, error)
        raise RuntimeError(f"{folder} was not written; {folder.parent} has {has}") from error


def write_weights(weights: Iterable[tuple[str, Tensor]], folder: Path, shard: int = _SHARD_BYTES) -> None:
    """Write weights and their index into a folder. Collective: rank 0 writes.

    Megatron-Bridge's own `save_hf_weights` distributes the weights over the files of the model that the run began with,
    leaves a file out when that model's index names a weight that Megatron does not have, and imports ModelOpt.

    Args:
        weights: (Hugging Face name, weight), gathered as they are read, on all ranks.
        folder: exists on rank 0.
        shard: bytes of a file, and of the memory that the writer needs on the host; more for one larger weight.
    """
    if dist.get_rank() != 0:
        for _ in weights:
            pass
        return
    parts, total = [], 0
    for part in _shards(weights, shard):
        total += sum(weight.nbytes for weight in part.values())
        parts.append(list(part))
        save_file(part, folder / _part(len(parts)), metadata={"format": "pt"})
    if len(parts) == 1:
        (folder / _part(1)).rename(folder / "model.safetensors")
        return
    place: dict[str, str] = {}
    for number, names in enumerate(parts, 1):
        file = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        (folder / _part(number)).rename(folder / file)
        place |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": place}
    (folder / _INDEX).write_text(json.dumps(index, indent=2))


def _part(number: int) -> str:
    return f"part-{number}.safetensors"


def _shards(weights: Iterable[tuple[str, Tensor]], shard: int) -> Iterator[dict[str, Tensor]]:
    """Yield the weights on the host. A tied embedding comes from the first and the last pipeline stage: one is kept."""
    part: dict[str, Tensor] = {}
    seen: set[str] = set()
    size = 0
    for name, weight in weights:
        if name in seen:
            continue
        seen.add(name)
        if part and size + weight.nbytes > shard:
            yield part
            part, size = {}, 0
        part[name] = weight.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        size += weight.nbytes
    yield part
