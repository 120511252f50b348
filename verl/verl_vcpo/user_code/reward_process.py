"""The process in which a reward, or a tool, runs and can be killed: started by `verl_vcpo.user_code.reward` only.

Messages are pickles on a socket, which is standard input: first a `Reward`, answered by whether it is a coroutine
function or a `RewardLoadError`; then calls (number, arguments), each answered by (number, pickled result, RewardError).
"""

import asyncio
import ctypes
import importlib
import importlib.util
import inspect
import os
import pickle
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar

from verl_vcpo.user_code.reward_result import RewardError, RewardLoadError, checked, raised, took_too_long

LENGTH = struct.Struct("!Q")
"""The header of every message: the length in bytes."""
_PR_SET_PDEATHSIG = 1
_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
"""Of every call, by verl's reward managers."""


@dataclass(frozen=True)
class Reward:
    """A reward function, and how to load and call the function."""

    path: str
    """pkg://package.module, or a file: verl's `reward.custom_reward_function.path`."""
    name: str
    fixed: dict[str, Any]
    """Arguments of every call."""
    timeout_s: float
    """Limit of one call of a coroutine function. A call of another function is ended by killing the process."""
    sys_path: list[str]
    limit: ClassVar[str] = "async.reward_timeout_s"
    """The setting that `timeout_s` comes from."""

    def checked(self, result: Any) -> Any:
        """What a call returned, as it is sent back. Raises RewardError where that cannot be used."""
        return checked(result)

    def load(self) -> Callable[..., Any]:
        """Import and return the function.

        Raises:
            RewardLoadError: no such file or function, an import that fails, or a function that takes other arguments.
        """
        sys.path[:] = self.sys_path
        try:
            module = self._module()
        except RewardLoadError:
            raise
        except (Exception, SystemExit) as error:
            raise RewardLoadError(f"does not load: it {raised(error).what}", "mend its file") from error
        return self._of(module)

    def _module(self) -> ModuleType:
        if self.path.startswith("pkg://"):
            return importlib.import_module(self.path.removeprefix("pkg://").replace("/", "."))
        file = self.path.removeprefix("file://")
        if not os.path.isfile(file):
            raise RewardLoadError(f"does not load: there is no file {file}", "give the function's file")
        spec = importlib.util.spec_from_file_location("custom_reward", file)
        if spec is None or spec.loader is None:
            raise RewardLoadError(f"does not load: {file} is no Python file", "give the function's file")
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def _of(self, module: ModuleType) -> Callable[..., Any]:
        function = getattr(module, self.name, None)
        if not callable(function):
            functions = [name for name, value in vars(module).items() if inspect.isfunction(value)]
            raise RewardLoadError(
                f"does not load: there is no function {self.name}, but {', '.join(functions) or 'none at all'}",
                "name the function",
            )
        try:
            inspect.signature(function).bind(**dict.fromkeys(_ARGUMENTS), **self.fixed)
        except TypeError as error:
            raise RewardLoadError(
                f"cannot be called with {', '.join([*_ARGUMENTS, *self.fixed])}: {error}", "give it these parameters"
            ) from None
        except ValueError:  # a function of C code, whose parameters are not known
            pass
        return function


def packed(message: object) -> bytes:
    """The bytes of a message on the socket."""
    data = pickle.dumps(message)
    return LENGTH.pack(len(data)) + data


def main() -> None:
    """Serve calls until the other side closes the socket."""
    # The kernel kills this process when its parent, the reward worker, ends, even during a call that never returns.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    stream = connection.makefile("rwb")
    reward: Reward = _read(stream)
    try:
        function = reward.load()
    except RewardLoadError as error:
        traceback.print_exc()
        stream.write(packed(error))
        stream.flush()
        return
    is_async = inspect.iscoroutinefunction(function)
    stream.write(packed(is_async))
    stream.flush()
    if is_async:
        asyncio.run(_serve_all_at_once(connection, function, reward))
    else:
        _serve_one_by_one(stream, function, reward)


def _serve_one_by_one(stream: Any, function: Callable[..., Any], reward: Reward) -> None:
    while True:
        try:
            number, arguments = _read(stream)
        except EOFError:
            return
        try:
            reply = packed((number, pickle.dumps(reward.checked(function(**arguments, **reward.fixed))), None))
        except RewardError as error:
            reply = packed((number, None, error))
        except BaseException as error:  # a reward may also call sys.exit
            traceback.print_exc()
            reply = packed((number, None, raised(error)))
        stream.write(reply)
        stream.flush()


async def _serve_all_at_once(connection: socket.socket, function: Callable[..., Any], reward: Reward) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)

    async def serve(number: int, arguments: dict[str, Any]) -> None:
        try:
            async with asyncio.timeout(reward.timeout_s) as clock:
                result = await function(**arguments, **reward.fixed)
            reply = packed((number, pickle.dumps(reward.checked(result)), None))
        except RewardError as error:
            reply = packed((number, None, error))
        except BaseException as error:
            traceback.print_exc()
            late = isinstance(error, TimeoutError) and clock.expired()
            reply = packed((number, None, took_too_long(reward.limit, reward.timeout_s) if late else raised(error)))
        writer.write(reply)

    tasks: set[asyncio.Task[None]] = set()
    while True:
        try:
            (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            number, arguments = pickle.loads(await reader.readexactly(length))
        except asyncio.IncompleteReadError:
            return
        task = asyncio.create_task(serve(number, arguments))
        tasks.add(task)  # asyncio's loop holds tasks by weak references only
        task.add_done_callback(tasks.discard)


def _read(stream: Any) -> Any:
    header = stream.read(LENGTH.size)
    if len(header) < LENGTH.size:
        raise EOFError
    return pickle.loads(stream.read(*LENGTH.unpack(header)))


if __name__ == "__main__":
    main()
