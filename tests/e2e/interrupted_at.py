"""The launcher, to which a signal comes at a chosen moment: `python -m tests.e2e.interrupted_at @WHEN @SIGNAL @S ...`.

The signal comes S seconds after the moment's beginning: Ctrl-C, as from a terminal, also to what the launcher started.
WHEN is a function of main.py or what the console names: `compose`, `Starting Ray`, `Writing a checkpoint`.
"""

import functools
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from recipe.command_line import run_command
from recipe.fully_async_policy import main
from verl_vcpo.common import console
from verl_vcpo.common.run_id import RUN_ID_VARIABLE


def interrupted_in(owner: Any, name: str, is_moment: Callable[..., bool], interrupt: Callable[[], None]) -> None:
    """Have the function interrupted soon after its first call that `is_moment`."""
    real, sent = getattr(owner, name), threading.Event()

    @functools.wraps(real)
    def then_interrupted(*args: Any, **kwargs: Any) -> Any:
        if is_moment(*args) and not sent.is_set():
            sent.set()
            interrupt()
        return real(*args, **kwargs)

    setattr(owner, name, then_interrupted)


def run(argv: list[str]) -> int:
    when, signum, delay = (argument.removeprefix("@") for argument in argv if argument.startswith("@"))

    def send() -> None:
        print(f"\nrun {os.environ[RUN_ID_VARIABLE]}", flush=True)  # into verl.log, after a progress bar
        if signum == "SIGINT":
            os.killpg(os.getpgrp(), signal.SIGINT)
        else:
            os.kill(os.getpid(), signal.Signals[signum])

    def interrupt() -> None:
        threading.Timer(float(delay), send).start() if float(delay) else send()

    if hasattr(main, when):
        interrupted_in(main, when, lambda *_: True, interrupt)
    elif hasattr(console.Screen, when):
        interrupted_in(console.Screen, when, lambda *_: True, interrupt)
    else:
        interrupted_in(console.Screen, "begin", lambda screen, what: what.startswith(when), interrupt)
    return main.main([argument for argument in argv if not argument.startswith("@")])


if __name__ == "__main__":
    run_command(lambda: run(sys.argv[1:]))
