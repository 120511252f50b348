"""What of this machine a program in the sandbox can see: the interpreter, its libraries and the packages it may use."""

import contextlib
import ctypes
import importlib.metadata
import os
import re
import site
import sys
from pathlib import Path

_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x20000, 0x1000, 0x4000, 1 << 18, 2

_STAGING = Path("/run")  # root's own, and every user can enter it


def package_paths(names: list[str]) -> list[Path]:
    """The files and folders of these distributions and of all they require.

    Raises:
        ValueError: one of them is not installed.
    """
    paths: dict[Path, None] = {}
    seen: set[str] = set()
    while names:
        name = names.pop()
        if name in seen:
            continue
        seen.add(name)
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            raise ValueError(f"--packages: {name} is not installed here; `pip install {name}`") from None
        names += [
            re.match(r"[\w.-]+", requirement).group()  # type: ignore[union-attr]
            for requirement in distribution.requires or []
            if ";" not in requirement
        ]
        for file in distribution.files or []:
            if file.parts[0] not in ("..", "__pycache__"):
                paths[Path(distribution.locate_file(file.parts[0])).resolve()] = None
    return list(paths)


def system_paths() -> list[Path]:
    """The interpreter's own installation and the system's libraries."""
    base = Path(sys.base_prefix).resolve()
    return [Path("/usr"), *([] if base.is_relative_to("/usr") else [base])]


def base_packages() -> list[Path]:
    """Folders of packages inside `system_paths`: none of them is for programs, and they slow the interpreter down."""
    return [Path(folder) for folder in site.getsitepackages([sys.base_prefix]) if Path(folder).is_dir()]


def _clear_up() -> None:
    """Remove the empty folders that killed servers left."""
    for folder in _STAGING.glob("vcpo-sandbox-*"):
        if not Path(f"/proc/{folder.name.split('-')[2]}").exists():
            with contextlib.suppress(OSError):
                folder.rmdir()


class Staging:
    """As root: the paths again, where a user without rights reaches them, below a folder nobody else sees.

    The sandbox's user cannot enter /root, and the environment may lie there. This process gets a mount namespace of
    its own; the processes that it starts inherit it.

    Raises:
        OSError: this process may not make a mount namespace.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._call("unshare", _CLONE_NEWNS)
        self._mount(b"none", "/", None, _MS_REC | _MS_PRIVATE, None)
        _clear_up()
        self._folder = _STAGING / f"vcpo-sandbox-{os.getpid()}"
        self._folder.mkdir(mode=0o755)
        self._mount(b"tmpfs", str(self._folder), b"tmpfs", 0, b"size=1m,mode=755")
        self.source_of: dict[Path, Path] = {}
        for i, path in enumerate(paths):
            place = self._folder / str(i)
            place.mkdir() if path.is_dir() else place.touch()
            self._mount(os.fsencode(path), str(place), None, _MS_BIND | _MS_REC, None)
            self.source_of[path] = place

    def close(self) -> None:
        """Undo it, as far as it can be seen outside."""
        self._call("umount2", os.fsencode(self._folder), _MNT_DETACH)
        self._folder.rmdir()

    def _mount(self, source: bytes, target: str, kind: bytes | None, flags: int, data: bytes | None) -> None:
        self._call("mount", source, os.fsencode(target), kind, flags, data)

    def _call(self, name: str, *arguments: bytes | int | None) -> None:
        if getattr(self._libc, name)(*arguments):
            error = ctypes.get_errno()
            raise OSError(error, f"{name}: {os.strerror(error)}")
