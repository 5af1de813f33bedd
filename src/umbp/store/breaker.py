"""When a store that failed is asked again: pure arithmetic over a clock's seconds, for one thread at a
time.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from umbp.errors import InvariantError


@dataclass(frozen=True, slots=True)
class Backoff:
    """The pauses before a store that failed is probed."""

    first_s: float = 0.25
    most_s: float = 5.0
    """Each pause is twice the one before, up to this."""
    steady_s: float = 30.0
    """A store that was well for so long starts at the first pause again. Until then a failure goes on where
    the last one stopped: what answers half of the time is asked ever more rarely.
    """
    jitter: float = 0.2
    """Pauses differ by so much of themselves, lest all engines of a cluster come back at once."""


class Breaker:
    """Open: nobody may ask the store, until a probe has gone well. It begins open, with a probe due at once.

    `epoch` numbers the closed periods: a failure of something that was begun in an earlier one says nothing
    about this one.
    """

    def __init__(self, backoff: Backoff, rng: random.Random) -> None:
        self._backoff = backoff
        self._rng = rng
        self._pause_s = backoff.first_s
        self._closed_at_s = -math.inf
        self._opened_at_s: float | None = None
        self._open_before_s = 0.0
        self._hasten_from_s = -math.inf
        self.is_open = True
        self.epoch = 0
        self.probe_at_s = -math.inf

    def begin(self, now_s: float) -> None:
        """From now on it counts as open."""
        self._opened_at_s = now_s

    def open(self, now_s: float, epoch: int) -> bool:
        """Something failed that was begun in this epoch; whether that opened the breaker."""
        if self.is_open or epoch != self.epoch:
            return False
        if now_s - self._closed_at_s >= self._backoff.steady_s:
            self._pause_s = self._backoff.first_s
        self.is_open = True
        self._opened_at_s = now_s
        self.put_off(now_s)
        return True

    def put_off(self, now_s: float) -> None:
        """A probe failed, or the first is to come: the next one after the next pause."""
        spread = 1 + self._backoff.jitter * (2 * self._rng.random() - 1)
        self.probe_at_s = now_s + self._pause_s * spread
        self._pause_s = min(2 * self._pause_s, self._backoff.most_s)

    def is_due(self, now_s: float) -> bool:
        """Whether a probe is to be made, or under way."""
        return self.is_open and now_s >= self.probe_at_s

    def hasten(self, now_s: float) -> bool:
        """Somebody has reason to think that the store is well: the probe is due now; whether it wasn't yet.
        Only once in a pause's time, so that probes come at most twice as often, however many ask for them.
        """
        if not self.is_open or not self._hasten_from_s <= now_s < self.probe_at_s:
            return False
        self.probe_at_s = now_s
        self._hasten_from_s = now_s + self._pause_s
        return True

    def close(self, now_s: float) -> None:
        """A probe went well."""
        self._open_before_s = self.seconds_open(now_s)
        self._opened_at_s = None
        self._closed_at_s = now_s
        self.is_open = False
        self.epoch += 1

    def seconds_open(self, now_s: float) -> float:
        """How long it was open, all times together."""
        since_s = 0.0 if self._opened_at_s is None else now_s - self._opened_at_s
        return self._open_before_s + since_s

    def audit(self) -> None:
        if not self._backoff.first_s <= self._pause_s <= max(self._backoff.first_s, self._backoff.most_s):
            raise InvariantError(f"the next pause is {self._pause_s} s")
        if not self.is_open and self._opened_at_s is not None:
            raise InvariantError("a closed breaker counts as open")
