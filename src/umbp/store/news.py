"""What an operator's log is told of one process's cluster store."""

from __future__ import annotations

import logging
import math

logger = logging.getLogger("vllm.umbp")

QUIET_S = 30.0
"""A store that comes and goes, or fails for ever new reasons, is told of at most so often."""


class StoreNews:
    """One line when the store can't be used any more, one when more is known of why, and one when it is back.
    One thread at a time; times are those of any one clock.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._told_at_s = -math.inf
        self._away_since_s: float | None = None
        self._why: str | None = None
        """What has been told of this absence; None: nothing."""
        self._knows_more = False

    def away(self, now_s: float, why: str) -> None:
        """A call has shown that the store can't be used."""
        self._away_since_s = now_s
        self._why = None
        self._knows_more = False
        if now_s - self._told_at_s >= QUIET_S:
            self._warn(now_s, why)

    def still_away(self, now_s: float, why: str) -> None:
        """It was tried again, or for the first time, in vain."""
        if self._away_since_s is None:
            self._away_since_s = now_s
        is_first_look = self._why is not None and not self._knows_more
        if why != self._why and (is_first_look or now_s - self._told_at_s >= QUIET_S):
            self._knows_more = self._why is not None
            self._warn(now_s, why)

    def back(self, now_s: float) -> None:
        """It can be used, from now on or once more."""
        if self._why is not None and self._away_since_s is not None:
            away_s = now_s - self._away_since_s
            # Whoever was told that it is away is told of this as well, however little he wants to read.
            logger.warning("UMBP: the store %r can be used again, after %.1f s", self._name, away_s)
        self._away_since_s = None
        self._why = None

    def note(self, what: str) -> None:
        """For those who look for a fault."""
        logger.debug("UMBP: the store %r %s", self._name, what)

    def _warn(self, now_s: float, why: str) -> None:
        self._told_at_s = now_s
        self._why = why
        logger.warning(
            "UMBP: the store %r can't be used at the moment, and is tried again and again: %s",
            self._name,
            why,
        )
