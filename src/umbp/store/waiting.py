"""Seconds that only grow, and how a thread waits for them: one seam, so that tests move time themselves."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class WaitingClock(Protocol):
    """A clock on which threads can wait; threads may use it side by side."""

    def __call__(self) -> float: ...

    def wait(self, condition: threading.Condition, until_s: float) -> None:
        """Give up the condition's lock until it is notified or the time has come, and take it again.

        May return early: whoever waits looks again. `until_s` may be infinite.
        """
        ...


class MonotonicClock:
    """The machine's own."""

    def __call__(self) -> float:
        return time.monotonic()

    def wait(self, condition: threading.Condition, until_s: float) -> None:
        left_s = until_s - time.monotonic()
        if left_s > 0:
            condition.wait(min(left_s, threading.TIMEOUT_MAX))
