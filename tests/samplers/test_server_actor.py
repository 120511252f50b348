"""The class of a server's actor: every call of the server, and none of its imports."""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from verl_vcpo.samplers.server_actor import server_actor
from verl_vcpo.samplers.vllm_server import LagKvLLMHttpServer

UNPICKLE = """
import pickle, sys
actor_class = pickle.load(open(sys.argv[1], "rb"))
assert not {"torch", "verl", "vllm"} & set(sys.modules), "the class of the actor imports the server"
print(actor_class.__name__, callable(actor_class.generate), callable(actor_class.probe))
"""


class Doubling:
    """A server with a call of each kind."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def at_once(self, value: int) -> int:
        return self.factor * value

    async def later(self, *, value: int) -> int:
        await asyncio.sleep(0)
        return self.factor * value

    async def failing(self) -> None:
        raise LookupError("no such request")

    def _private(self) -> None: ...


def plain(server: type) -> Any:
    """The actor's class as Ray makes it in the actor's process."""
    return server_actor(server).__ray_metadata__.modified_class


def test_calls_are_passed_on_with_their_answers_and_their_errors() -> None:
    actor = plain(Doubling)(factor=2)
    assert asyncio.run(actor.at_once(3)) == 6
    assert asyncio.run(actor.later(value=4)) == 8
    with pytest.raises(LookupError, match="no such request"):
        asyncio.run(actor.failing())
    assert not hasattr(actor, "_private")


def test_a_process_that_gets_a_handle_does_not_import_the_server(tmp_path: Path) -> None:
    (tmp_path / "class").write_bytes(cloudpickle.dumps(plain(LagKvLLMHttpServer)))
    command = [sys.executable, "-c", UNPICKLE, str(tmp_path / "class")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["LagKvLLMHttpServer", "True", "True"], done.stderr
