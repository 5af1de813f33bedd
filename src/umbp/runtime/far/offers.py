"""How long the store is offered an object that it doesn't take."""

from __future__ import annotations

from dataclasses import dataclass

OFFERED_S = 3.0
"""A store that says "later" is asked again for so long at the least: a cluster whose master was restarted has
no room until its nodes have introduced themselves."""

MOST_LATERS = 7
"""And so often at the least, however long its pauses are."""

MOST_FAILURES = 7
"""So many calls may fail that an object is part of; it may be what they fail for."""


@dataclass(frozen=True, slots=True)
class Offers:
    """What the store has said to an object so far."""

    laters: int = 0
    """One after the other, up to the last answer."""
    since_s: float = 0.0
    """When the first of these came."""
    failures: int = 0

    def later(self, now_s: float) -> Offers:
        """The store has no room, or no time."""
        return Offers(self.laters + 1, self.since_s if self.laters else now_s, self.failures)

    def failed(self) -> Offers:
        """It failed. When it is back it may have been restarted: its time begins anew."""
        return Offers(failures=self.failures + 1)

    def unasked(self) -> Offers:
        """It wasn't asked, being away."""
        return Offers(failures=self.failures)

    def are_over(self, now_s: float) -> bool:
        """Whether it has been offered for long enough."""
        has_had_time = self.laters >= MOST_LATERS and now_s - self.since_s >= OFFERED_S
        return has_had_time or self.failures >= MOST_FAILURES


NO_OFFERS = Offers()
