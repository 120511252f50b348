"""A C compiler, Python's headers and a disk to load from: with them Triton compiles the launchers of its kernels, on
every node of a run.

scripts/install_gpu.sh runs this file before anything is installed, so it takes the standard library alone:
`python -m recipe.fully_async_policy.launch.compiler` prints what is missing, and exits with 1.
"""

import os
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path


def missing_for_triton() -> str | None:
    """What Triton would not find, and how to get it, in one line; None: nothing is missing."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    cure = f"apt install gcc {version}-dev"
    given = os.environ.get("CC")
    if given is not None and shutil.which(given) is None:
        return f"CC={given} is no compiler on this machine, and Triton compiles during a run: unset it, or {cure}"
    if given is None and not (shutil.which("gcc") or shutil.which("clang")):
        return f"no C compiler (gcc, clang, or CC), and Triton compiles during a run: {cure}"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # Debian's; Triton does the same
    include = sysconfig.get_paths(scheme=scheme)["include"]
    if not Path(include, "Python.h").is_file():
        return f"no Python.h in {include}, and Triton compiles against it during a run: {cure}"
    usual = {"TORCHINDUCTOR_CACHE_DIR": Path(tempfile.gettempdir()), "TRITON_CACHE_DIR": Path.home() / ".triton"}
    for name, folder in usual.items():
        place = Path(os.environ.get(name) or folder).absolute()
        there = next(above for above in (place, *place.parents) if above.exists())
        if os.statvfs(there).f_flag & os.ST_NOEXEC:
            words = "is mounted noexec, and what Triton compiles during a run is loaded from there"
            return f"{place} {words}: set {name} to a folder on another disk"
    return None


if __name__ == "__main__":
    sys.exit(missing_for_triton())
