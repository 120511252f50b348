"""What every process of a run does before it imports the packages of the stack."""

import gc
import multiprocessing
import os

from verl_vcpo.common import queue_sockets
from verl_vcpo.common.run_folder import socket_folder
from verl_vcpo.common.run_id import RUN_ID_VARIABLE


def set_up_process() -> None:
    """Encrypt TransferQueue's sockets, and let Python look for garbage after 50,000 new objects, not after 700.

    Sockets of Python's multiprocessing are in the run's folder, which is removed even if this process is killed.

    Imports of torch, vLLM and Megatron make millions of objects that stay; each look walks over them for nothing. Rare
    looks spare a process a fifth of the processor time of its imports.
    """
    queue_sockets.encrypt()
    if RUN_ID_VARIABLE in os.environ:
        # multiprocessing.util.get_temp_dir looks here, and makes a folder in TMPDIR otherwise. Children inherit it.
        multiprocessing.current_process()._config["tempdir"] = str(socket_folder())  # type: ignore[attr-defined]
    gc.set_threshold(50_000, 20, 20)
