"""The socket of vLLM's worker for weights, in the run's folder (extends verl/workers/rollout/vllm_rollout/utils.py).

verl has the socket in /tmp, under a name that another user of the machine can predict, and create before the sender
does. The worker unpickles the messages, which can run any code. Nobody else can enter the run's folder.
"""

import os
import time
from pathlib import Path

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from verl_vcpo.common.run_folder import in_run_folder

_POLL_S = 0.01
_TIMEOUT_S = 300.0


def wait_for_socket(socket: Path, timeout_s: float = _TIMEOUT_S) -> None:
    """Block until the sender has created the socket.

    Raises:
        TimeoutError: the socket was not created in `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while not os.path.lexists(socket):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"vLLM's worker waited {timeout_s:g} s for {socket}, over which weights come: their sender died"
            )
        time.sleep(_POLL_S)


class LagKWorkerExtension(vLLMColocateWorkerExtension):
    """verl's worker extension, which waits for the sender's socket in the run's folder."""

    def _get_zmq_handle(self) -> str:
        handle = in_run_folder(super()._get_zmq_handle())
        wait_for_socket(Path(handle.removeprefix("ipc://")))
        return handle
