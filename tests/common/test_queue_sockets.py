"""The keys of TransferQueue's sockets. tests/loop/test_transfer_queue.py has the sockets themselves."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import transfer_queue
import zmq
from ray._raylet import AuthenticationTokenLoader
from transfer_queue import controller
from transfer_queue.utils import zmq_utils

from verl_vcpo.common import queue_sockets

Keys = Callable[..., tuple[bytes, bytes]]


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keys]:
    """The keys of a process with this environment, and no other token."""
    monkeypatch.setenv("HOME", str(tmp_path))

    def made(**environment: str) -> tuple[bytes, bytes]:
        for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
            monkeypatch.delenv(name, raising=False)
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        AuthenticationTokenLoader.instance().reset_cache()
        return queue_sockets._keys()

    yield made
    monkeypatch.undo()
    AuthenticationTokenLoader.instance().reset_cache()


def test_processes_with_one_token_have_one_key(keys: Keys, tmp_path: Path) -> None:
    """However it comes to their nodes."""
    (file := tmp_path / "token").write_text("a" * 64 + "\n")
    public, secret = keys(RAY_AUTH_TOKEN="a" * 64)
    assert zmq.curve_public(secret) == public
    assert keys(RAY_AUTH_TOKEN_PATH=str(file)) == (public, secret)
    assert not {public, secret} & set(keys(RAY_AUTH_TOKEN="b" * 64))


def test_without_a_token_there_is_no_socket(keys: Keys) -> None:
    with pytest.raises(RuntimeError, match="need Ray's token, and this process has none: .*RAY_AUTH_TOKEN"):
        keys()
    with zmq.Context() as context, pytest.raises(RuntimeError, match="need Ray's token"):
        zmq_utils.create_zmq_socket(context, zmq.ROUTER, "127.0.0.1")


def test_modules_that_have_the_plain_function_already_get_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = zmq_utils.create_zmq_socket.__wrapped__
    for module in (zmq_utils, controller):
        monkeypatch.setattr(module, "create_zmq_socket", plain)
    queue_sockets.encrypt.__wrapped__()
    assert controller.create_zmq_socket is zmq_utils.create_zmq_socket is not plain


def test_transfer_queue_makes_all_its_sockets_in_the_function_that_is_replaced() -> None:
    sources = Path(transfer_queue.__file__).parent.rglob("*.py")
    makers = [file.name for file in sources if re.search(r"(?<!socket)\.socket\(|Socket\(\w*context", file.read_text())]
    assert makers == ["zmq_utils.py"]
