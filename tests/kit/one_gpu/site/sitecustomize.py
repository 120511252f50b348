"""Every GPU that Ray hands out is the machine's first GPU, and NCCL takes every process for a machine of its own.

NCCL refuses two processes on one GPU of one machine; processes of different machines it connects by sockets. Python
imports a module of this name at its start; `python -m tests.kit.one_gpu` puts this folder on PYTHONPATH.
"""

import os
from types import ModuleType

from tests.kit.start_of_python import after_import

_MOST = 16  # GPUs that a run can have


def _devices() -> list[str]:
    """Return the GPUs that a process sees, in the order in which Ray numbers GPUs: each is the first one."""
    return ["0"] * _MOST


def _redirect(of_ray: ModuleType) -> None:
    of_ray.NvidiaGPUAcceleratorManager.get_current_process_visible_accelerator_ids = staticmethod(_devices)


if "VCPO_ONE_GPU" in os.environ:
    os.environ["NCCL_HOSTID"] = f"process {os.getpid()}"
    after_import("ray._private.accelerators.nvidia_gpu", _redirect)
