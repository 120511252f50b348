"""Custom rewards in processes that are killed when a call hangs (extends verl/trainer/ppo/reward.py).

verl calls a custom reward function in threads of its reward workers. A function that never returns, or that holds
Python's global lock in an endless expression, stops the worker and with it the run. Here `compute_score` of this module
is called instead, which passes every call to another process. A call that fails raises an error that names the reward
and the prompt, and never gives a score.

With verl's reward manager `naive` the agent-loop workers call `compute_score` themselves: there are no reward workers.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf, open_dict

from verl_vcpo.user_code.errors import UserCodeError, of_response
from verl_vcpo.user_code.killable import Pool
from verl_vcpo.user_code.reward_function import RewardFunction

if TYPE_CHECKING:
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput


def needs_no_workers(config: DictConfig) -> bool:
    """Return True if the reward is a custom function's result alone, for which only the function is needed."""
    reward = config.reward
    manager = reward.reward_manager
    naive = manager.source == "register" and manager.name == "naive"
    return bool(reward.custom_reward_function.get("path")) and naive and not reward.reward_model.enable


def without_workers(config: DictConfig) -> None:
    """Have verl start no reward workers if it `needs_no_workers`."""
    if needs_no_workers(config):
        config.reward.num_workers = 0


def bound_custom_reward(config: DictConfig) -> None:
    """Have verl call a configured custom reward function through `compute_score`."""
    custom = config.reward.custom_reward_function
    if not custom.get("path"):
        return
    own = OmegaConf.to_container(custom, resolve=True)
    with open_dict(config):
        config.reward.custom_reward_function = {
            "path": f"pkg://{__name__}",
            "name": compute_score.__name__,
            "reward_kwargs": {
                "reward_path": own["path"],
                "reward_name": own["name"],
                "reward_fixed": own.get("reward_kwargs") or {},
                "reward_timeout_s": config["async"].reward_timeout_s,
            },
        }


async def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    reward_path: str,
    reward_name: str,
    reward_fixed: Mapping[str, Any],
    reward_timeout_s: float,
    **more_fixed: Any,
) -> Any:
    """Score one response (verl's custom reward function) with the function `reward_name` of `reward_path`.

    verl's `more_fixed` are the same at every call: the address and the tokenizer of a reward model. Raises
    UserCodeError naming the reward, the row of the data and the response.
    """
    key = (reward_path, reward_name)
    if key not in _pools:  # a worker has one pool for each function
        fixed = {**OmegaConf.to_container(OmegaConf.create(dict(reward_fixed))), **more_fixed}
        _pools[key] = Pool(RewardFunction(reward_path, reward_name, fixed, reward_timeout_s))
    try:
        row = {"data_source": data_source, "ground_truth": ground_truth, "extra_info": extra_info}
        return await _pools[key].call({"solution_str": solution_str, **row})
    except UserCodeError as error:
        index, reward_itself = (extra_info or {}).get("index"), f"{reward_path}:{reward_name}"
        raise of_response(error, reward_itself, index, data_source, solution_str) from None


class OwnReward:
    """The custom reward function of a run that `needs_no_workers`."""

    def __init__(self, config: DictConfig) -> None:
        """`config` is the run's, after `bound_custom_reward`."""
        self._fixed: Any = OmegaConf.to_container(config.reward.custom_reward_function.reward_kwargs, resolve=True)

    async def result(self, response: str, output: "AgentLoopOutput", row: Mapping[str, Any]) -> dict[str, Any]:
        """The `checked` result for a response, with the arguments that verl's reward manager `naive` gives.

        Args:
            response: without special tokens.
            output: the last output of the response's agent loop.
            row: the prompt's columns.

        Raises:
            UserCodeError: as `compute_score`.
        """
        of_response = {**output.extra_fields, "num_turns": output.num_turns, "rollout_reward_scores": {}}
        extra_info, truth = {**(row.get("extra_info") or {}), **of_response}, row["reward_model"]["ground_truth"]
        result: dict[str, Any] = await compute_score(row["data_source"], response, truth, extra_info, **self._fixed)
        return result


_pools: dict[tuple[str, str], Pool] = {}
