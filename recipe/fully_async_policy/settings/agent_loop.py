"""The agent loop: the files that it and its tools are made of, the settings of tool use, and the sandbox."""

import asyncio
import re
from pathlib import Path
from typing import Any

import aiohttp
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from recipe.fully_async_policy.settings.errors import SettingError, choices, first_line, wrong
from recipe.tasks.rows import SINGLE_TURN
from recipe.tasks.tool_use.settings import ToolUseSettings

TOOL_AGENT, SIMPLETIR = "tool_agent", "simpletir"
VERLS = (SINGLE_TURN, TOOL_AGENT)
TOOL_FILES = ("function_tool_path", "tool_config_path")
LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"
LOOPS = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
TURNS = "actor_rollout_ref.rollout.multi_turn"
_HOW = f"set it to {TOOL_AGENT}, or leave the file out"


def check_agent_loop(config: DictConfig, files: bool) -> None:
    """Refuse an agent loop that no file makes, files that cannot be read, and wrong settings of tool use.

    Args:
        files: whether the files of tools, and the sandbox, have to be there.
    """
    given, names = OmegaConf.select(config, LOOP), [*VERLS, *_names(config)]
    if given == SIMPLETIR and (given not in names or "tool_use" not in config):
        raise wrong(config, LOOP, "add +agent=simpletir")
    if given not in names:
        words = choices(given, names)
        raise wrong(config, LOOP, f"{words}; agent_loop_config_path names loops of your own")
    _check_tools(config, files)
    if given == SIMPLETIR:
        _check_tool_use(config, files)


def calls_tools(config: DictConfig) -> bool:
    """Whether the agent loop may read the settings of tools, `multi_turn`: verl's for tools, or one of a user's own."""
    return OmegaConf.select(config, LOOP) not in (SINGLE_TURN, SIMPLETIR)


def own_loop(config: DictConfig) -> DictConfig | None:
    """What `agent_loop_config_path` says of the agent loop, where it is one of the user's own."""
    given = OmegaConf.select(config, LOOP)
    return next((loop for loop in _loops(config) if loop.name == given != SIMPLETIR), None)


def is_users_own(config: DictConfig) -> bool:
    """Whether the agent loop is the user's own, which may give the reward itself."""
    return OmegaConf.select(config, LOOP) not in (*VERLS, SIMPLETIR)


def _names(config: DictConfig) -> list[Any]:
    return [loop.name for loop in _loops(config)]


def _loops(config: DictConfig) -> list[DictConfig]:
    """Those in the file that `agent_loop_config_path` names."""
    path = OmegaConf.select(config, LOOPS)
    if path is None:
        return []
    if not Path(path).is_file():
        raise wrong(config, LOOPS, "no such file; give pkg://package/file or a file's path")
    try:
        loops = OmegaConf.load(path)
        OmegaConf.resolve(loops)
    except (OSError, ValueError, YAMLError, OmegaConfBaseException) as error:
        raise wrong(config, LOOPS, f"cannot be read ({first_line(error)}); mend the file") from None
    whole = isinstance(loops, ListConfig) and all(
        isinstance(loop, DictConfig) and isinstance(loop.get("_target_"), str) and "name" in loop for loop in loops
    )
    if not whole:
        raise wrong(config, LOOPS, "is no list of loops; give each a name and a _target_")
    names = [loop.name for loop in loops]
    if twice := [name for name in names if names.count(name) > 1]:
        raise wrong(config, LOOPS, f"has two loops with the name {twice[0]}; rename one")
    return list(loops)


def _check_tools(config: DictConfig, files: bool) -> None:
    """Refuse files of tools that are not there or that nothing reads, and a loop for tools without any."""
    loop = OmegaConf.select(config, LOOP)
    given = {name: path for name in TOOL_FILES if (path := OmegaConf.select(config, f"{TURNS}.{name}"))}
    for name, path in given.items():
        if not calls_tools(config):
            raise wrong(config, f"{TURNS}.{name}", f"has no effect: {LOOP}={loop} calls no tools of this file; {_HOW}")
        if files and not Path(path).is_file():
            raise wrong(config, f"{TURNS}.{name}", "no such file; give the file of the tools")
    if loop == TOOL_AGENT and not given:
        raise wrong(config, LOOP, f"has no tools; give {TURNS}.function_tool_path")


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
        _check_sandbox(config, settings, token)


def _check_sandbox(config: DictConfig, settings: ToolUseSettings, token: str | None) -> None:
    url = settings.sandbox_url
    try:
        refused, time_s = asyncio.run(_answer(url.rstrip("/"), token))
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        port = re.search(r":(\d+)/*$", url)
        sandbox = f"python -m code_sandbox --port {port[1]}" if port else "python -m code_sandbox"
        words = f"no sandbox answers ({type(error).__name__}); start one with `{sandbox}`"
        raise wrong(config, "tool_use.sandbox_url", words) from None
    if refused:
        words = f"the sandbox at {url} asks for another token; give its --token-file"
        raise wrong(config, "tool_use.sandbox_token_file", words)
    if time_s is not None and time_s < settings.call_timeout_s:
        words = f"the sandbox ends every program after {time_s:g} s; lower it, or raise the sandbox's --time-s"
        raise wrong(config, "tool_use.call_timeout_s", words)


async def _answer(url: str, token: str | None) -> tuple[bool, float | None]:
    """Whether the sandbox refuses the token, and its limit of a program; None where another server does not say it.

    Asked as the run's own client asks: no proxy of the environment is used.

    Raises:
        aiohttp.ClientError, TimeoutError, ValueError: no sandbox answers, or one that is none.
    """
    headers, limit = {"Authorization": f"Bearer {token}"} if token else {}, aiohttp.ClientTimeout(total=10)
    async with aiohttp.ClientSession(timeout=limit) as session:
        async with session.get(f"{url}/v1/ping") as answer:
            answer.raise_for_status()
        async with session.get(f"{url}/stats", headers=headers) as answer:
            said = await answer.json() if answer.status == 200 and answer.content_type == "application/json" else {}
            return answer.status == 401, said.get("time_s") if isinstance(said, dict) else None
