"""The agent loop: the files that it and its tools are made of, the settings of tool use, and the sandbox."""

import ast
from pathlib import Path
from typing import Any

import requests
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from recipe.fully_async_policy.settings.errors import SettingError, choices, first_line, wrong
from recipe.tasks.tool_use.settings import ToolUseSettings

VERLS = ("single_turn_agent", "tool_agent")
SIMPLETIR = "simpletir"
_LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"
_LOOPS = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
_TURNS = "actor_rollout_ref.rollout.multi_turn"


def check_agent_loop(config: DictConfig, files: bool) -> None:
    """Refuse an agent loop that no file makes, files that cannot be read, and wrong settings of tool use.

    Args:
        files: whether the files of tools, and the sandbox, have to be there.
    """
    given, names = OmegaConf.select(config, _LOOP), [*VERLS, *_names(config)]
    if given == SIMPLETIR and (given not in names or "tool_use" not in config):
        raise wrong(config, _LOOP, "add +agent=simpletir")
    if given not in names:
        words = choices(given, names)
        raise wrong(config, _LOOP, f"{words}; agent_loop_config_path names loops of your own")
    if given == SIMPLETIR:
        _check_tool_use(config, files)
    if files and given == "tool_agent":
        _check_tools(config)


def is_users_own(config: DictConfig) -> bool:
    """Whether the agent loop is the user's own, which may give the reward itself."""
    return OmegaConf.select(config, _LOOP) not in (*VERLS, SIMPLETIR)


def _names(config: DictConfig) -> list[Any]:
    """Of the loops in the file that `agent_loop_config_path` names."""
    path = OmegaConf.select(config, _LOOPS)
    if path is None:
        return []
    if not Path(path).is_file():
        raise wrong(config, _LOOPS, "no such file; give pkg://package/file or a file's path")
    try:
        loops = OmegaConf.load(path)
    except (OSError, YAMLError, OmegaConfBaseException) as error:
        raise wrong(config, _LOOPS, f"cannot be read ({first_line(error)}); mend the file") from None
    if not isinstance(loops, ListConfig) or not all(isinstance(loop, DictConfig) and "name" in loop for loop in loops):
        raise wrong(config, _LOOPS, "is no list of loops; give each a name and a _target_")
    return [loop.name for loop in loops]


def _check_tools(config: DictConfig) -> None:
    """Refuse files of tools that are none. A file of functions is read and not run: the run's own processes do that."""
    turns, functions = config.actor_rollout_ref.rollout.multi_turn, f"{_TURNS}.function_tool_path"
    for name in ("tool_config_path", "function_tool_path"):
        if turns[name] and not Path(turns[name]).is_file():
            raise wrong(config, f"{_TURNS}.{name}", "no such file; give the file of the tools")
    try:
        ast.parse(Path(turns.function_tool_path).read_text() if turns.function_tool_path else "")
    except (SyntaxError, ValueError) as error:
        raise wrong(config, functions, f"is no Python ({first_line(error)}); mend the file") from None


def _check_tool_use(config: DictConfig, files: bool) -> None:
    settings = ToolUseSettings(**config.tool_use)
    try:
        token = settings.sandbox_token()
    except ValueError as error:
        raise SettingError(str(error)) from None
    if settings.drop_void_turns and not config.vcpo.enable:
        words = f"the update of method={config.method} would count the rewards of void trajectories in its baseline"
        raise wrong(config, "tool_use.drop_void_turns", f"{words}; set it to false")
    if files:
        _check_sandbox(config, settings.sandbox_url, token)


def _check_sandbox(config: DictConfig, url: str, token: str | None) -> None:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        requests.get(f"{url.rstrip('/')}/v1/ping", timeout=10).raise_for_status()
        refused = requests.get(f"{url.rstrip('/')}/stats", headers=headers, timeout=10).status_code == 401
    except requests.RequestException as error:
        words = f"no sandbox answers ({type(error).__name__}); start one with `python -m code_sandbox`"
        raise wrong(config, "tool_use.sandbox_url", words) from None
    if refused:
        words = f"the sandbox at {url} asks for another token; give its --token-file"
        raise wrong(config, "tool_use.sandbox_token_file", words)
