"""What a worker's handle asks of whatever stands behind its pools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from umbp.pool import Pool
from umbp.runtime.far.fetch import Brought
from umbp.runtime.moves import Move


class FarSide(Protocol):
    """It has what the pools lack, and takes what they get."""

    @property
    def sends_checksums(self) -> bool:
        """Whether what is offered goes out, with a checksum."""
        ...

    def deadline_s(self) -> float:
        """When, by its clock, a transfer that begins now has failed."""
        ...

    def fetch(self, pool: Pool, namespace_id: int, move: Move, deadline_s: float) -> Brought:
        """Get a move's objects into the pool and hold them; returns at the deadline, or soon after. On any
        thread, on several at once.
        """
        ...

    def offer(self, pool: Pool, names: Sequence[str]) -> None:
        """These have been published. Returns at once, never raises."""
        ...

    def discard(self, names: Sequence[str]) -> None:
        """These, each once, turned out to be damaged when they were loaded. Returns at once, never raises."""
        ...

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was offered has gone out, or was given up; False if that took too long."""
        ...

    def leave(self, pool: Pool, close: Callable[[], None]) -> None:
        """The pool isn't used any more: `close` it once no transfer can touch it. Returns in bounded time."""
        ...

    def usage(self) -> Mapping[str, float]:
        """Gauges of its own, by name; cheap, never raises."""
        ...

    def take_counts(self) -> Mapping[tuple[str, ...], float]:
        """`SupportsCounts.take_counts`."""
        ...

    def close(self) -> bool:
        """End what is under way, in bounded time. False: something may touch the pools for ever."""
        ...
