"""The compilation of the stand-ins for this interpreter's packages, once, into a cache."""

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
CACHE = HERE.parents[2] / "build" / "fake_cuda"
SITE = Path(sysconfig.get_paths()["purelib"])
_TIMEOUT_S = 600

# Library -> (its source, the prefix of its functions' names, the version of its symbols).
LIBRARIES = {
    "libcuda.so.1": ("driver.c", "cu[A-Z]", ""),
    "libcudart.so.13": ("cudart.c", "(?:__)?cuda[A-Z]", "libcudart.so.13"),
    "libnccl.so.2": ("nccl.c", "p?nccl[A-Z]", ""),
}
REDIRECT = "redirect.so"
# The error that a missing function returns: cudaErrorNotSupported, or ncclInvalidUsage for NCCL.
_NOT_THERE = {"libnccl.so.2": 5}


def build() -> Path:
    """Return the folder of the stand-ins, and compile them if the folder is missing.

    Raises:
        RuntimeError: there is no compiler, or the compiler refuses a source, with its message.
    """
    sources = [HERE / source for source, _, _ in LIBRARIES.values()] + [HERE / "redirect.cpp", Path(__file__)]
    content = [str(SITE).encode(), (SITE / "torch" / "version.py").read_bytes(), *(s.read_bytes() for s in sources)]
    folder = CACHE / hashlib.sha256(b"\0".join(content)).hexdigest()[:16]
    if folder.is_dir():
        return folder
    missing = [compiler for compiler in ("gcc", "g++", "nm") if shutil.which(compiler) is None]
    if missing:
        raise RuntimeError(
            f"the stand-ins of tests/kit/fake_cuda need {', '.join(missing)}: install gcc, g++ and binutils"
        )
    CACHE.mkdir(parents=True, exist_ok=True)
    needed = _functions_that_packages_name()
    with tempfile.TemporaryDirectory(dir=CACHE, ignore_cleanup_errors=True) as partial:
        for library in LIBRARIES:
            _compile_library(library, needed, Path(partial))
        _compile_redirect(Path(partial))
        with contextlib.suppress(OSError) if folder.is_dir() else contextlib.nullcontext():  # another process was first
            os.replace(partial, folder)
    return folder


def _functions_that_packages_name() -> set[str]:
    """Return all functions that the binaries of torch, vLLM and cupy take from other libraries."""
    packages = ("vllm", "cupy", "cupy_backends")
    binaries = [
        *(SITE / "torch" / "lib").glob("*.so"),
        *(file for name in packages for file in (SITE / name).rglob("*.so")),
    ]
    listed = _run(["nm", "--dynamic", "--undefined-only", *map(str, binaries)])
    return set(re.findall(r" U (\w+)", listed))


def _compile_library(library: str, needed: set[str], folder: Path) -> None:
    """Compile the stand-in, with functions that return an error for all names that it lacks."""
    source, prefix, version = LIBRARIES[library]
    unit = folder / f"{library}.o"
    includes = [f"-I{path}" for path in (SITE / "nvidia").glob("*/include")]
    _run(["gcc", "-c", "-fPIC", "-O2", "-w", *includes, "-o", str(unit), str(HERE / source)])
    defined = set(re.findall(r" T (\w+)", _run(["nm", str(unit)])))
    others = folder / f"{library}.others.c"
    names = sorted(name for name in needed - defined if re.match(rf"{prefix}\w+$", name))
    body = f'fprintf(stderr, "fake CUDA: %s is not there\\n", __func__); return {_NOT_THERE.get(library, 801)};'
    others.write_text("#include <stdio.h>\n" + "".join(f"int {name}() {{ {body} }}\n" for name in names))
    versions = folder / f"{library}.map"
    versions.write_text(f"{version} {{ global: *; }};\n")
    linking = ["-shared", f"-Wl,-soname,{library}", f"-Wl,--version-script,{versions}"]
    _run(["gcc", "-fPIC", "-O2", "-w", *linking, "-o", str(folder / library), str(unit), str(others), "-lpthread"])


def _compile_redirect(folder: Path) -> None:
    torch = SITE / "torch"
    includes = [torch / "include", torch / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    _run(
        [
            "g++",
            "-shared",
            "-fPIC",
            "-O1",
            "-w",
            "-std=c++17",
            *(f"-I{path}" for path in includes),
            str(HERE / "redirect.cpp"),
            "-o",
            str(folder / REDIRECT),
            f"-L{torch / 'lib'}",
            "-ltorch_cpu",
            "-ltorch_cuda",
            "-lc10",
            "-ltorch_python",
            f"-Wl,-rpath,{torch / 'lib'}",
        ]
    )


def _run(command: list[str]) -> str:
    """Run a command, and return its output."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout
