"""vLLM's worker takes weights from its own user only (extends verl/workers/rollout/vllm_rollout/utils.py).

verl sends them over a Unix socket whose name another user of the machine can foresee and, because it lies in /tmp, make
first. What comes through it is unpickled, which is running code.
"""

import os
import time
from pathlib import Path

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

_POLL_S = 0.01
_TIMEOUT_S = 300.0


def wait_for_own_socket(socket: Path, timeout_s: float = _TIMEOUT_S) -> None:
    """Until this user's sender has made the socket, which in a folder like /tmp nobody else can replace.

    Raises:
        PermissionError: another user has made it.
        TimeoutError: nobody made it in `timeout_s`.
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
    """verl's worker extension that looks at who sends."""

    def _get_zmq_handle(self) -> str:
        handle = super()._get_zmq_handle()
        wait_for_own_socket(Path(handle.removeprefix("ipc://")))
        return handle
