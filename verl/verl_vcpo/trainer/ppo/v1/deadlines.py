"""When a prompt must be trained on, so that no trajectory is older than k policy updates.

Step s turns policy version s-1 into s. A prompt submitted at step j was sampled by version j-1 or a later one, so
its lag at step s is at most s-j: it must be consumed at step j+k at the latest. That is its deadline.
"""

from collections import Counter
from enum import StrEnum


class OnDeadline(StrEnum):
    """What happens to a prompt that must be consumed now and is not finished."""

    WAIT = "wait"
    """The trainer waits for it."""
    REISSUE = "reissue"
    """It is sampled again from the start by the current policy, once; after that the trainer waits for it."""


def deadlines_hold(remaining: Counter[int], step: int, batch_size: int) -> bool:
    """Whether all `remaining` prompts can still be consumed in time, `batch_size` at each step after `step`.

    Args:
        remaining: number of prompts per deadline (a step).
        step: the step being sampled for; nothing of `remaining` is consumed by it.
        batch_size: prompts consumed per step.
    """
    waiting = 0
    for deadline in sorted(remaining):
        waiting += remaining[deadline]
        if waiting > (deadline - step) * batch_size:
            return False
    return True
