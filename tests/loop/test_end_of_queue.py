"""A run whose TransferQueue has died ends with its own words: questions without an answer say nothing after them."""

import subprocess
import sys

# With a real client, whose controller is a socket that takes questions and never answers.
PROGRAM = """
import asyncio, gc
import transfer_queue.interface, zmq
from transfer_queue.client import TransferQueueClient
from transfer_queue.utils.enum_utils import Role
from transfer_queue.utils.zmq_utils import ZMQServerInfo
from verl_vcpo.loop.processes.end_of_queue import end_queue

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
