"""How long a request waits for what is on its way into the pool, and how often it looks. Pure; the time is
given.
"""

from __future__ import annotations

from dataclasses import dataclass

FIRST_PAUSE_S = 0.002
LONGEST_PAUSE_S = 0.05
"""A request looks after so long, then after twice as long each time; towards the end more often again, so
that what comes late is seen."""


@dataclass(slots=True)
class Wait:
    """One request's. It is waited for once: what comes later than `until_s` is found without waiting, or not
    at all.
    """

    until_s: float
    look_s: float = 0.0
    """When to look again."""
    pause_s: float = FIRST_PAUSE_S
    has_looked: bool = False
    """Something was missing; the next look must not take the last one's word for it."""
    is_over: bool = False

    def is_due(self, now_s: float) -> bool:
        """Whether to look, or to go on with what there is."""
        return self.is_over or now_s >= min(self.look_s, self.until_s)

    def begin_pause(self, now_s: float) -> None:
        """What was looked for isn't there yet."""
        self.has_looked = True
        left_s = self.until_s - now_s
        self.look_s = now_s + min(self.pause_s, max(left_s / 2, FIRST_PAUSE_S))
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)
