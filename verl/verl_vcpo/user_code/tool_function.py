"""A function tool in a process that can be killed; verl_vcpo/user_code/killable_process.py loads and calls it there."""

import importlib
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

from verl_vcpo.user_code.errors import LoadError
from verl_vcpo.user_code.function import Function, load_module

_VERLS = "verl.tools.function_tool"
_SENT = (str, dict, tuple)
_functions: dict[str, Callable[..., Any]] = {}


class ToolFunction(Function):
    """The tool `name` of the file `path`, verl's `function_tool_path`; `fixed` is empty."""

    limit: ClassVar[str] = "async.tool_timeout_s"

    def checked(self, result: Any) -> Any:
        """What the tool returned. What verl would show as text becomes text: only this process may know the class."""
        return result if isinstance(result, _SENT) or type(result).__name__ == "ToolResponse" else str(result)

    def load(self) -> Callable[..., Any]:
        """The function that the file makes a tool of this name. Raises LoadError."""
        sys.path[:] = self.sys_path
        sys.modules[_VERLS] = _Decorator(_VERLS)
        load_module(self.path)
        verls = sys.modules[_VERLS]
        if not isinstance(verls, _Decorator):
            _functions.update((name, tool.fn) for name, tool in verls.FUNCTION_TOOL_REGISTRY.items())
        if self.name not in _functions:
            raise LoadError(f"does not load: the file makes no tool {self.name} in another process", "mend it")
        return _functions[self.name]


class _Decorator(ModuleType):
    """Stands in for verl's module until a file asks for more than the decorator: importing verl takes ten seconds, and
    half a GiB of each process."""

    @staticmethod
    def function_tool(name: Any = None, *, schema: Any = None) -> Any:
        """Note a function as a tool, with its own name or a given one, as verl's decorator does."""

        def note(function: Callable[..., Any]) -> Callable[..., Any]:
            _functions[name if isinstance(name, str) else function.__name__] = function
            return function

        return note(name) if inspect.isfunction(name) else note

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if sys.modules.get(_VERLS) is self:
            del sys.modules[_VERLS]
        return getattr(importlib.import_module(_VERLS), name)
