"""Run PROGRAM on fake GPUs: `python -m tests.kit.fake_cuda [--devices N] PROGRAM ...`.

The command needs the interpreter of an environment of scripts/install_gpu.sh, in the root of the repository.
"""

import os
import sys
from pathlib import Path

from tests.kit.fake_cuda.build import HERE, LIBRARIES, build
from tests.kit.start_of_python import python_path

VARIABLE = "VCPO_FAKE_CUDA"  # the folder of the stand-ins, in processes that run on them
STAND_INS = VARIABLE in os.environ  # whether this process runs on stand-ins


def environment(folder: Path, devices: int) -> dict[str, str]:
    """Return the variables of a process that runs on the stand-ins in `folder`."""
    return {
        VARIABLE: str(folder),
        "VCPO_FAKE_CUDA_DEVICES": str(devices),
        "LD_PRELOAD": " ".join(str(folder / library) for library in LIBRARIES),
        "PYTHONPATH": python_path(HERE / "site"),
        "TRITON_LIBCUDA_PATH": str(folder),  # where Triton looks for the driver
        # nothing is compiled for a GPU that is not there
        "TORCHDYNAMO_DISABLE": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        # the processes share the cores: more threads would only wait for each other
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


def main(arguments: list[str]) -> None:
    """Replace this process by the program."""
    devices = 1
    if arguments[:1] == ["--devices"]:
        devices, arguments = int(arguments[1]), arguments[2:]
    os.execve(sys.executable, [sys.executable, *arguments], {**os.environ, **environment(build(), devices)})


if __name__ == "__main__":
    main(sys.argv[1:])
