"""What goes over the wire: the JSON of SandboxFusion's `/run_code` (github.com/bytedance/SandboxFusion)."""

from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field

MAX_TEXT_BYTES = 1 << 20


def _short(text: str) -> str:
    if len(text.encode()) > MAX_TEXT_BYTES:
        raise ValueError(f"it is longer than {MAX_TEXT_BYTES} bytes")
    return text


Text = Annotated[str, AfterValidator(_short)]
"""A program, or its input."""


class RunStatus(StrEnum):
    """How a request ended."""

    SUCCESS = "Success"
    """The program ended by itself, with exit code 0."""
    FAILED = "Failed"
    """The program's fault: another exit code, or its time limit."""
    SANDBOX_ERROR = "SandboxError"
    """The program was not run. `message` says why."""


class CommandStatus(StrEnum):
    """How a program ended."""

    FINISHED = "Finished"
    """By itself, whatever its exit code, or at a limit of memory or output."""
    ERROR = "Error"
    """It was not run."""
    TIME_LIMIT = "TimeLimitExceeded"


class CommandResult(BaseModel):
    """What a program did."""

    status: CommandStatus
    execution_time: float
    """Seconds from when an interpreter in the sandbox got the program."""
    return_code: int | None = None
    """128 + n where signal n ended it; null at the time limit."""
    stdout: str = ""
    stderr: str = ""


class RunRequest(BaseModel):
    """A program, and what it may use. What the server does not offer is refused, not ignored."""

    code: Text
    language: str = "python"
    stdin: Text | None = None
    run_timeout: float = Field(default=10, gt=0, allow_inf_nan=False)
    """Seconds of wall-clock time, at most the server's."""
    compile_timeout: float = Field(default=10, allow_inf_nan=False)
    """Python is not compiled."""
    memory_limit_MB: int = -1
    """At most the server's; -1: the server's."""
    files: dict[str, str | None] = {}
    fetch_files: list[str] = []


class RunResponse(BaseModel):
    """The answer, with HTTP status 200 whatever the program did."""

    status: RunStatus
    message: str = ""
    compile_result: CommandResult | None = None
    run_result: CommandResult | None = None
    executor_pod_name: str | None = None
    files: dict[str, str] = {}
