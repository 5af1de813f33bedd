"""Time as a number that tests move."""

from __future__ import annotations

import threading


class TickClock:
    """A clock that stands still until somebody sleeps on it or moves it; starts at 0 s."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept_s: list[float] = []
        self._waited_on: list[threading.Condition] = []

    def __call__(self) -> float:
        return self.now_s

    @property
    def waiting(self) -> int:
        """Threads that wait on it at this moment."""
        return len(self._waited_on)

    def advance(self, seconds: float) -> None:
        """Threads that wait for a time that comes with this go on."""
        self.now_s += seconds
        for condition in list(self._waited_on):
            with condition:
                condition.notify_all()

    def wait(self, condition: threading.Condition, until_s: float) -> None:
        """Wait, with the condition's lock held, until it is notified or the clock is moved."""
        # Known as waiting before it looks at the time: a move in between finds it, and waits for its lock.
        self._waited_on.append(condition)
        try:
            if self.now_s < until_s:
                condition.wait()
        finally:
            self._waited_on.remove(condition)

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.advance(seconds)
