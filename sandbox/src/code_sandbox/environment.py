"""The parts of this machine that a program in the sandbox sees: interpreter, libraries, and packages it may use."""

import contextlib
import ctypes
import importlib.metadata
import os
import re
import site
import sys
import sysconfig
from pathlib import Path
from typing import cast

from code_sandbox.owned_folder import OwnedFolder, abandoned

_CLONE_NEWNS, _MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 0x20000, 0x1000, 0x4000, 1 << 18, 2

_STAGING = Path("/run")  # root's own, and every user can enter it
PACKAGES = Path("/packages")
"""The folder in which a program finds its packages."""
PYTHON = Path("/python")
"""The interpreter's folder inside the sandbox, unless the interpreter is the system's."""


def package_paths(names: list[str]) -> list[Path]:
    """Return the files and folders of these distributions and of all that they require.

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
            re.match(r"[\w.-]+", requirement).group()  # type: ignore[union-attr]  # it begins with a name
            for requirement in distribution.requires or []
            if ";" not in requirement
        ]
        for file in distribution.files or []:
            if file.parts[0] not in ("..", "__pycache__") and not file.is_absolute():
                paths[Path(cast(Path, distribution.locate_file(file.parts[0]))).resolve()] = None
    return list(paths)


# A package whose parts are imported when they are named, not with it.
_PARTS = {"scipy": ("scipy.integrate", "scipy.linalg", "scipy.optimize", "scipy.special")}


def modules_of(names: list[str]) -> tuple[str, ...]:
    """Return the modules that programs import from these distributions."""
    modules: list[str] = []
    for name in names:
        for file in importlib.metadata.distribution(name).files or []:
            if len(file.parts) == 2 and file.parts[1] == "__init__.py" and file.parts[0].isidentifier():
                modules += _PARTS.get(file.parts[0], (file.parts[0],))
    return tuple(modules)


def interpreter_places() -> tuple[dict[Path, Path], Path]:
    """Return the places of Python and its libraries, (path here -> path inside), and the interpreter's path inside.

    Nothing else of /usr is inside: no other program, no configuration. Python's own folder has another name inside, so
    that a program does not learn who installed Python.
    """
    executable, base = Path(sys.executable).resolve(), Path(sys.base_prefix).resolve()
    libraries = [Path("/usr/lib") / str(sysconfig.get_config_var("MULTIARCH")), Path("/usr/lib64")]
    folders = [*libraries, Path("/lib"), Path("/lib64"), Path("/usr/share/zoneinfo")]
    places = {path: path for path in folders if path.is_dir() and not path.is_symlink()}
    if base.is_relative_to("/usr"):
        inside = executable
        places |= {path: path for path in (executable, Path(sysconfig.get_path("stdlib")).resolve())}
    else:
        inside = PYTHON / executable.relative_to(base)
        places |= {executable: inside, base / "lib": PYTHON / "lib"}
    return places, inside


def packages_of_the_system(places: dict[Path, Path]) -> list[Path]:
    """Return the folders of packages inside `places`, which are not for programs and slow the interpreter down."""
    found = []
    for folder in map(Path, site.getsitepackages([sys.base_prefix])):
        for source, place in places.items():
            if folder.is_dir() and folder.resolve().is_relative_to(source):
                found.append(place / folder.resolve().relative_to(source))
    return found


def links_of_the_root() -> dict[str, str]:
    """Return the symbolic links of the root folder by which libraries are found: name -> target."""
    return {name: os.readlink(f"/{name}") for name in ("lib", "lib64") if os.path.islink(f"/{name}")}


class Staging:
    """The root user's second set of paths, which a user without rights can reach, below a folder nobody else sees.

    The sandbox's user cannot enter /root, and the environment may lie there. This process gets a mount namespace of
    its own, which its children inherit.

    Raises:
        OSError: this process may not make a mount namespace.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._call("unshare", _CLONE_NEWNS)
        self._mount(b"none", "/", None, _MS_REC | _MS_PRIVATE, None)
        for left in abandoned(_STAGING):
            with contextlib.suppress(OSError):  # not empty: then it is not a staging folder
                left.rmdir()
        self._folder = OwnedFolder(_STAGING)
        self._mount(b"tmpfs", str(self._folder.path), b"tmpfs", 0, b"size=1m,mode=755")
        self.source_of: dict[Path, Path] = {}
        for i, path in enumerate(paths):
            place = self._folder.path / str(i)
            place.mkdir() if path.is_dir() else place.touch()
            self._mount(os.fsencode(path), str(place), None, _MS_BIND | _MS_REC, None)
            self.source_of[path] = place

    def close(self) -> None:
        """Remove the folder with all paths; the mount namespace stays."""
        self._call("umount2", os.fsencode(self._folder.path), _MNT_DETACH)
        self._folder.close()

    def _mount(self, source: bytes, target: str, kind: bytes | None, flags: int, data: bytes | None) -> None:
        self._call("mount", source, os.fsencode(target), kind, flags, data)

    def _call(self, name: str, *arguments: bytes | int | None) -> None:
        if getattr(self._libc, name)(*arguments):
            error = ctypes.get_errno()
            raise OSError(error, f"{name}: {os.strerror(error)}")
