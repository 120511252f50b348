"""One made-up response of every data source, scored by the run's reward in a process of its own."""

import asyncio

from omegaconf import DictConfig, OmegaConf

from recipe.fully_async_policy.settings.agent_loop import is_users_own
from recipe.fully_async_policy.settings.data import Sample
from recipe.fully_async_policy.settings.errors import SettingError, shown
from verl_vcpo.user_code.errors import LoadError, RaisedError, UserCodeError
from verl_vcpo.user_code.killable import Pool
from verl_vcpo.user_code.reward_function import RewardFunction

MADE_UP = "I do not know."
_VERLS = ("pkg://verl.utils.reward_score", "default_compute_score")
_SETTING = "reward.custom_reward_function"


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
        "extra_info": {**sample.extra_info, "num_turns": 2, "rollout_reward_scores": {}},
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
