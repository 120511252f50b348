"""The limits of a program, and its end."""

from dataclasses import dataclass


class IsolationError(RuntimeError):
    """The error of a machine that cannot isolate programs, in one line: what is missing, and how to get it."""


@dataclass(frozen=True)
class Limits:
    """The limits of one program. Raises ValueError naming a limit that is out of range."""

    time_s: float = 10.0
    """The wall-clock seconds after a running interpreter got the program."""
    memory_mb: int = 1024
    """The MiB of address space of each process, beside the interpreter's own. With control groups, the limit of all
    processes and files together, plus twice `files_mb`, 64 MiB and the memory of imported packages."""
    processes: int = 32
    """The number of processes and threads."""
    files_mb: int = 64
    """The MiB in /tmp, which is in memory; as much again in /dev/shm."""
    output_kb: int = 256
    """The KiB on standard output, and as much again on standard error. A program that writes more is ended."""

    def __post_init__(self) -> None:
        for name, least in (("time_s", 0.1), ("memory_mb", 64), ("processes", 1), ("files_mb", 1), ("output_kb", 1)):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name}={getattr(self, name)} is out of range: use {least} or more")


@dataclass
class ProgramOutcome:
    """The end of a program, and its output."""

    stdout: str
    stderr: str
    duration_s: float
    """The seconds since the interpreter got the program."""
    return_code: int | None = None
    """The exit code. None: the time limit ended the program; 128 + n: signal n did."""
