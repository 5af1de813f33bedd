"""The bounds that a gate to a store keeps, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GateLimits:
    """The bounds that a gate keeps."""

    most_threads: int = 4
    """Calls inside one store object at once, those that hang included."""
    most_waiting: int = 64
    """Calls that wait for a thread."""
    most_held: int = 2
    """Store objects that were given up while somebody was inside, and aren't closed yet."""
    patience: int = 3
    """So many probes in a row may fail before a fresh store object is tried, unless the store says that it
    `recovers`.
    """
    least_silence_s: float = 0.02
    """A store that had a call for less than this isn't taken for ill, however short the caller's time was."""
    probe_timeout_s: float = 2.0
    open_timeout_s: float = 30.0
    """For opening a fresh store and registering memory, and again for `before_return`. A store that
    `recovers` has this time for its probe too, and its calls have it to come back.
    """


@dataclass(frozen=True, slots=True)
class GateCounts:
    """What happened since the gate was made, and how it stands."""

    calls: int = 0
    """All; those that brought something are what the next five leave."""
    timeouts: int = 0
    raised: int = 0
    busy: int = 0
    refused: int = 0
    """Because the breaker was open, or the gate closed."""
    given_up: int = 0
    """By their callers."""
    broken: int = 0
    """Failures of the store that aren't timeouts: verbs that raised or found everything broken."""
    openings: int = 0
    """Of the breaker, for a failure."""
    probes: int = 0
    replaced: int = 0
    """Store objects that were given up for a fresh one."""
    seconds_open: float = 0.0
    is_open: bool = True
    """The breaker: nobody is let through."""
    running: int = 0
    waiting: int = 0
    stuck_threads: int = 0
    """Inside a store although nobody waits for them any more."""
    held_stores: int = 0
    """Given up, and not closed yet."""
