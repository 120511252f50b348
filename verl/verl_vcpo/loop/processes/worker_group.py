"""A port for the trainer's processes that no connection can take first (extends verl/single_controller/ray/base.py).

verl has the kernel choose a free port, and the first process of the trainer listens there when it has loaded its
packages: ten seconds later or more. Until then the kernel may give the port to any connection of the machine; the
samplers, which start at the same time, make hundreds. The kernel gives nobody a port below its range unasked.
"""

import contextlib
import functools
import secrets
from collections.abc import Iterator
from pathlib import Path

from verl.single_controller.ray.base import RayWorkerGroup
from verl.trainer.ppo.v1 import trainer_base

_KERNELS_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_TRIES = 100
_PRIVILEGED = 1024  # ports below are root's


def port_range() -> list[int] | None:
    """Return [first, last + 1]: ports at a random place in the quarter below the kernel's range for connections.

    The place is random so that two runs that start on one machine have different ports. None leaves the choice to the
    kernel: the kernel gives nearly all ports to connections.
    """
    given_out = int(_KERNELS_RANGE.read_text().split()[0])
    if given_out - given_out // 4 - _TRIES < _PRIVILEGED:
        return None
    first = given_out - _TRIES - secrets.randbelow(given_out // 4)
    return [first, first + _TRIES]


@contextlib.contextmanager
def kept_port() -> Iterator[None]:
    """Have worker groups that verl's trainer makes in the block listen on a port of `port_range`."""
    trainer_base.RayWorkerGroup = functools.partial(RayWorkerGroup, master_port_range=port_range())
    try:
        yield
    finally:
        trainer_base.RayWorkerGroup = RayWorkerGroup
