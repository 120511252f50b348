"""Interpreters that start before their programs come, with packages imported. Each runs one program."""

import asyncio
import logging
import re
from collections import deque
from collections.abc import Callable

from code_sandbox.isolation import Sandbox
from code_sandbox.limits import IsolationError, Limits
from code_sandbox.sandboxed import SandboxedInterpreter

_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_logger = logging.getLogger("sandbox")


class WarmPool:
    """A pool that starts one interpreter at a time while cores are free: under load a program's own start comes first.

    Args:
        sandbox: the sandbox in which interpreters run.
        limits: the limits that an interpreter is started with.
        modules: the modules that are imported beforehand.
        size: the most interpreters.
        busy: a function that says whether there are programs for all cores.
    """

    def __init__(
        self, sandbox: Sandbox, limits: Limits, modules: tuple[str, ...], size: int, busy: Callable[[], bool]
    ) -> None:
        self._sandbox, self._limits, self._modules, self._size, self._busy = sandbox, limits, modules, size, busy
        self._warm: deque[SandboxedInterpreter] = deque()
        self._changed = asyncio.Event()
        names = {module.split(".")[0] for module in modules}
        self._names = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(names)))})\b") if names else None
        self._filling: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._warm)

    def open(self) -> None:
        """Begin to fill the pool."""
        if self._size and self._modules:
            self._filling = asyncio.create_task(self._fill())

    def changed(self) -> None:
        """Note that a program has ended, and that a core may be free."""
        self._changed.set()

    def take(self, code: str) -> SandboxedInterpreter | None:
        """Return a warm interpreter if the program names a package that warm interpreters have imported, else None."""
        if self._names is None or not self._names.search(code):
            return None
        self._changed.set()
        while self._warm:
            interpreter = self._warm.popleft()
            if interpreter.lives:
                return interpreter
        return None

    async def close(self) -> None:
        """End all interpreters of the pool."""
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.gather(self._filling, return_exceptions=True)
        await asyncio.gather(*[interpreter.end() for interpreter in self._warm])
        self._warm.clear()

    async def _fill(self) -> None:
        pause_s = _PAUSE_S
        while True:
            self._changed.clear()
            if len(self._warm) >= self._size or self._busy():
                await self._changed.wait()
                continue
            try:
                self._warm.append(await self._sandbox.start(self._limits, self._modules))
                pause_s = _PAUSE_S
            except (IsolationError, OSError) as error:
                _logger.warning("no warm interpreter (%s): the next try is in %g s", error, pause_s)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
