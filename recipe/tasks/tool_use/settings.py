"""The settings of a tool-use run: `tool_use.*` of the configuration (config/agent/simpletir.yaml)."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ToolUseSettings:
    """What the agent of recipe/tasks/tool_use/agent_loop.py may do. settings/values.py has each setting's type."""

    sandbox_url: str = "http://127.0.0.1:8080"
    """A server that speaks SandboxFusion's `/run_code`, without that path: `python -m code_sandbox`."""
    sandbox_token_file: str | None = None
    """Holds the server's token, where it asks for one (`--token-file`): a path that every node has."""
    max_turns: int = 5
    """Turns of a trajectory. The last one's code is not run: nobody would read the result."""
    max_time_s: float = 600.0
    """No turn, and no part of one, starts later than this after the trajectory did."""
    call_timeout_s: float = 10.0
    """Of one program."""
    latency_median_s: float = 0.0
    """Half of the calls wait longer than this before their program runs: a log-normal distribution, equal in every run.
    A call that waits has no place in the sandbox. A wait beyond `max_time_s` ends the trajectory then. 0: none
    waits."""
    latency_sigma: float = 1.0
    """The standard deviation of the wait's logarithm. With 1, one call in ten waits 3.6 times the median, and one in a
    hundred 10 times."""
    max_observation_tokens: int = 256
    """Of a longer output, beginning and end are kept; half of it is for what a failed program's errors need."""
    drop_void_turns: bool = True
    """Whether a trajectory with a turn that has neither a complete code block nor an answer is left out of the update
    (SimpleTIR, arXiv 2509.02479)."""
    answer_pattern: str = r"\\boxed\{|<answer>"
    """A regular expression (of the package `regex`): where it is found outside code, the turn gives the final answer.
    One that takes more than 2 s on a text fails the trajectory."""

    def sandbox_token(self) -> str | None:
        """What `sandbox_token_file` holds. Raises ValueError where it cannot be read."""
        if self.sandbox_token_file is None:
            return None
        try:
            return Path(self.sandbox_token_file).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"tool_use.sandbox_token_file={self.sandbox_token_file}: it cannot be read ({error})"
            ) from None
