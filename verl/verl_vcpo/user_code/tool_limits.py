"""A call of a tool has a limit, `async.tool_timeout_s` (extends verl/tools/).

verl runs a function in the event loop's threads, and a call that never returns keeps its thread. Here a function runs
in another process, which is killed at the limit (verl_vcpo/user_code/killable.py). A tool with a state (verl's
`BaseTool`) stays in the worker's event loop: its calls are cancelled at the limit. One that blocks the event loop ends
the run (`LagKAgentLoopManager.raise_blocked`).

What a tool raises is told to the model, as with verl. A call that reaches the limit fails the prompt.
"""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from verl.tools.function_tool import FunctionTool

from verl_vcpo.user_code.errors import RaisedError, UserCodeError, took_too_long
from verl_vcpo.user_code.killable import Pool
from verl_vcpo.user_code.tool_function import ToolFunction

_METHODS = ("create", "execute", "calc_reward", "release")


class ToolFailure(BaseException):
    """A call of a tool gave no result. No `Exception`: agent loops tell these to the model, and go on.

    Args:
        tool: the tool's name.
        error: why.
    """

    def __init__(self, tool: str, error: UserCodeError) -> None:
        super().__init__(tool, error)
        self.error = UserCodeError(f"the tool {tool} {error.what}", error.fix)


@dataclass
class LimitedFunctionTool(FunctionTool):
    """verl's carrier of a function, which calls the function in a process of `pool`."""

    pool: Pool | None = None

    async def call(self, parameters: dict[str, Any]) -> Any:
        """What the function returns.

        Raises:
            RuntimeError: the function raised; with the exception's text.
            ToolFailure: the function took longer than the limit, or ended its process.
        """
        assert self.pool is not None
        try:
            return await self.pool.call(parameters)
        except RaisedError as error:
            raise RuntimeError(error.said) from None
        except UserCodeError as error:
            raise ToolFailure(self.name, error) from None


def limited(tools: list[Any], function_tool_path: str | None, timeout_s: float) -> list[Any]:
    """verl's tools, each call of which has the limit `timeout_s`.

    Args:
        tools: what `verl.tools.tool_registry.load_all_tools` has returned.
        function_tool_path: the file that the functions are from.
    """
    for i, tool in enumerate(tools):
        if isinstance(tool, FunctionTool):
            assert function_tool_path is not None, "functions come from a file"
            pool = Pool(ToolFunction(function_tool_path, tool.name, {}, timeout_s))
            tools[i] = LimitedFunctionTool(tool.name, tool.fn, tool.tool_schema, tool.is_async, pool)
        else:
            for method in _METHODS:
                setattr(tool, method, _limited(tool.name, getattr(tool, method), timeout_s))
    return tools


def _limited(
    tool: str, method: Callable[..., Coroutine[Any, Any, Any]], timeout_s: float
) -> Callable[..., Coroutine[Any, Any, Any]]:
    async def call(*given: Any, **named: Any) -> Any:
        try:
            async with asyncio.timeout(timeout_s) as clock:
                return await method(*given, **named)
        except TimeoutError:
            if not clock.expired():
                raise  # the tool's own
            raise ToolFailure(tool, took_too_long(ToolFunction.limit, timeout_s)) from None

    return call
