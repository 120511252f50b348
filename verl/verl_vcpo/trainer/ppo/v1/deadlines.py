"""When a prompt must be trained on, so that no trajectory is older than k policy updates.

Step s turns policy version s-1 into s. A prompt submitted at step j was sampled by version j-1 or a later one, so
its lag at step s is at most s-j: it must be consumed at step j+k at the latest. That is its deadline.
"""

import math
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum


class OnDeadline(StrEnum):
    """What happens to a prompt that must be consumed now and is not finished."""

    WAIT = "wait"
    """The trainer waits for it."""
    REISSUE = "reissue"
    """It is sampled again from the start by the current policy, once; after that the trainer waits for it."""


@dataclass(frozen=True)
class ResumedPrompts:
    """What becomes of a checkpoint's prompts, so that the bound of the resumed run holds. In order of submission."""

    kept: list[str]
    """Finished, and trained on as they are."""
    again: list[str]
    """Sampled again from the start, as if submitted at the first step of the resumed run."""
    withheld: list[str]
    """More than may be in flight: submitted later, in place of new prompts."""


def resume_prompts(
    submitted: dict[str, int], finished: set[str], *, step: int, lag: float, batch_size: int
) -> ResumedPrompts:
    """Decide what becomes of a checkpoint's prompts. With unchanged settings all that are finished are kept.

    Args:
        submitted: step at which each prompt was submitted, in order of submission.
        finished: those that are sampled completely.
        step: the first step of the resumed run.
        lag: `async.lag` of the resumed run.
        batch_size: prompts consumed per step in the resumed run.
    """
    bound, allowed = math.ceil(lag), math.floor(lag * batch_size)
    in_flight, withheld = list(submitted)[:allowed], list(submitted)[allowed:]
    kept = [uid for uid in in_flight if uid in finished]
    deadlines = Counter(submitted[uid] + bound for uid in kept)
    late = 0
    while not deadlines_hold(+deadlines, step - 1, batch_size):  # the oldest are the first whose deadline cannot hold
        deadlines[submitted[kept[late]] + bound] -= 1
        late += 1
    kept = kept[late:]
    remains = set(kept)
    again = [uid for uid in in_flight if uid not in remains]
    return ResumedPrompts(kept, again, withheld)


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
