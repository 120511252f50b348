"""When a prompt must be trained on, so that no trajectory is older than k policy updates.

Arithmetic over numbers of prompts, which the replay buffer applies.

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


def in_flight(lag: float, batch_size: int) -> int:
    """How many prompts are submitted before the first step, `lag` batches: each step submits one batch more."""
    return math.floor(lag * batch_size)


def resume_prompts(
    submitted: dict[str, int], finished: set[str], *, step: int, lag: float, batch_size: int
) -> ResumedPrompts:
    """Decide what becomes of a checkpoint's prompts. With unchanged settings all that are finished are kept.

    Args:
        submitted: step at which each prompt was submitted, in order of submission.
        finished: those that are sampled completely.
        step: the first step of the resumed run.
        lag: the bound of the resumed run: `async.lag`.
        batch_size: prompts consumed per step in the resumed run.
    """
    bound, allowed = math.ceil(lag), in_flight(lag, batch_size)
    taken_over, withheld = list(submitted)[:allowed], list(submitted)[allowed:]
    kept = [uid for uid in taken_over if uid in finished]
    deadlines = Counter(submitted[uid] + bound for uid in kept)
    late = 0
    while not deadlines_hold(+deadlines, step - 1, batch_size):  # the oldest are the first whose deadline cannot hold
        deadlines[submitted[kept[late]] + bound] -= 1
        late += 1
    kept = kept[late:]
    remains = set(kept)
    again = [uid for uid in taken_over if uid not in remains]
    return ResumedPrompts(kept, again, withheld)


def deadlines_without_oldest(
    submitted: Counter[int], finished: Counter[int], *, bound: int, batch_size: int
) -> Counter[int]:
    """The number of prompts per deadline that are left when the oldest finished prompts are consumed.

    Args:
        submitted: number of prompts in the buffer by the step at which they were submitted.
        finished: of these, the finished ones; at least `batch_size`.
        bound: of the lag, rounded up.
        batch_size: prompts that are consumed.
    """
    remaining, missing = Counter[int](), batch_size
    for step in sorted(submitted):
        consumed = min(missing, finished[step])
        missing -= consumed
        remaining[step + bound] = submitted[step] - consumed
    return +remaining


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
