"""A function tool in a process that can be killed; verl_vcpo/user_code/killable_process.py loads and calls it there."""

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, ClassVar

from verl_vcpo.user_code.errors import LoadError
from verl_vcpo.user_code.function import Function, load_module

_VERLS = "verl.tools.function_tool"
_SENT = (str, dict, tuple)


class ToolFunction(Function):
    """The tool `name` of the file `path`, verl's `function_tool_path`; `fixed` is empty."""

    limit: ClassVar[str] = "async.tool_timeout_s"

    def checked(self, result: Any) -> Any:
        """What the tool returned. What verl would show as text becomes text: only this process may know the class."""
        return result if isinstance(result, _SENT) or type(result).__name__ == "ToolResponse" else str(result)

    def load(self) -> Callable[..., Any]:
        """The function that the file makes a tool of this name. Raises LoadError."""
        sys.path[:] = self.sys_path
        tools: dict[str, Callable[..., Any]] = {}
        # A stand-in for verl's module: importing verl takes ten seconds, and half a GiB of each process.
        stand_in = sys.modules[_VERLS] = ModuleType(_VERLS)
        stand_in.function_tool = _decorator(tools)  # type: ignore[attr-defined]
        try:
            load_module(self.path)
        except LoadError:  # the file may ask for more of verl than the decorator
            del sys.modules[_VERLS]
            load_module(self.path)
            verls: Any = importlib.import_module(_VERLS)
            tools = {name: tool.fn for name, tool in verls.FUNCTION_TOOL_REGISTRY.items()}
        if self.name not in tools:
            raise LoadError(f"does not load: the file makes no tool {self.name} in another process", "mend it")
        return tools[self.name]


def _decorator(tools: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    """Return verl's decorator `function_tool`, which here notes functions in `tools`: name -> function."""

    def function_tool(name: Any = None, *, schema: Any = None) -> Any:
        def note(function: Callable[..., Any]) -> Callable[..., Any]:
            tools[name if isinstance(name, str) else function.__name__] = function
            return function

        return note(name) if callable(name) and schema is None else note

    return function_tool
