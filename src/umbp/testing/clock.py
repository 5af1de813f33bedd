"""Time as a number that tests move."""

from __future__ import annotations


class TickClock:
    """A clock that stands still until somebody sleeps on it or moves it; starts at 0 s."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept_s: list[float] = []

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds

    def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        self.now_s += seconds
