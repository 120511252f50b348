"""vLLM's worker connects to a socket of its own user only."""

import os
import socket
import threading
import time
from pathlib import Path

import pytest

from verl_vcpo.workers.rollout.vllm_worker import LagKWorkerExtension, wait_for_own_socket


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rl-colocate-zmq.sock"


def make(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def test_it_waits_for_the_sender(path: Path) -> None:
    sender = threading.Timer(0.1, make, [path])
    start = time.monotonic()
    sender.start()
    wait_for_own_socket(path)
    assert time.monotonic() - start >= 0.1
    with pytest.raises(TimeoutError, match=r"waited 0.05 s for .*their sender died"):
        wait_for_own_socket(path.with_name("nobody's"), timeout_s=0.05)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file to another user")
def test_another_users_socket_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(path)
    os.chown(path, 65534, 65534)
    with pytest.raises(PermissionError, match="is user 65534's: refused"):
        wait_for_own_socket(path)

    class Worker(LagKWorkerExtension):
        def __new__(cls) -> "Worker":
            return object.__new__(cls)

    upstream = LagKWorkerExtension.__mro__[1]
    monkeypatch.setattr(upstream, "_get_zmq_handle", lambda self: f"ipc://{path}")
    with pytest.raises(PermissionError):
        Worker()._get_zmq_handle()


def test_every_sampler_has_it() -> None:
    import importlib

    from verl_vcpo.cpu.vllm_server import CPUvLLMHttpServer
    from verl_vcpo.workers.rollout.vllm_server import LagKvLLMHttpServer

    for server in (LagKvLLMHttpServer, CPUvLLMHttpServer):
        module, _, name = server._get_worker_extension_cls(None).rpartition(".")
        assert issubclass(getattr(importlib.import_module(module), name), LagKWorkerExtension)
