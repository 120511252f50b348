"""What every process of a run does before it imports the packages of the stack."""

import gc
import multiprocessing

from verl_vcpo.common import queue_sockets
from verl_vcpo.common.run_folder import socket_folder


def set_up_process() -> None:
    """Encrypt TransferQueue's sockets, and let Python look for garbage after 50,000 new objects, not after 700.

    Imports of torch, vLLM and Megatron make millions of objects that stay; each look walks over them for nothing. Rare
    looks spare a process a fifth of the processor time of its imports.
    """
    queue_sockets.encrypt()
    gc.set_threshold(50_000, 20, 20)


def set_up_worker() -> None:
    """`set_up_process`, in a process that the run has started."""
    set_up_process()
    keep_sockets_in_run_folder()


def keep_sockets_in_run_folder() -> None:
    """Have Python's multiprocessing make its sockets in the folder of the run, which goes with the run.

    A process that is killed does not remove a folder of its own. multiprocessing.util.get_temp_dir looks where this
    function writes, and makes a folder in TMPDIR otherwise. Children inherit the folder.

    Raises:
        PermissionError: the folder of the run cannot be made (`run_folder.private_folder`).
    """
    multiprocessing.current_process()._config["tempdir"] = str(socket_folder())  # type: ignore[attr-defined]
