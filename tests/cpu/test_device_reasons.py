"""The CPU's classes override only what the device needs: all else is what a GPU runs, and what tests on a CPU test."""

import importlib
import pkgutil
from types import ModuleType

import pytest

from verl_vcpo import cpu

# Python gives each class these.
GIVEN = {"__module__", "__doc__", "__annotations__", "__dict__", "__weakref__", "__abstractmethods__", "_abc_impl"}
MODULES = [importlib.import_module(f"{cpu.__name__}.{module.name}") for module in pkgutil.iter_modules(cpu.__path__)]


def of_cpu(cls: type) -> bool:
    return cls.__module__.startswith(f"{cpu.__name__}.")


def overrides(module: ModuleType) -> set[str]:
    """Class.attribute of what the module's classes that have a base in the product change in any of their bases."""
    found = set()
    for cls in vars(module).values():
        if not isinstance(cls, type) or cls.__module__ != module.__name__:
            continue
        bases = [base for base in cls.__mro__ if not of_cpu(base) and base is not object]
        if not any(base.__module__.startswith("verl_vcpo.") for base in bases):
            continue
        inherited = {name for base in bases for name in vars(base)} - GIVEN
        for ours in filter(of_cpu, cls.__mro__):
            found |= {f"{ours.__name__}.{name}" for name in vars(ours).keys() & inherited}
    return found


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_each_override_has_its_reason(module: ModuleType) -> None:
    """Fails for an override without a reason in the module's DEVICE_REASONS, and for a reason without its override."""
    reasons = getattr(module, "DEVICE_REASONS", {})
    assert overrides(module) == reasons.keys()
    assert all(reasons.values())


def test_the_engines_are_looked_at() -> None:
    """Catches a search that finds nothing."""
    engine = next(module for module in MODULES if module.__name__.endswith(".engine"))
    assert {"_OnCPU.__init__", "_OnCPU.optimizer_step"} <= overrides(engine)
