"""vLLM's worker connects to a socket in the run's folder, once it is there."""

import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl_vcpo.common.run_folder import run_folder, socket_folder
from verl_vcpo.common.run_id import RUN_ID_VARIABLE
from verl_vcpo.samplers.vllm_worker import LagKWorkerExtension, wait_for_socket


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """pytest's own may leave a socket's path no room."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def make(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def test_it_waits_for_the_sender(short_folder: Path) -> None:
    path = short_folder / "rl-colocate-zmq.sock"
    sender = threading.Timer(0.1, make, [path])
    start = time.monotonic()
    sender.start()
    wait_for_socket(path)
    assert time.monotonic() - start >= 0.1
    with pytest.raises(TimeoutError, match=r"waited 0.05 s for .*their sender died"):
        wait_for_socket(path.with_name("nobody's"), timeout_s=0.05)


def test_it_waits_for_the_socket_in_the_runs_folder(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other users of the machine can write to /tmp, where verl has it."""
    monkeypatch.setenv("RAY_TMPDIR", str(short_folder))
    monkeypatch.setenv(RUN_ID_VARIABLE, "0123456789ab")

    class Worker(LagKWorkerExtension):
        def __new__(cls) -> "Worker":
            return object.__new__(cls)

    upstream = LagKWorkerExtension.__mro__[1]
    monkeypatch.setattr(upstream, "_get_zmq_handle", lambda self: "ipc:///tmp/rl-colocate-zmq.sock")
    folder = run_folder("0123456789ab")
    with pytest.raises(FileNotFoundError):
        make(folder / "rl-colocate-zmq.sock")
    sender = threading.Timer(0.1, lambda: make(socket_folder() / "rl-colocate-zmq.sock"))
    sender.start()
    assert Worker()._get_zmq_handle() == f"ipc://{folder}/rl-colocate-zmq.sock"
    assert folder.parent.stat().st_mode & 0o077 == 0


def test_every_sampler_has_it() -> None:
    import importlib

    from verl_vcpo.cpu.vllm_server import CPUvLLMHttpServer
    from verl_vcpo.samplers.vllm_server import LagKvLLMHttpServer

    for server in (LagKvLLMHttpServer, CPUvLLMHttpServer):
        module, _, name = server._get_worker_extension_cls(None).rpartition(".")
        assert issubclass(getattr(importlib.import_module(module), name), LagKWorkerExtension)
