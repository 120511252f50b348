"""Custom rewards in separate processes, which are killed when a call hangs (extends verl/trainer/ppo/reward.py).

verl calls a custom reward function in threads of its reward workers. A function that never returns, or that holds
Python's global lock in an endless expression, stops the worker and with it the run. Here the reward workers load
`compute_score` of this module instead, which passes every call to another process. A process that does not answer in
time is killed. A call that fails raises an error that names the reward and the prompt, and never gives a score.
"""

import asyncio
import contextlib
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_vcpo.user_code import reward_process
from verl_vcpo.user_code.reward_process import LENGTH, Reward, packed
from verl_vcpo.user_code.reward_result import RewardError, RewardLoadError, of_response, took_too_long

_START_LIMIT_S = 300.0  # a reward may load a model
# Another process is started when no process has become free for so long: a reward of milliseconds then needs one
# process, and a reward that waits for a judge gets as many processes as verl has threads.
_FREE_PROCESS_WAIT_S = 0.2
_MOST_PROCESSES = min(32, (os.cpu_count() or 1) + 4)
_MOST_COROUTINES = 1024  # in one process
_GRACE_S = 5.0  # beyond the limit at which a process ends its coroutines: then one of them blocks the process
_MEND = "mend the function"


def bound_custom_reward(config: DictConfig) -> None:
    """Have verl's reward workers call a configured custom reward function through `compute_score`."""
    custom = config.reward.custom_reward_function
    if not custom.get("path"):
        return
    own = OmegaConf.to_container(custom, resolve=True)
    with open_dict(config):
        config.reward.custom_reward_function = {
            "path": f"pkg://{__name__}",
            "name": compute_score.__name__,
            "reward_kwargs": {
                "reward_path": own["path"],
                "reward_name": own["name"],
                "reward_fixed": own.get("reward_kwargs") or {},
                "reward_timeout_s": config["async"].reward_timeout_s,
            },
        }


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    reward_path: str,
    reward_name: str,
    reward_fixed: Mapping[str, Any],
    reward_timeout_s: float,
    **more_fixed: Any,
) -> Any:
    """Score one response (verl's custom reward function) with the function `reward_name` of `reward_path`.

    more_fixed: further arguments of verl's, the same at every call: the address and the tokenizer of a reward model.
    Raises RewardError naming the reward, the row of the data and the response.
    """
    key = (reward_path, reward_name)
    if key not in _pools:  # a reward worker has one pool for each function
        fixed = {**OmegaConf.to_container(OmegaConf.create(dict(reward_fixed))), **more_fixed}
        reward = Reward(reward_path, reward_name, fixed, reward_timeout_s, sys.path)
        _pools[key] = RewardPool(reward)
    arguments = {
        "data_source": data_source,
        "solution_str": solution_str,
        "ground_truth": ground_truth,
        "extra_info": extra_info,
    }
    try:
        return await _pools[key].score(arguments)
    except RewardError as error:
        row, reward_itself = (extra_info or {}).get("index"), f"{reward_path}:{reward_name}"
        raise of_response(error, reward_itself, row, data_source, solution_str) from None


class RewardPool:
    """Processes that have loaded a reward or a tool: each runs one call at a time, or very many of a coroutine.

    Args:
        most: processes at a time.
        quiet: drop what the reward prints; otherwise it goes to the standard error of this process.
    """

    def __init__(self, reward: Reward, most: int = _MOST_PROCESSES, quiet: bool = False) -> None:
        self._reward, self._most, self._quiet = reward, most, quiet
        self._slots: asyncio.LifoQueue[_Process] = asyncio.LifoQueue()
        self._growing = asyncio.Lock()
        self._processes: list[_Process] = []
        self._does_not_load: RewardError | None = None

    async def score(self, arguments: dict[str, Any]) -> Any:
        """The reward's result. The wait for a free process has no limit; the time limit begins with the call.

        Raises:
            RewardError: there is no score.
        """
        process = await self._take()
        try:
            return await process.ask(arguments)
        finally:
            if process.alive:
                self._slots.put_nowait(process)

    def close(self) -> None:
        """Kill the processes."""
        for process in self._processes:
            process.kill()

    async def _take(self) -> "_Process":
        while True:
            try:
                async with asyncio.timeout(_FREE_PROCESS_WAIT_S if self._processes else 0):
                    process = await self._slots.get()
            except TimeoutError:
                await self._grow()
                continue
            if process.alive:
                return process

    async def _grow(self) -> None:
        async with self._growing:
            self._processes = [process for process in self._processes if process.alive]
            if not self._slots.empty() or len(self._processes) >= self._most:
                return
            if self._does_not_load:
                raise RewardLoadError(*self._does_not_load.args)
            try:
                process = await _Process.started(self._reward, self._quiet)
            except RewardError as error:
                if not self._processes:  # remembered, or every waiting call would try to start a process
                    self._does_not_load = error
                raise
            self._processes.append(process)
            for _ in range(process.room):
                self._slots.put_nowait(process)


class _Process:
    """One process and the calls that it runs."""

    # set by `started`
    _reader: asyncio.StreamReader
    _writer: asyncio.StreamWriter
    _listener: asyncio.Task[None]

    def __init__(self, reward: Reward, quiet: bool) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", reward_process.__name__],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL if quiet else 2,  # a reward's output goes to the worker's log
                stderr=subprocess.DEVNULL if quiet else None,
                start_new_session=True,  # a process group, to be killed with all processes that the reward starts
            )
        self._connection = ours
        self._reward, self._limit_s = reward, reward.timeout_s
        self._numbers = itertools.count()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self.alive, self.room = True, 1

    @classmethod
    async def started(cls, reward: Reward, quiet: bool) -> "_Process":
        self = cls(reward, quiet)
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                self._reader, self._writer = await asyncio.open_connection(sock=self._connection)
                self._writer.write(packed(reward))
                is_async = await self._message()
        except TimeoutError:
            self.kill()
            raise RewardLoadError(f"does not load: it takes longer than {_START_LIMIT_S:g} s", _MEND) from None
        except (OSError, asyncio.IncompleteReadError):
            raise RewardLoadError(f"does not load: its process {await self._end()}", _MEND) from None
        except BaseException:
            self.kill()
            raise
        if isinstance(is_async, RewardLoadError):
            self.kill()
            raise is_async
        if is_async:
            self.room, self._limit_s = _MOST_COROUTINES, self._limit_s + _GRACE_S
        self._listener = asyncio.create_task(self._listen())
        return self

    async def ask(self, arguments: dict[str, Any]) -> Any:
        """The reward's result. Raises RewardError: the process is dead then, unless the reward itself raised."""
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        try:
            async with asyncio.timeout(self._limit_s):
                self._writer.write(packed((number, arguments)))
                result, complaint = await answer
        except TimeoutError:
            self.kill()
            raise took_too_long(self._reward.limit, self._reward.timeout_s, self._company()) from None
        except asyncio.CancelledError:
            if self.room == 1:
                self.kill()  # the call would go on, with no caller left
            raise
        finally:
            self._answers.pop(number, None)
        if complaint:
            raise complaint
        try:
            return pickle.loads(result)
        except Exception as error:  # e.g. an object of a class in the reward's module, which is not loaded here
            raise RewardError(f"returned what cannot be sent to another process: {error}", _MEND) from None

    async def _listen(self) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                number, result, complaint = await self._message()
                answer = self._answers.get(number)
                if answer is not None and not answer.done():
                    answer.set_result((result, complaint))
        was_alive, self.alive = self.alive, False
        ended = await self._end() if was_alive else "was killed, because another call in it did not return"
        for answer in self._answers.values():
            if not answer.done():
                answer.set_result((None, RewardError(f"gave no result: its process {ended}{self._company()}", _MEND)))

    async def _message(self) -> Any:
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return pickle.loads(await self._reader.readexactly(length))

    def _company(self) -> str:
        others = len(self._answers) - 1
        return f" (it, or one of {others} other calls in the same process)" if others > 0 else ""

    async def _end(self) -> str:
        """In a few words, how a process ended that has closed the socket."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # the process still runs, with the socket closed
            await asyncio.to_thread(self._process.wait, _GRACE_S)
        code = self._process.returncode
        self.kill()
        if code is None:
            return "closed its connection"
        return f"ended with {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"

    def kill(self) -> None:
        self.alive = False
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if writer := getattr(self, "_writer", None):
            writer.close()
        else:
            self._connection.close()


_pools: dict[tuple[str, str], RewardPool] = {}
