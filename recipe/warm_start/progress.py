"""The lines of a warm start while it teaches, also in a file or a pipe: loss, accuracy, and the time left."""

import time
from collections.abc import Callable

from verl_vcpo.common.console import duration

LINE_S = 5.0
CHECK_STEPS = 10
"""The steps between two measurements with a goal: the end of a lesson must not depend on the machine's speed."""
_CHECKS_SHARE = 0.05
"""The share of the time that measuring the accuracy may take without a goal."""
_LOSSES = 20


class Progress:
    """The progress of a lesson: prints a line every LINE_S seconds, and knows when the goal is reached.

    Args:
        steps: the most steps.
        until: the accuracy at which the lesson ends; None: after all steps.
        check: a function that measures the accuracy, 0 to 1, without an effect on the lesson.
    """

    def __init__(self, steps: int, until: float | None, check: Callable[[], float]) -> None:
        self.steps, self.until, self.check = steps, until, check
        self.accuracy: float | None = None
        self._measured = 0
        self.losses: list[float] = []
        self._start = self._last_line = time.perf_counter()
        self._checks_s = self._check_s = 0.0

    def reached(self, loss: float) -> bool:
        """Note a step's loss. Return True if the lesson ends with this step."""
        self.losses.append(loss)
        done = len(self.losses)
        due = time.perf_counter() - self._last_line >= LINE_S
        if self.until is not None and (done % CHECK_STEPS == 0 or done == self.steps):
            self._measure()
            if self.accuracy is not None and self.accuracy >= self.until:
                self._say()
                return True
        elif self.until is None and due and self._checks_s + self._check_s <= _CHECKS_SHARE * self._seconds():
            self._measure()
        if due:
            self._say()
        return done == self.steps

    def _measure(self) -> None:
        before = time.perf_counter()
        self.accuracy, self._measured = self.check(), len(self.losses)
        self._check_s = time.perf_counter() - before
        self._checks_s += self._check_s

    def _say(self) -> None:
        done, last = len(self.losses), self.losses[-_LOSSES:]
        accuracy = "not measured yet" if self.accuracy is None else f"{100 * self.accuracy:.0f} %"
        if self.accuracy is not None and self._measured < done:
            accuracy += f" at step {self._measured}"
        left = duration(self._seconds() / done * (self.steps - done))
        rest = f"; {left} left{'' if self.until is None else ' at most'}" if done < self.steps else ""
        loss = sum(last) / len(last)
        print(f"step {done} of {self.steps}: loss {loss:.2f}, accuracy {accuracy}{rest}", flush=True)
        self._last_line = time.perf_counter()

    def _seconds(self) -> float:
        return time.perf_counter() - self._start
