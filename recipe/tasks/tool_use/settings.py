"""The settings of a tool-use run: `tool_use.*` of the configuration (config/agent/simpletir.yaml)."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import regex


@dataclass(frozen=True)
class ToolUseSettings:
    """What the agent of recipe/tasks/tool_use/agent_loop.py may do. Raises ValueError naming the setting."""

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
    max_observation_tokens: int = 256
    """Of what a program prints, beginning and end are kept."""
    drop_void_turns: bool = True
    """Whether a trajectory with a turn that has neither a complete code block nor an answer is left out of the update
    (SimpleTIR, arXiv 2509.02479)."""
    answer_pattern: str = r"\\boxed\{|<answer>"
    """A regular expression (of the package `regex`): where it is found outside code, the turn gives the final answer.
    One that takes more than 2 s on a text fails the trajectory."""

    def __post_init__(self) -> None:
        if not str(self.sandbox_url).startswith(("http://", "https://")):
            raise ValueError(f"tool_use.sandbox_url={self.sandbox_url}: give a URL, like http://127.0.0.1:8080")
        self.sandbox_token()
        for name, least in (("max_turns", 1), ("max_observation_tokens", 16)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"tool_use.{name}={value}: give a whole number, {least} or more")
        for name in ("max_time_s", "call_timeout_s"):
            if not isinstance(getattr(self, name), int | float) or not getattr(self, name) > 0:
                raise ValueError(f"tool_use.{name}={getattr(self, name)}: give a number of seconds above 0")
        if not isinstance(self.drop_void_turns, bool):
            raise ValueError(f"tool_use.drop_void_turns={self.drop_void_turns}: give true or false")
        try:
            regex.compile(self.answer_pattern)
        except (regex.error, TypeError) as error:
            raise ValueError(
                f"tool_use.answer_pattern={self.answer_pattern}: no regular expression ({error})"
            ) from None

    def sandbox_token(self) -> str | None:
        """What `sandbox_token_file` holds. Raises ValueError where it cannot be read."""
        if self.sandbox_token_file is None:
            return None
        try:
            return Path(self.sandbox_token_file).read_text().strip()
        except (OSError, UnicodeDecodeError, TypeError) as error:
            raise ValueError(
                f"tool_use.sandbox_token_file={self.sandbox_token_file}: it cannot be read ({error})"
            ) from None

    @classmethod
    def of(cls, settings: Mapping[Any, Any]) -> "ToolUseSettings":
        """From the configuration's `tool_use`."""
        known = [field.name for field in fields(cls)]
        unknown = [str(name) for name in settings if name not in known]
        if unknown:
            raise ValueError(f"tool_use.{unknown[0]}: no such setting; there are {', '.join(known)}")
        return cls(**{str(name): value for name, value in settings.items()})
