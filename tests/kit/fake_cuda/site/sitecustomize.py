"""The redirection of CUDA's operations to the CPU in each Python process of a rehearsal, once torch is imported.

Python imports a module of this name at its start; `python -m tests.kit.fake_cuda` puts this folder on PYTHONPATH.
"""

import os
from types import ModuleType

from tests.kit.start_of_python import after_import


def _install(torch: ModuleType) -> None:
    from tests.kit.fake_cuda import operations

    operations.install()


if "VCPO_FAKE_CUDA" in os.environ:
    after_import("torch", _install)
