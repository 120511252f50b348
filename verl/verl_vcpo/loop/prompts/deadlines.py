"""Deadlines of prompts: the step at which a prompt must be trained on, so that no trajectory is older than k updates.

The module computes with numbers of prompts, for the replay buffer.

Step s turns policy version s-1 into s. A prompt submitted at step j was sampled by version j-1 or a later one, so
its lag at step s is at most s-j: it must be consumed at step j+k at the latest. That is its deadline.
"""

import math
from collections import Counter
from dataclasses import dataclass
from enum import StrEnum


class OnDeadline(StrEnum):
    """The treatment of a prompt that must be consumed now and is not finished."""

    WAIT = "wait"
    """The trainer waits for the prompt."""
    REISSUE = "reissue"
    """The current policy samples the prompt again from the start, once; then the trainer waits for the prompt."""


@dataclass(frozen=True)
class ResumedPrompts:
    """A checkpoint's prompts in order of submission, divided so that the bound of the resumed run holds."""

    kept: list[str]
    """Prompts that are finished, and trained on as they are."""
    again: list[str]
    """Prompts that are sampled again from the start, as if submitted at the first step of the resumed run."""
    withheld: list[str]
    """Prompts beyond those that may be in flight, which are submitted later, in place of new prompts."""


def in_flight(lag: float, batch_size: int) -> int:
    """Return the number of prompts submitted before the first step, `lag` batches: each step submits one more batch."""
    return math.floor(lag * batch_size)


def resume_prompts(
    submitted: dict[str, int], finished: set[str], *, step: int, lag: float, batch_size: int
) -> ResumedPrompts:
    """Divide a checkpoint's prompts. With unchanged settings all finished prompts are kept.

    Args:
        submitted: the step at which each prompt was submitted, in order of submission.
        step: the first step of the resumed run, whose settings are `lag` and `batch_size`.
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
    """Return the number of prompts per deadline that are left when the `batch_size` oldest finished ones are consumed.

    Args:
        submitted: the number of prompts in the buffer, by the step at which they were submitted.
        finished: the number of finished prompts among these; at least `batch_size` in all.
    """
    remaining, missing = Counter[int](), batch_size
    for step in sorted(submitted):
        consumed = min(missing, finished[step])
        missing -= consumed
        remaining[step + bound] = submitted[step] - consumed
    return +remaining


def deadlines_hold(remaining: Counter[int], step: int, batch_size: int) -> bool:
    """Return True if all `remaining` prompts can still be consumed in time, `batch_size` at each step after `step`.

    `remaining` has the number of prompts per deadline, which is a step.
    """
    waiting = 0
    for deadline in sorted(remaining):
        waiting += remaining[deadline]
        if waiting > (deadline - step) * batch_size:
            return False
    return True
