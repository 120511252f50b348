"""The set-up of every process of a run, before the process imports the packages of the stack."""

import contextlib
import gc
import os
import tempfile
from collections.abc import Iterator, Mapping

from verl_vcpo.common import machine, queue_sockets
from verl_vcpo.common.run_folder import socket_folder
from verl_vcpo.common.run_id import RUN_ID_VARIABLE


def set_up_process() -> None:
    """Adapt the environment to the packages of the stack, encrypt TransferQueue's sockets, and collect garbage rarely:
    after 50,000 new objects, not after 700.

    Imports of torch, vLLM and Megatron make millions of objects that stay, and each collection walks over all of them.
    Rare collections spare a process a fifth of the processor time of its imports.
    """
    machine.adapt_environment()
    queue_sockets.encrypt()
    gc.set_threshold(50_000, 20, 20)


def set_up_worker() -> None:
    """Set up a process of Ray's: `set_up_process`, and where Ray is a run's, temporary files in the run's folder."""
    set_up_process()
    if RUN_ID_VARIABLE in os.environ:
        os.environ.update(_places())
        tempfile.tempdir = None  # read again, from TMPDIR


@contextlib.contextmanager
def temporary_files_in_run_folder() -> Iterator[None]:
    """Put temporary files of this process and its children into the folder of the run, for the block.

    A process that is killed does not remove its temporary files; the run's folder goes with the run.

    Raises:
        PermissionError: the folder of the run cannot be made (`run_folder.private_folder`).
    """
    try:
        with environment(_places()):
            tempfile.tempdir = None
            yield
    finally:
        tempfile.tempdir = None


@contextlib.contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the block."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _places() -> dict[str, str]:
    """Return environment variables; RAY_TMPDIR leads processes to the run's folder."""
    folder = socket_folder()
    return {"RAY_TMPDIR": str(folder.parents[1]), "TMPDIR": str(folder)}
