"""The key-value store of torch.distributed, on one machine (beside verl/utils/distributed.py: process groups)."""

import ipaddress
import socket
import sys
from typing import Any

import torch.distributed
from torch.distributed import TCPStore


def keep_stores_on_loopback() -> None:
    """A store that its process group names by a loopback address listens there only, in this process, from now on.

    torch itself listens on every address of the machine, whatever the name, and the store asks nobody who he is.
    """
    sys.modules[torch.distributed.rendezvous.__module__].TCPStore = _store  # type: ignore[attr-defined]


def _store(host_name: str, port: int, *args: Any, is_master: bool = False, **kwargs: Any) -> TCPStore:
    if is_master and _is_loopback(host_name) and (listening := _listen(host_name, port)):
        port = listening.getsockname()[1]
        kwargs["master_listen_fd"] = listening.detach()  # the store closes it
    kwargs["is_master"] = is_master
    return TCPStore(host_name, port, *args, **kwargs)


def _listen(host_name: str, port: int) -> socket.socket | None:
    try:
        return socket.create_server((host_name, port))
    except OSError:  # in use: by a store of this process, which torch then shares; otherwise torch raises
        return None


def _is_loopback(host_name: str) -> bool:
    try:
        return ipaddress.ip_address(host_name).is_loopback
    except ValueError:
        return False
