"""The JSON of SandboxFusion's `/run_code` (github.com/bytedance/SandboxFusion)."""

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
    """The end of a request."""

    SUCCESS = "Success"
    """The program ended by itself, with exit code 0."""
    FAILED = "Failed"
    """The program failed: it ended with another exit code, or at its time limit."""
    SANDBOX_ERROR = "SandboxError"
    """The sandbox did not run the program. `message` says why."""


class CommandStatus(StrEnum):
    """The end of a program."""

    FINISHED = "Finished"
    """The program ended by itself, whatever its exit code, or at a limit of memory or output."""
    ERROR = "Error"
    """The program was not run."""
    TIME_LIMIT = "TimeLimitExceeded"


class CommandResult(BaseModel):
    """The result of a program."""

    status: CommandStatus
    execution_time: float
    """The seconds after an interpreter in the sandbox got the program."""
    return_code: int | None = None
    """The exit code; 128 + n if signal n ended the program; null at the time limit."""
    stdout: str = ""
    stderr: str = ""


class RunRequest(BaseModel):
    """A program, and its limits. The server refuses what it does not offer, and never ignores it."""

    code: Text
    language: str = "python"
    stdin: Text | None = None
    run_timeout: float = Field(default=10, gt=0, allow_inf_nan=False)
    """The seconds of wall-clock time, at most the server's limit."""
    compile_timeout: float = Field(default=10, allow_inf_nan=False)
    """Not used: Python is not compiled."""
    memory_limit_MB: int = -1
    """The MiB of memory, at most the server's limit; -1: the server's limit."""
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
