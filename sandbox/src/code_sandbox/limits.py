"""What a program may use, and how it ended."""

from dataclasses import dataclass


class IsolationError(RuntimeError):
    """Programs cannot be isolated here. One line: what is missing, and how to get it."""


@dataclass(frozen=True)
class Limits:
    """What one program may use. Raises ValueError naming the one that is out of range."""

    time_s: float = 10.0
    """Wall-clock seconds, from when an interpreter that is up got the program."""
    memory_mb: int = 1024
    """MiB of address space, per process, beside the interpreter's own. Where there are control groups, all its
    processes and files together have it once, plus twice `files_mb`, 64 MiB and what imported packages take."""
    processes: int = 32
    """Processes and threads."""
    files_mb: int = 64
    """MiB in /tmp, which is in memory; as much again in /dev/shm."""
    output_kb: int = 256
    """KiB on standard output, and as much again on standard error. A program that writes more is ended."""

    def __post_init__(self) -> None:
        for name, least in (("time_s", 0.1), ("memory_mb", 64), ("processes", 1), ("files_mb", 1), ("output_kb", 1)):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name}={getattr(self, name)} is out of range: use {least} or more")


@dataclass
class ProgramOutcome:
    """How a program ended."""

    stdout: str
    stderr: str
    duration_s: float
    """Seconds since the interpreter got the program."""
    return_code: int | None = None
    """None: it was ended at its time limit. 128 + n: signal n ended it."""
