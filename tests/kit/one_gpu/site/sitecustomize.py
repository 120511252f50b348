"""Every GPU that Ray hands out is the machine's first GPU, and NCCL takes every process for a machine of its own.

NCCL refuses two processes on one GPU of one machine; processes of different machines it connects by sockets. Python
imports a module of this name at its start; `python -m tests.kit.one_gpu` puts this folder on PYTHONPATH.
"""

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_MODULE = "ray._private.accelerators.nvidia_gpu"
_MOST = 16  # GPUs that a run can have


def _devices() -> list[str]:
    """Return the GPUs that a process sees, in the order in which Ray numbers GPUs: each is the first one."""
    return ["0"] * _MOST


class _AfterRay(importlib.abc.MetaPathFinder):
    """A finder of Ray's module for NVIDIA's GPUs that redirects the devices after the module's own code has run."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_redirect(module: ModuleType) -> None:
            run(module)
            module.NvidiaGPUAcceleratorManager.get_current_process_visible_accelerator_ids = staticmethod(_devices)

        spec.loader.exec_module = run_and_redirect  # type: ignore[method-assign]
        return spec


if "VCPO_ONE_GPU" in os.environ:
    os.environ["NCCL_HOSTID"] = f"process {os.getpid()}"
    sys.meta_path.insert(0, _AfterRay())
