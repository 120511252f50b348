"""The key-value store of torch.distributed, on one machine (beside verl/utils/distributed.py: process groups)."""

import ipaddress
import socket
import sys
from typing import Any

import torch.distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it without a word


def keep_stores_on_loopback() -> None:
    """Make later stores of this process whose host is a loopback address listen on that address only.

    torch makes every store listen on all addresses of the machine, and a store does not authenticate its clients.
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
    except OSError:  # the port is in use: torch then shares a store of this process, or raises the error
        return None


def _is_loopback(host_name: str) -> bool:
    try:
        return ipaddress.ip_address(host_name).is_loopback
    except ValueError:
        return False
