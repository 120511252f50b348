"""A run's folder on a machine: its Unix sockets, and the session of a Ray of its own. Other users cannot enter it.

Not in `run_dir`: the path of a Unix socket has at most 107 bytes, and several machines may share the disk of `run_dir`.
"""

import os
import platform
import stat
import zlib
from pathlib import Path

from verl_vcpo.common.run_id import RUN_ID_VARIABLE


def private_folder() -> Path:
    """Return this user's folder for files of runs on this machine, of mode 0700. Ray opens its own to everyone.

    Raises:
        OSError: see `own_folder`.
    """
    from ray._common.utils import get_default_system_temp_dir

    return own_folder(Path(get_default_system_temp_dir()) / f"vcpo-{os.getuid()}", "RAY_TMPDIR")


def own_folder(folder: Path, variable: str) -> Path:
    """Make a folder of mode 0700, and return it.

    Args:
        variable: the environment variable that names another place for it.

    Raises:
        PermissionError: somebody else made the folder, or others can enter it.
        OSError: the folder cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise type(error)(f"{folder} cannot be made ({error.strerror}); set {variable} to another place") from None
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise PermissionError(
            f"{folder} is not a folder of yours with mode 0700; set {variable} to a folder that may have another"
        )
    return folder


def run_folder(run_id: str) -> Path:
    """Return the folder of the run on this machine, which need not exist yet. The name differs between machines.

    Machines may share /tmp, and the clean-up after a lost machine must leave the sockets of other machines.

    Raises:
        OSError: see `private_folder`.
    """
    return private_folder() / f"{run_id}{zlib.crc32(platform.node().encode()) & 0xFFFF:04x}"


def socket_folder() -> Path:
    """Return the folder of this process's run on this machine, and make the folder if it is missing.

    Raises:
        OSError: see `private_folder`.
    """
    folder = run_folder(os.environ[RUN_ID_VARIABLE])
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def in_run_folder(address: str) -> str:
    """Return the address of a ZeroMQ socket, `ipc://PATH`, in the folder of this process's run.

    Raises:
        OSError: see `private_folder`.
    """
    return f"ipc://{socket_folder() / Path(address).name}"
