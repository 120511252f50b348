"""The reward of every task: `data_source`, a column of the rows, decides which one. The task presets name it."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from recipe.tasks import gsm8k, human_eval, math_reward, reasoning_gym, sort_digits
from recipe.tasks.countdown import reward as countdown

Reward = Callable[..., dict[str, float]]
_ANSWER, _END_CHARS = re.compile(r"Answer\s*:\s*([^\n]+)", re.IGNORECASE), 300


def _of_dapo(data_source: str, solution_str: str, *args: Any, **kwargs: Any) -> dict[str, float]:
    """Raw DAPO's prompts ask for a last line `Answer: $Answer`, which counts where there is no box."""
    if "\\boxed" not in solution_str and (said := _ANSWER.findall(solution_str[-_END_CHARS:])):
        solution_str += f"\n\\boxed{{{said[-1].strip(' $.*')}}}"
    return math_reward.compute_score(data_source, solution_str, *args, **kwargs)


# Our own rows' keys, those of raw DAPO, and those of the ready-made set lukhuang/vcpo.
REWARDS: dict[str, Reward] = {
    "calculate": math_reward.compute_score,
    "countdown": countdown.compute_score,
    "gsm8k": gsm8k.compute_score,
    "openai/gsm8k": gsm8k.compute_score,
    "math": math_reward.compute_score,
    "math-500": math_reward.compute_score,
    "dapo": math_reward.compute_score,
    "math_dapo": _of_dapo,
    "dapo_filter": math_reward.compute_score,
    "deepscaler": math_reward.compute_score,
    "aime25": math_reward.compute_score,
    "human_eval": human_eval.compute_score,
    "sort_digits": sort_digits.compute_score,
    "test-math-aime25": math_reward.compute_score,
}


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any] | None = None, **kwargs: Any
) -> dict[str, float]:
    """Score one response (verl's custom reward function).

    Returns {"score", "acc", "over_limit"}, the same keys for every task.
    Raises ValueError for a `data_source` or a ground truth that is none; never turns a failure into a zero.
    """
    reward = REWARDS.get(data_source)
    if str(data_source).startswith(f"{reasoning_gym.SOURCE}/"):
        reward = reasoning_gym.compute_score
    if reward is None:
        raise ValueError(
            f"data_source={data_source!r} has no reward: use one of {', '.join(REWARDS)}, or set "
            "reward.custom_reward_function.path to a reward of your own"
        )
    return {"over_limit": 0.0, **reward(data_source, solution_str, ground_truth, extra_info, **kwargs)}
