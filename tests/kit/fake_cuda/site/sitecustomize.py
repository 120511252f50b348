"""The redirection of CUDA's operations to the CPU in each Python process of a rehearsal, once torch is imported.

Python imports a module of this name at its start; `python -m tests.kit.fake_cuda` puts this folder on PYTHONPATH.
"""

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _AfterTorch(importlib.abc.MetaPathFinder):
    """A finder of torch that installs `tests.kit.fake_cuda.operations` after torch's own code has run."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_install(module: ModuleType) -> None:
            run(module)
            from tests.kit.fake_cuda import operations

            operations.install()

        spec.loader.exec_module = run_and_install  # type: ignore[method-assign]
        return spec


if "VCPO_FAKE_CUDA" in os.environ:
    sys.meta_path.insert(0, _AfterTorch())
