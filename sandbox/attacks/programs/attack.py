"""What an attack on the code sandbox is, and what every program of one starts with."""

import re
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LIMIT_MB, PROCESSES, FILES_MB, TIME_S = 256, 32, 64, 10.0
"""What the server of the attacks allows."""

PRELUDE = """
import contextlib, ctypes, errno, gc, mmap, os, resource, signal, socket, stat, struct, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def escaped(): print("ESCAPED", flush=True)
def degraded(): print("DEGRADED", flush=True)
def syscall(name, *arguments):
    number = name if isinstance(name, int) else BAIT["calls"][name]
    return libc.syscall(ctypes.c_long(number), *[ctypes.c_long(x) if isinstance(x, int) else x for x in arguments])
def opened():
    for fd in range(3, 256):
        with contextlib.suppress(OSError):
            os.fstat(fd)
            yield fd
"""

_NAMED = re.compile(r'(?:syscall\(|\["calls"\]\[)"(\w+)"')


@dataclass(frozen=True)
class Attack:
    """One program. It prints ESCAPED if it got out, DEGRADED if it took more than its share.

    name, code: what it tries, and how.
    control: run it without a sandbox too, where it must succeed: that shows that the check can fail. Only where that
        harms nothing.
    trace: what of it is left on the host, if the program itself cannot tell: true for an escape.
    told: whether the answer that its client got shows that it succeeded: true if it degraded the service.
    before: a program that has ended before.
    neighbour: a program that runs in another sandbox at the same time. It says by the same words what it saw.
    time_s: the time limit that it asks for.
    whole_program: it can be stopped only where control groups are available.
    alone: no other attack runs meanwhile, and the server is looked at afterwards.
    stdin: its input.
    """

    name: str
    code: str
    control: bool = True
    trace: Callable[[dict[str, Any]], bool] | None = None
    told: Callable[[dict[str, Any]], bool] | None = None
    before: str | None = None
    neighbour: str | None = None
    time_s: float = TIME_S
    whole_program: bool = False
    alone: bool = False
    stdin: str = ""

    @property
    def warm(self) -> bool:
        """Whether it is to run in an interpreter that was up before: it waits until the server has one."""
        return self.name.startswith("warm: ")


class Attacks(list[Attack]):
    """A list of them. Calling it adds one."""

    def __call__(self, name: str, code: str, **settings: Any) -> None:
        for text in ("before", "neighbour"):
            if text in settings:
                settings[text] = textwrap.dedent(settings[text])
        self.append(Attack(name, textwrap.dedent(code), **settings))

    def alone(self, name: str, code: str, **settings: Any) -> None:
        """Add one that takes all there is: no other runs meanwhile, and it is not tried without a sandbox."""
        self(name, code, control=False, alone=True, **settings)


def program(code: str, bait: dict[str, Any]) -> str:
    """A whole program: it knows the bait, and the numbers of the system calls that it names."""
    import pyseccomp

    calls = {name: pyseccomp.resolve_syscall(pyseccomp.Arch.NATIVE, name) for name in _NAMED.findall(code)}
    return f"BAIT = {bait | {'calls': calls}!r}\n{PRELUDE}\n{code}\n"
