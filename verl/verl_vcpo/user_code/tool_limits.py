"""A call of a tool has a limit, `async.tool_timeout_s` (extends verl/tools/).

verl runs a function in the event loop's threads, and a tool with a state in the event loop itself. A call that never
returns keeps a thread, or the whole agent-loop worker. Here

- a function runs in another process, which is killed at the limit (verl_vcpo/user_code/killable.py);
- a tool with a state (verl's `BaseTool`) runs in an event loop in a thread beside the worker's. A call that blocks the
  thread is given up at the limit, and later calls get another thread.

What a tool raises is told to the model, as with verl. A call that reaches the limit fails the prompt.
"""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from verl.tools.function_tool import FunctionTool

from verl_vcpo.user_code.errors import RaisedError, UserCodeError, took_too_long
from verl_vcpo.user_code.killable import Pool, loop_in_thread
from verl_vcpo.user_code.tool_function import ToolFunction

_ANSWER_S = 5.0  # an event loop that has not answered after this time is blocked
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


class ToolThread:
    """An event loop in a thread of its own, for tools with a state. A thread that a call blocks is replaced.

    Args:
        timeout_s: the limit of one call, in seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(
        self, tool: str, method: Callable[..., Coroutine[Any, Any, Any]], /, *given: Any, **named: Any
    ) -> Any:
        """The result of a tool's method. Raises what the method raises, and ToolFailure at the limit."""
        loop = self._loop = self._loop or loop_in_thread("tools")
        work: Future[Any] = asyncio.run_coroutine_threadsafe(method(*given, **named), loop)
        try:
            async with asyncio.timeout(self._timeout_s) as clock:
                return await asyncio.wrap_future(work)
        except TimeoutError:
            if not clock.expired():
                raise  # the tool's own
        if not await _answers(loop) and self._loop is loop:
            self._loop = None
        raise ToolFailure(tool, took_too_long(ToolFunction.limit, self._timeout_s))


def limited(tools: list[Any], function_tool_path: str | None, timeout_s: float) -> list[Any]:
    """verl's tools, each call of which has the limit `timeout_s`.

    Args:
        tools: what `verl.tools.tool_registry.load_all_tools` has returned.
        function_tool_path: the file that the functions are from.
    """
    thread = ToolThread(timeout_s)
    for i, tool in enumerate(tools):
        if isinstance(tool, FunctionTool):
            assert function_tool_path is not None, "functions come from a file"
            pool = Pool(ToolFunction(function_tool_path, tool.name, {}, timeout_s))
            tools[i] = LimitedFunctionTool(tool.name, tool.fn, tool.tool_schema, tool.is_async, pool)
        else:
            for method in _METHODS:
                setattr(tool, method, partial(thread.run, tool.name, getattr(tool, method)))
    return tools


async def _answers(loop: asyncio.AbstractEventLoop) -> bool:
    answered: asyncio.Future[None] = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop))
    done, _ = await asyncio.wait({answered}, timeout=_ANSWER_S)
    answered.cancel()
    return bool(done)
