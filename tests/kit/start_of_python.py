"""Code of ours in every Python process that a program starts: Python imports a `sitecustomize` that PYTHONPATH has."""

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from tests.kit import ROOT


def python_path(site: Path) -> str:
    """Return a PYTHONPATH that begins with `site`, and has the project before an environment's installation of it."""
    first = [site, ROOT, Path(ROOT) / "verl", Path(ROOT) / "sandbox" / "src"]
    return os.pathsep.join([*map(str, first), *filter(None, [os.environ.get("PYTHONPATH")])])


class _After(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name, self._change = name, change

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            self._change(module)

        spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


def after_import(name: str, change: Callable[[ModuleType], None]) -> None:
    """Call `change(module)` once, when the module `name` is imported, after the module's own code has run."""
    sys.meta_path.insert(0, _After(name, change))
