"""What all commands have in common: a wrong argument is one line, and Ctrl-C is no traceback."""

import argparse
import contextlib
import io
import locale
import math
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C has ended, as a shell gives it."""
_WIDEST = 118
_UNKNOWN = "unrecognized arguments: "


def whole_number(least: int) -> Callable[[str], int]:
    """A type of arguments: whole numbers from `least` on."""

    def of_text(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text}: give a whole number, {least} or more")
        return number

    return of_text


def positive_number(text: str) -> float:
    """A type of arguments: finite numbers above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: give a number above 0")
    return number


def _wrapped(description: str) -> str:
    """As wide as the terminal; what is indented stays as it is."""
    width = min(shutil.get_terminal_size().columns - 2, _WIDEST)
    blocks = description.strip().split("\n\n")
    return "\n\n".join(
        block if block.startswith(" ") else textwrap.fill(block, width, break_long_words=False) for block in blocks
    )


class OneLineParser(argparse.ArgumentParser):
    """argparse, with the error alone on stderr instead of after the usage text, and paragraphs in the description.

    Args:
        instead_of: what to do instead of an argument of another program; None where it knows none.
    """

    def __init__(
        self,
        *,
        description: str | None = None,
        instead_of: Callable[[str], str | None] = lambda unknown: None,
        **settings: Any,
    ) -> None:
        self._instead_of = instead_of
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(description=description and _wrapped(description), **settings)

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix(_UNKNOWN)
        takes_settings = any(action.metavar == "setting=value" for action in self._actions)
        if unknown != message and (instead := self._instead_of(unknown)):
            message += f"; {instead}"
        elif unknown != message and "=" in unknown and takes_settings:
            message += f"; a setting has no dashes: {unknown.lstrip('-')}"
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


@contextlib.contextmanager
def signals_handled_by(handle: Callable[[int, Any, Callable[[int, Any], Any]], None]) -> Iterator[None]:
    """In the block Ctrl-C and SIGTERM call `handle(signum, frame, before)`, `before` being the handler until then.

    A signal that is ignored, or that ends the process without a handler, stays as it is.
    """
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    handlers = {signum: handler for signum, handler in before.items() if callable(handler)}
    for signum in handlers:
        signal.signal(signum, lambda signum, frame: handle(signum, frame, handlers[signal.Signals(signum)]))
    try:
        yield
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


@contextlib.contextmanager
def interruption_kept(*, block_handles_it: bool = False) -> Iterator[None]:
    """A block to which a Ctrl-C comes, or a SIGTERM that has a handler, ends with a KeyboardInterrupt.

    Packages may raise an error of their own instead: pydantic makes a SchemaError of a Ctrl-C that comes while it makes
    a model's class, and the SchemaError has neither a cause nor a context. Packages may also raise nothing:
    pydantic-core drops what a key's `__hash__` raises.

    Args:
        block_handles_it: the block may also end without an error, having handled the signal itself.
    """
    came: list[int] = []

    def note(signum: int, frame: Any, before: Callable[[int, Any], Any]) -> None:
        came.append(signum)
        before(signum, frame)

    with signals_handled_by(note):
        try:
            yield
        except Exception as error:
            if came:
                raise KeyboardInterrupt from error
            raise
    if came and not block_handles_it:
        raise KeyboardInterrupt


def use_utf8() -> None:
    """Begin this process anew in Python's UTF-8 mode where the locale has another encoding. A console keeps its own.

    Torch, too, reads files of its own in the locale's encoding. Characters that the console lacks are escaped.
    """
    encoding = locale.getencoding().lower()
    if not sys.flags.utf8_mode and encoding != "utf-8":
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    begun_anew = "utf8" in sys._xoptions and "PYTHONIOENCODING" not in os.environ
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding=encoding if begun_anew else stream.encoding, errors="backslashreplace")


def run_command(main: Callable[[], int]) -> NoReturn:
    """Run a command, and end this process with the exit code that `main` returns."""
    use_utf8()
    try:
        with interruption_kept(block_handles_it=True):
            code = main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
    # What libraries do while Python exits would end with a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(code)
