"""The cluster store contract: a handful of batch verbs, and what a store is like, as data.

A store keeps objects by name for all hosts of a cluster. It promises little, and nothing here asks for more:
a put that was done may be gone at the next moment, what exists may be missing when it is fetched, a call may
take long or never end. Whoever calls bounds the time (`umbp.store.gate`), checks the bytes (each object
carries its key and a checksum, `umbp.pool.seal`) and takes every failure for a miss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, runtime_checkable

from umbp.errors import UMBPError


class StoreError(UMBPError):
    """A store can't be reached or used at all; the message says why and what to do."""


class Outcome(StrEnum):
    """What became of one object of a batch. Every error code of a store is one of these."""

    DONE = "done"
    """Stored (by this call or before), fetched whole, or removed."""
    MISS = "miss"
    """It isn't there, or can't be read."""
    DAMAGED = "damaged"
    """Of a get alone: what is there isn't what was put, since it has another size, is of another kind, or the
    store itself finds it spoiled. It is of no use to anybody, and puts leave it there: whoever hears of it
    removes it.
    """
    LATER = "later"
    """Not now: no room, too much at once, still being written or read. The store itself is well."""
    BROKEN = "broken"
    """The store doesn't answer, or its connection is of no use any more. What was asked may be done all the
    same, now or later: a silent store reads its questions when it goes on.
    """


@dataclass(frozen=True, slots=True)
class StoreTraits:
    """What a store is like. Callers keep to the bounds; a store may rely on it."""

    name: str
    """As the option `store` has it, for metrics and messages."""
    most_keys: int
    """Names in one question or removal."""
    most_objects: int
    """Objects in one put or get."""
    most_bytes: int
    """Bytes in one put or get, unless it is one single object."""
    lease_s: float
    """For so long what was found to exist is kept, room allowing; 0: no longer than the answer takes."""
    registers: bool
    """Whether addresses must lie in memory that was registered."""
    pins: bool = False
    """Whether registered memory must stay where it is: a pool in it can't give memory back meanwhile."""
    recovers: bool = False
    """Whether the same connection works again by itself when the store is back. It is then better kept than
    replaced: what it offered to others stays theirs.
    """
    calls_at_once: int = 1
    """So many gets, and so many puts, of one process are under way together: more bring nothing."""


def for_each(outcomes: Sequence[Outcome], count: int) -> Sequence[Outcome]:
    """A store's answer about so many objects; `StoreError` where it has another length: then nobody knows
    what it is about.
    """
    if len(outcomes) != count:
        raise StoreError(f"a store answered {len(outcomes)} outcomes to {count} objects: mend its adapter")
    return outcomes


def are_done(outcomes: Sequence[Outcome]) -> bool:
    """Whether all went well, which is asked of thousands, and mostly so."""
    return outcomes.count(Outcome.DONE) == len(outcomes)


@runtime_checkable
class ClusterStore(Protocol):
    """One process's connection to a store. Threads may call it side by side.

    A call with no objects does nothing; the keys of one call are distinct. Calls may block for long; none
    raises but `open`, `register` and `unregister`: what goes wrong is an outcome. After `close` everything is
    BROKEN.
    """

    @property
    def traits(self) -> StoreTraits: ...

    def open(self) -> None:
        """Connect; `StoreError` where that fails, `ConfigError` where it would fail again as configured. Once
        in a store's life: a broken one is closed, and another made.
        """
        ...

    def register(self, address: int, size: int) -> None:
        """Objects will be put from and fetched into this memory, which lives until `unregister` or `close`,
        and until every call that had begun by then is back. `StoreError` where the store refuses it.
        """
        ...

    def unregister(self, address: int, size: int) -> None:
        """A range that was registered isn't used any more, and goes when this returns. Nothing is done for
        one that wasn't registered; `StoreError` where the store doesn't let it go.
        """
        ...

    def exists(self, keys: Sequence[str]) -> Sequence[Outcome]:
        """DONE for what is there and complete, else MISS or BROKEN, in order; one round trip."""
        ...

    def put(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> Sequence[Outcome]:
        """Store each object from one contiguous range; the memory must not change until the call returns.

        A key that is there already, or that somebody is putting, is DONE and keeps what it has. Nobody ever
        reads half an object; but what is removed while it is read may come as other bytes, and DONE.
        """
        ...

    def get(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> Sequence[Outcome]:
        """Fetch each object into one contiguous range. `sizes` are the objects' own: one of another size,
        larger, smaller or empty, is DAMAGED, and so is what is no object. One that isn't there, or comes or
        goes meanwhile, never is. Where the outcome isn't DONE the range's bytes are undefined, and nothing
        beyond it is touched.
        """
        ...

    def remove(self, keys: Sequence[str]) -> Sequence[Outcome]:
        """Remove objects, those in use too; DONE also for what wasn't there."""
        ...

    def remove_prefix(self, prefix: str) -> Outcome:
        """Remove all objects whose keys begin so; DONE when none of those that were there, complete, can be
        found any more. What was being put meanwhile may come or stay.
        """
        ...

    def probe(self) -> bool:
        """Whether the store answers at this moment, asked over the network, never from memory. Where it
        doesn't, a `StoreError` may say why, in a sentence for the log.
        """
        ...

    def describe(self) -> Mapping[str, str]:
        """What an operator wants to know of it (addresses, versions, sizes), in words, by name; what can't be
        told is left out.
        """
        ...

    def close(self) -> None:
        """Leave the store; memory of this process that it offered to others goes with it, at the latest when
        the calls inside are back and the store answers. A second call does nothing.
        """
        ...
