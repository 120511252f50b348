"""The content of a file of another node, by a Ray task there and Ray's object store, which Ray's token guards.

The module imports nothing large: a worker process of the other node loads the module.
"""

import asyncio
import time
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

_POLL_S = 0.01


def node_id() -> str:
    """Return Ray's id of the node that the calling process is on."""
    return ray.get_runtime_context().get_node_id()


async def read(node: str, path: Path, timeout_s: float) -> bytes:
    """Return the content of the file `path` of the node, once there is such a file.

    Raises:
        TimeoutError: there was no file, or the content did not arrive, in `timeout_s`.
        ray.exceptions.RayError: the node is gone.
    """
    on_node = NodeAffinitySchedulingStrategy(node, soft=False)
    content: Any = _content.options(scheduling_strategy=on_node).remote(str(path), timeout_s)
    try:
        return await asyncio.wait_for(content, timeout_s)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None


def content_of(path: str, timeout_s: float) -> bytes:
    """Return the content of a file of this node, once there is such a file.

    Raises:
        TimeoutError: there was no file in `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while not Path(path).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no file {path} in {timeout_s:g} s")
        time.sleep(_POLL_S)
    return Path(path).read_bytes()


_content = ray.remote(num_cpus=0)(content_of)
