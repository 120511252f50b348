"""Megatron-Bridge, imported also where packages that it imports and our models do not use are not installed.

Megatron-Bridge takes base classes and annotations from Transformer Engine, which local layers (local_layers.py) do
without, and from Energon, which reads multimodal data sets. It takes `typing.override` from Python 3.12; laptops may
have Python 3.11.
"""

import importlib.util
import sys
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import typing_extensions
from megatron.core import utils
from megatron.core.extensions import transformer_engine as extension  # notes what is really installed
from packaging.version import Version


class _Placeholder(type):
    """Class of the classes that stand for a missing package's: each has all names."""

    def __getattr__(cls, name: str) -> Any:
        return _placeholder(name)


def _placeholder(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Placeholder(name, (torch.nn.Module,), {})


class _Lender(MetaPathFinder, Loader):
    """Finder of modules that have all names, below the missing packages."""

    def __init__(self, missing: list[str]) -> None:
        self.missing, self.made = missing, list[str]()

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if any(f"{name}.".startswith(f"{package}.") for package in self.missing):
            return ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        module.__getattr__ = _placeholder  # type: ignore[method-assign]
        self.made.append(module.__name__)


@contextmanager
def _lent(missing: list[str]) -> Iterator[None]:
    """Let imports of the missing packages succeed in the block.

    Afterwards the packages are missing again. Modules that were first imported in the block keep `HAVE_TE = True`.
    """
    lender = _Lender(missing)
    sys.meta_path.append(lender)
    if "transformer_engine" in missing:
        utils._te_version = Version("2.20")  # Megatron compares it while its layer specifications are imported
    try:
        yield
    finally:
        sys.meta_path.remove(lender)
        for name in lender.made:
            del sys.modules[name]
        if "transformer_engine" in missing:
            utils._te_version = None


def _missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None


if sys.version_info < (3, 12):
    typing.override = typing_extensions.override  # type: ignore[attr-defined]

with _lent(list(filter(_missing, ("transformer_engine", "megatron.energon")))):
    import megatron.bridge.training.config  # noqa: F401  # verl imports it when it builds a model
    from megatron.bridge import AutoBridge as AutoBridge
    from megatron.bridge.models.conversion.param_mapping import AutoMapping as AutoMapping
    from megatron.bridge.peft import utils as adapters

adapters.HAVE_TE = extension.HAVE_TE  # without Transformer Engine it compares layers with classes that are None
