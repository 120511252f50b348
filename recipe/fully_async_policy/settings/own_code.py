"""Code of the user's own, tried out once before the run: its reward, tools, agent loop and loss.

Reward, tools and agent loop are loaded in processes of their own, which can hang and be killed.
"""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from recipe.fully_async_policy.settings.agent_loop import (
    LOOP,
    LOOPS,
    TOOL_AGENT,
    TOOL_FILES,
    TURNS,
    is_users_own,
    own_loop,
)
from recipe.fully_async_policy.settings.data import Sample
from recipe.fully_async_policy.settings.errors import SettingError, all_that_is_wrong, shown, wrong
from verl_vcpo.user_code.agent_code import AgentCode, of_loop, of_tools
from verl_vcpo.user_code.errors import LoadError, RaisedError, UserCodeError
from verl_vcpo.user_code.killable import Pool
from verl_vcpo.user_code.reward_function import RewardFunction

MADE_UP = "I do not know."
_VERLS = ("pkg://verl.utils.reward_score", "default_compute_score")
_SETTING = "reward.custom_reward_function"
EXTRA_INFO_OF_A_RESPONSE: dict[str, object] = {
    **{"num_turns": 2, "rollout_reward_scores": {}, "turn_scores": [], "tool_rewards": [], "truncated": False},
    **{"global_steps": 0, "min_global_steps": 0, "max_global_steps": 0},
}
"""What a reward gets in `extra_info` with a response without tools, besides the row's own `extra_info`."""


def reward_of(config: DictConfig) -> RewardFunction:
    """The function that scores the run's responses: the custom one, or verl's for its own data sources."""
    custom = config.reward.custom_reward_function
    fixed = OmegaConf.to_container(custom.get("reward_kwargs") or OmegaConf.create({}), resolve=True)
    path, name = (custom.path, custom.name) if custom.path else _VERLS
    return RewardFunction(path, name, dict(fixed) if custom.path else {}, config["async"].reward_timeout_s)


def arguments(sample: Sample, response: str) -> dict[str, object]:
    """What verl's reward manager passes to the reward."""
    return {
        "data_source": sample.data_source,
        "solution_str": response,
        "ground_truth": sample.ground_truth,
        "extra_info": {**sample.extra_info, **EXTRA_INFO_OF_A_RESPONSE},
    }


def check_reward(config: DictConfig, samples: list[Sample]) -> None:
    """Score one response for each of these rows. Refuses a reward that does not load, raises, hangs or gives no score.

    Args:
        samples: none of them is scored where a reward manager, or an agent loop, of the user's own needs no function.
    """
    custom = config.reward.custom_reward_function
    needs_none = config.reward.reward_manager.source != "register" or is_users_own(config)
    if not samples or (not custom.path and needs_none):
        return
    if custom.path and not custom.name:
        raise SettingError(f"{_SETTING}.name=null: give the function's name in {custom.path}")
    asyncio.run(
        _score_all(reward_of(config), samples, f"{_SETTING}.path={shown(custom.path)} .name={shown(custom.name)}")
    )


def fix_of(error: UserCodeError, sample: Sample) -> str:
    """What to do about a reward that failed on a row: verl documents ground truths in lists, `["72"]`."""
    truth = sample.ground_truth
    if isinstance(error, RaisedError) and isinstance(truth, list) and len(truth) == 1:
        return f"ground_truth is a list, {truth!r}: give {truth[0]!r} alone, or mend the function"
    return error.fix


async def _score_all(reward: RewardFunction, samples: list[Sample], setting: str) -> None:
    pool = Pool(reward, most=1, quiet=True)
    try:
        for sample in samples:
            await pool.call(arguments(sample, MADE_UP))
    except UserCodeError as error:
        of_file = isinstance(error, LoadError)
        where = "" if of_file else f", for a made-up response to {sample.place} ({sample.data_source!r})"
        raise SettingError(f"{setting}: it {error.what}{where}; {fix_of(error, sample)}") from None
    finally:
        pool.close()


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


def check_own_loss(actor: DictConfig, correction: Mapping[str, Any] | None = None) -> None:
    """Try the function of the user's own that `policy_loss.loss_mode` names once; make its file's path absolute.

    correction: `algorithm.rollout_correction`, by which verl may pass importance weights.
    """
    from verl_vcpo.actor import own_loss

    if not own_loss.is_own(actor.policy_loss.loss_mode):
        return
    from hydra.errors import InstantiationException
    from verl.utils.config import omega_conf_to_dataclass

    actor.policy_loss.loss_mode = own_loss.absolute(actor.policy_loss.loss_mode)
    try:
        weighted = correction is not None and bool(correction.get("rollout_is")) and not correction.get("bypass_mode")
        own_loss.try_out(omega_conf_to_dataclass(actor), weighted)
    except (ValueError, InstantiationException, UserCodeError) as error:
        raise SettingError(" ".join(str(error.__cause__ or error).split())) from None
