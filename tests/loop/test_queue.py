"""TransferQueue starts beside the samplers; a run whose queue has died or has not begun ends with its own words."""

import subprocess
import sys
import threading

import pytest
import transfer_queue as tq
from omegaconf import DictConfig

from verl_vcpo.loop import queue as loop_queue
from verl_vcpo.loop.queue import Queue

# With a real client, whose controller is a socket that takes questions and never answers.
PROGRAM = """
import asyncio, gc
import transfer_queue.interface, zmq
from transfer_queue.client import TransferQueueClient
from transfer_queue.utils.enum_utils import Role
from transfer_queue.utils.zmq_utils import ZMQServerInfo
from verl_vcpo.loop.queue import end_queue

silent = zmq.Context().socket(zmq.ROUTER)
port = silent.bind_to_random_port("tcp://127.0.0.1")
info = ZMQServerInfo(Role.CONTROLLER, "controller", "127.0.0.1", {"request_handle_socket": port})
client = transfer_queue.interface._TQ_CLIENT = TransferQueueClient("driver", info)
asked = asyncio.run_coroutine_threadsafe(client.async_kv_list(), client._loop)
assert silent.poll(20_000), "nothing was asked"
end_queue()
print("ended", flush=True)
del asked
gc.collect()
"""


def test_a_question_without_an_answer_says_nothing_after_the_end() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
    assert "Traceback" not in done.stderr and "destroyed" not in done.stderr, done.stderr


def test_the_error_of_a_start_comes_where_the_queue_is_first_used_and_only_a_started_queue_is_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ended: list[str] = []
    may_start = threading.Event()
    monkeypatch.setattr(loop_queue, "_END_S", 0.1)
    monkeypatch.setattr(loop_queue, "end_queue", lambda: ended.append("queue"))
    monkeypatch.setattr(tq, "close", lambda: ended.append("what was made"))

    def fails(config: DictConfig) -> None:
        raise ValueError("no memory for the storage")

    monkeypatch.setattr(tq, "init", fails)
    failed = Queue(DictConfig({}))
    with pytest.raises(ValueError, match="no memory"):
        failed.wait()
    failed.end()
    assert ended == ["what was made"]
    monkeypatch.setattr(loop_queue, "_START_S", 0.1)
    monkeypatch.setattr(tq, "init", lambda config: may_start.wait())
    slow = Queue(DictConfig({}))  # returns before the queue is there
    with pytest.raises(RuntimeError, match="TransferQueue was not up"):
        slow.wait()
    slow.end()
    assert ended == ["what was made"], "a queue without a client was asked to end"
    may_start.set()
    slow.wait()
    slow.end()
    assert ended == ["what was made", "queue"]
