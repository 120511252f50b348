"""The agent loop, and the files that it and its tools are made of."""

import ast
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from recipe.fully_async_policy.settings.errors import SettingError, choices, first_line

VERLS = ("single_turn_agent", "tool_agent")
_ROLLOUT = "actor_rollout_ref.rollout"


def check_agent_loop(rollout: DictConfig, files: bool) -> None:
    """Refuse an agent loop that no file makes, and files that cannot be read.

    Args:
        rollout: the settings `actor_rollout_ref.rollout`.
        files: whether the files of tools have to be there.

    Raises:
        SettingError: the first of them.
    """
    given, setting = rollout.agent.default_agent_loop, f"{_ROLLOUT}.agent.default_agent_loop"
    names = [*VERLS, *_names(rollout.agent.agent_loop_config_path)]
    if given not in names:
        advice = "add +agent=simpletir" if given == "simpletir" else choices(given, names)
        raise SettingError(f"{setting}={given}: {advice}; agent_loop_config_path names loops of your own")
    if not files or given != "tool_agent":
        return
    for name in ("tool_config_path", "function_tool_path"):
        path = rollout.multi_turn[name]
        if path and not Path(path).is_file():
            raise SettingError(f"{_ROLLOUT}.multi_turn.{name}={path}: no such file; give the file of the tools")
    if path := rollout.multi_turn.function_tool_path:
        _check_functions(Path(path))


def _names(path: str | None) -> list[Any]:
    """Of the loops in the file that `agent_loop_config_path` names."""
    if path is None:
        return []
    setting = f"{_ROLLOUT}.agent.agent_loop_config_path={path}"
    if not Path(path).is_file():
        raise SettingError(f"{setting}: no such file; give pkg://package/file or a file's path")
    try:
        loops = OmegaConf.load(path)
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        raise SettingError(f"{setting}: cannot be read ({first_line(error)}); mend the file") from None
    if not isinstance(loops, ListConfig) or not all(isinstance(loop, DictConfig) and "name" in loop for loop in loops):
        raise SettingError(f"{setting}: is no list of loops; give each a name and a _target_")
    return [loop.name for loop in loops]


def _check_functions(file: Path) -> None:
    """Refuse a file that is no Python. It is read and not run: the run's own processes do that."""
    try:
        ast.parse(file.read_text())
    except (SyntaxError, ValueError) as error:
        setting = f"{_ROLLOUT}.multi_turn.function_tool_path={file}"
        raise SettingError(f"{setting}: is no Python ({first_line(error)}); mend the file") from None
