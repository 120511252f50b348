"""A function that a process loads and calls."""

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar

from verl_vcpo.user_code.errors import LoadError, raised


@dataclass(frozen=True)
class Function:
    """Where a function is, and the limit of its calls."""

    path: str
    """pkg://package.module, or a file: verl's `reward.custom_reward_function.path`."""
    name: str
    fixed: dict[str, Any]
    """Arguments of every call."""
    timeout_s: float
    """The limit of one call."""
    sys_path: list[str] = field(default_factory=lambda: list(sys.path))
    limit: ClassVar[str]
    """The setting that `timeout_s` comes from."""

    def checked(self, result: Any) -> Any:
        """The result of a call, as it is sent back. Raises UserCodeError where the result is of no use."""
        return result

    def load(self) -> Callable[..., Any]:
        """Import and return the function, in a process that has nothing else to do. Raises LoadError."""
        sys.path[:] = self.sys_path
        return load_function(self.path, self.name)


def load_function(path: str, name: str) -> Callable[..., Any]:
    """Import and return a function.

    Raises:
        LoadError: no such file or function, or an import that fails.
    """
    module = load_module(path)
    if callable(function := getattr(module, name, None)):
        return function
    found = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
    there = ", ".join(found) or "none at all"
    raise LoadError(f"does not load: there is no function {name}, but {there}", "name the function")


def load_module(path: str) -> ModuleType:
    """Import and return a package's module or a file. Raises LoadError."""
    file = path.removeprefix("file://")
    try:
        if path.startswith("pkg://"):
            return importlib.import_module(path.removeprefix("pkg://").replace("/", "."))
        spec = importlib.util.spec_from_file_location("user_code", file)
        if os.path.isfile(file) and spec and spec.loader:
            module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    except (Exception, SystemExit) as error:  # a module may raise anything while it loads
        raise LoadError(f"does not load: it {raised(error).what}", "mend its file") from error
    what = f"{file} is no Python file" if os.path.isfile(file) else f"there is no file {file}"
    raise LoadError(f"does not load: {what}", "give the function's file")
