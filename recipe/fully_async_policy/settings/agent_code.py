"""Tools and agent loop of the user's own, loaded once before the run, in processes of their own."""

import asyncio
from collections.abc import Iterable
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipe.fully_async_policy.settings.agent_loop import LOOP, LOOPS, TOOL_AGENT, TOOL_FILES, TURNS, own_loop
from recipe.fully_async_policy.settings.data import Sample
from recipe.fully_async_policy.settings.errors import SettingError, all_that_is_wrong, wrong
from verl_vcpo.user_code.agent_code import AgentCode, of_loop, of_tools
from verl_vcpo.user_code.errors import UserCodeError
from verl_vcpo.user_code.killable import Pool


def check_agent_code(config: DictConfig, samples: list[Sample]) -> None:
    """Load what the run's agent-loop workers will. Refuses tools that verl does not load, describe to the model or tell
    apart, an agent loop that is none, and rows that select other tools than there are.
    """
    code: dict[str, AgentCode] = {}
    for name in TOOL_FILES:
        if path := OmegaConf.select(config, f"{TURNS}.{name}"):
            code[f"{TURNS}.{name}"] = of_tools(name, path)
    if loop := own_loop(config):
        more = OmegaConf.to_container(loop, resolve=True)
        assert isinstance(more, dict)
        given = {
            str(key): value for key, value in more.items() if not str(key).startswith("_")
        }  # the others are Hydra's
        code[LOOPS] = of_loop(loop._target_, given)
    found = asyncio.run(_load(config, code))
    functions, stateful = (found.get(f"{TURNS}.{name}", []) for name in TOOL_FILES)
    if both := set(functions) & set(stateful):
        raise wrong(
            config, f"{TURNS}.function_tool_path", f"has a tool {min(both)}, as tool_config_path has; rename one"
        )
    if OmegaConf.select(config, LOOP) == TOOL_AGENT:
        for sample in samples:
            _check_selection(sample, [*functions, *stateful])


async def _load(config: DictConfig, code: dict[str, AgentCode]) -> dict[str, Any]:
    """What every code has returned, all at the same time. Raises SettingError."""
    pools = [Pool(each, most=1, quiet=True) for each in code.values()]
    try:
        results = await asyncio.gather(*[pool.call({}) for pool in pools], return_exceptions=True)
    finally:
        for pool in pools:
            pool.close()
    refused = []
    for setting, result in zip(code, results, strict=True):
        if isinstance(result, UserCodeError):
            refused.append(wrong(config, setting, f"it {result.what}; {result.fix}"))
        elif isinstance(result, BaseException):
            raise result
    if refused:
        raise all_that_is_wrong(refused)
    return dict(zip(code, results, strict=True))


def _check_selection(sample: Sample, tools: list[str]) -> None:
    """Refuse a row's `tool_selection` that verl would pass over."""
    selected = sample.extra_info.get("tool_selection")
    if selected is None:
        return
    is_list = not isinstance(selected, str) and isinstance(selected, Iterable)
    unknown = [name for name in selected if name not in tools] if is_list else []
    if unknown or not is_list:
        what = f"has {unknown[0]!r}, and no tool has this name" if unknown else "is no list"
        raise SettingError(
            f"{sample.place}: extra_info.tool_selection {what}; give a list of {', '.join(tools)}, or leave it out"
        )
