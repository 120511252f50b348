"""What goes over the wire: the JSON of SandboxFusion's `/run_code` (github.com/bytedance/SandboxFusion)."""

from enum import StrEnum

from pydantic import BaseModel, Field

MAX_CODE_BYTES = 1 << 20


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
    """Seconds, the sandbox's own start included."""
    return_code: int | None = None
    """128 + n where signal n ended it; null at the time limit."""
    stdout: str = ""
    stderr: str = ""


class RunRequest(BaseModel):
    """A program, and what it may use. What the server does not offer is refused, not ignored."""

    code: str = Field(max_length=MAX_CODE_BYTES)
    language: str = "python"
    stdin: str | None = Field(default=None, max_length=MAX_CODE_BYTES)
    run_timeout: float = Field(default=10, gt=0)
    """Seconds of wall-clock time, at most the server's."""
    compile_timeout: float = 10
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
