"""What all commands have in common: a wrong argument is one line, and Ctrl-C is no traceback."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

INTERRUPTED = 130
"""The exit code of a command that Ctrl-C has ended, as a shell gives it."""
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


class OneLineParser(argparse.ArgumentParser):
    """argparse, with the error alone on stderr instead of after the usage text."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix(_UNKNOWN)
        takes_settings = any(action.metavar == "setting=value" for action in self._actions)
        if unknown != message and "=" in unknown and takes_settings:
            message += f"; a setting has no dashes: {unknown.lstrip('-')}"
        self.exit(2, f"{self.prog}: {message} (see --help)\n")


def run_command(main: Callable[[], int]) -> NoReturn:
    """Run a command, and end this process with the exit code that `main` returns."""
    try:
        code = main()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = INTERRUPTED
    sys.exit(code)
