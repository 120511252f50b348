"""Simulated time, and what works in it."""

import heapq
import itertools
from collections.abc import Callable
from functools import partial

Happens = Callable[[], None]


class Clock:
    """Time passes from one event to the next."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Happens]] = []
        self._count = itertools.count()

    def after(self, seconds: float, happens: Happens) -> None:
        """Let something happen in so many seconds."""
        heapq.heappush(self._events, (self.now + seconds, next(self._count), happens))

    def next(self) -> None:
        """Go to the next event, and let it happen."""
        self.now, _, happens = heapq.heappop(self._events)
        happens()


class Worker:
    """Takes turns among all that it is asked to do, at a speed that can change. `look` is called when it begins to
    work, and when it has done everything."""

    def __init__(self, clock: Clock, look: Happens) -> None:
        self._clock, self._look = clock, look
        self._doing: list[tuple[float, int, Happens]] = []
        self._count = itertools.count()
        self._progress = self._since = 0.0  # seconds of work done so far for an item that was there from the start
        self._stamp, self._speed = 0, 1.0

    @property
    def works(self) -> bool:
        """Whether it is at something."""
        return bool(self._doing)

    def do(self, seconds: float, then: Happens) -> None:
        """Work for so many seconds at full speed, alone; `then` follows."""
        if seconds <= 0:
            then()
            return
        self._advance()
        heapq.heappush(self._doing, (self._progress + seconds, next(self._count), then))
        self._expect()
        if len(self._doing) == 1:
            self._look()

    def set_speed(self, speed: float) -> None:
        """From now on."""
        self._advance()
        self._speed = speed
        self._expect()

    def _advance(self) -> None:
        if self._doing:
            self._progress += (self._clock.now - self._since) * self._speed / len(self._doing)
        self._since = self._clock.now

    def _expect(self) -> None:
        self._stamp += 1
        if self._doing:
            left = max(0.0, self._doing[0][0] - self._progress) * len(self._doing)
            self._clock.after(left / self._speed, partial(self._over, self._stamp))

    def _over(self, stamp: int) -> None:
        if stamp != self._stamp:
            return
        self._advance()
        _, _, then = heapq.heappop(self._doing)
        self._expect()
        if not self._doing:
            self._look()
        then()
