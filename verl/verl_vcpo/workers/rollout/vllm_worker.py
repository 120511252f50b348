"""vLLM's worker accepts weights of the same user only (extends verl/workers/rollout/vllm_rollout/utils.py).

verl sends weights over a Unix socket in /tmp, whose name another user of the machine can predict, and create before the
sender does. The worker unpickles the messages, which can run any code.
"""

import os
import time
from pathlib import Path

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

_POLL_S = 0.01
_TIMEOUT_S = 300.0


def wait_for_own_socket(socket: Path, timeout_s: float = _TIMEOUT_S) -> None:
    """Block until this user's sender has created the socket; in a folder like /tmp no other user can replace a file.

    Raises:
        PermissionError: another user has created the socket.
        TimeoutError: the socket was not created in `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while not os.path.lexists(socket):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"vLLM's worker waited {timeout_s:g} s for {socket}, over which weights come: their sender died"
            )
        time.sleep(_POLL_S)
    owner = socket.lstat().st_uid
    if owner != os.getuid():
        raise PermissionError(f"{socket}, over which the weights come, is user {owner}'s: refused")


class LagKWorkerExtension(vLLMColocateWorkerExtension):
    """verl's worker extension, which also checks that the sender is the same user."""

    def _get_zmq_handle(self) -> str:
        handle = super()._get_zmq_handle()
        wait_for_own_socket(Path(handle.removeprefix("ipc://")))
        return handle
