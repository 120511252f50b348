"""The learning signal of a batch: the share of prompts whose samples got different rewards.

A baseline compares the samples of a prompt. Where all rewards of every prompt are equal, the update is zero or, with
vcpo.baseline=none, the same for right and wrong responses.
"""

from collections.abc import Sequence
from typing import Any

EQUAL_GROUPS = "reward/equal_groups"
"""The share of the batch's prompts whose samples all have the same reward."""
IN_A_ROW = "vcpo/steps_without_signal"
"""The number of steps in a row, up to this step, in which `reward/equal_groups` is 1."""
LONG = 5
"""The number of steps without signal in a row that calls for a look: by chance small batches have one or two."""


def equal_groups(prompts: Sequence[str], rewards: Sequence[float | None]) -> dict[str, float]:
    """Return `reward/equal_groups` of a batch of trajectories; nothing where a reward is not known."""
    by_prompt: dict[str, set[float]] = {}
    for prompt, reward in zip(prompts, rewards, strict=True):
        if reward is None:
            return {}
        by_prompt.setdefault(prompt, set()).add(reward)
    equal = sum(len(found) == 1 for found in by_prompt.values())
    return {EQUAL_GROUPS: equal / len(by_prompt)} if by_prompt else {}


class SignalWatch:
    """A counter of steps without a signal."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def look_at(self, line: dict[str, Any]) -> tuple[int | None, str | None]:
        """Take in a line of `metrics.jsonl`. Return the steps in a row without a signal, and a text; None for neither.

        The text names the first such step. At the `LONG`th in a row, and at each doubling, it says where to look.
        """
        if EQUAL_GROUPS not in line:
            return None, None
        self._in_a_row = self._in_a_row + 1 if line[EQUAL_GROUPS] == 1 else 0
        count, reward = self._in_a_row, line["reward"]
        if count == 1:
            return count, f"step {line['step']} has no signal: the samples of each prompt got the same reward"
        doublings, rest = divmod(count, LONG)
        if rest or doublings == 0 or doublings & (doublings - 1):
            return count, None
        return count, (
            f"{count} steps in a row without a signal (mean reward {reward:.3g}): read some responses "
            "(samples.jsonl in the run's folder), let `vcpo check FILE --task NAME` score "
            "known answers, and if both are right, take prompts that the model solves sometimes"
        )
