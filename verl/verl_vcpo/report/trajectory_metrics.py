"""Metrics of a batch's trajectories besides their tokens: use of tools, rewards over a limit, truncated responses."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu

from verl_vcpo.common.stored_tags import prompt_of
from verl_vcpo.common.truncated import SHARE, TRUNCATED, Truncated
from verl_vcpo.report.learning_signal import equal_groups
from verl_vcpo.user_code.reward_function import OVER_LIMIT

TOOLS = "tool_use"
BESIDE = "reward_extra_info"
"""verl's name, in a trajectory's `extra_fields`, for what a reward has beside the score."""
RAW_REWARD = "raw_reward"
"""In a trajectory's `extra_fields`: its reward, which `rm_scores` has at the last of the trajectory's tokens."""


class FewFields(NamedTuple):
    """What is stored beside the tokens of a batch's trajectories, without those that pad the batch."""

    rows: list[int]
    """The trajectories' places in the batch."""
    num_turns: list[int]
    extra_fields: list[Mapping[str, Any]]
    """What the trajectories' agent loops returned beside the tokens."""
    prompts: list[str]
    """The trajectories' prompts."""

    def right(self) -> list[float]:
        """How right each answer is: `acc` of the reward, or the reward itself where it does not return one."""
        return [f.get(BESIDE, {}).get("acc", f.get(RAW_REWARD, 0.0)) for f in self.extra_fields]


def few_fields(batch: KVBatchMeta) -> FewFields:
    """Fetch the few fields of `batch`, which is in TransferQueue; it takes 0.1 ms a trajectory."""
    rows = [i for i, tag in enumerate(batch.tags) if not tag.get("is_padding")]
    keys = [batch.keys[i] for i in rows]
    stored = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["num_turns", "extra_fields"])
    turns, extra = tu.get(stored, "num_turns"), tu.get(stored, "extra_fields")
    return FewFields(rows, [int(number) for number in turns], list(extra), [prompt_of(key) for key in keys])


def trajectory_metrics(stored: FewFields, treatment: str = Truncated.TRAIN) -> dict[str, float]:
    """`tool_use/*` where tools were offered, `reward/over_limit` where rewards return it, `reward/equal_groups`, and
    those of truncated responses, whose `treatment` decides which rewards are compared."""
    extra = stored.extra_fields
    counts = tool_counts([f.get(TOOLS) for f in extra]) | over_limit([f.get(BESIDE) for f in extra])
    marks, rewards = [bool(f.get(TRUNCATED)) for f in extra], [f.get(RAW_REWARD) for f in extra]
    compared = [i for i, truncated in enumerate(marks) if not (truncated and treatment == Truncated.DROP)]
    equal = equal_groups([stored.prompts[i] for i in compared], [rewards[i] for i in compared])
    return counts | equal | of_truncated(marks, rewards)


def of_truncated(marks: Sequence[bool], rewards: Sequence[float | None]) -> dict[str, float]:
    """The share of truncated responses, and the mean reward of these and of the finished ones, of those there are.

    Args:
        marks: True for each response that is truncated.
        rewards: the reward of each; None where it is not known.
    """
    metrics = {SHARE: sum(marks) / len(marks)} if marks else {}
    for name, wanted in (("vcpo/truncated/reward", True), ("vcpo/finished/reward", False)):
        known = [r for r, mark in zip(rewards, marks, strict=True) if r is not None and mark is wanted]
        if known:
            metrics[name] = sum(known) / len(known)
    return metrics


def tool_counts(counts: list[Mapping[str, Any] | None]) -> dict[str, float]:
    """Sums of the counts over trajectories (None: one without tools), calls per trajectory, the share of void turns.

    A count that a trajectory does not have is 0: agent loops need not tell all. A void turn ends its trajectory, so a
    trajectory has at most one.
    """
    used = [count for count in counts if count]
    if not used:
        return {}
    sums = {name: sum(count.get(name, 0) for count in used) for name in dict.fromkeys(itertools.chain(*used))}
    metrics = {f"{TOOLS}/{name}": total for name, total in sums.items()}
    metrics[f"{TOOLS}/calls/mean"] = sums.get("calls", 0) / len(used)
    if sums.get("turns", 0) > 0:
        metrics[f"{TOOLS}/void_turns/share"] = sums.get("void_trajectories", 0) / sums["turns"]
    return metrics


def over_limit(infos: list[Mapping[str, Any] | None]) -> dict[str, float]:
    """The number of rewards that exceeded a limit; nothing where no reward returns `over_limit` beside the score."""
    exceeded = [info[OVER_LIMIT] for info in infos if info and OVER_LIMIT in info]
    return {f"reward/{OVER_LIMIT}": sum(exceeded)} if exceeded else {}
