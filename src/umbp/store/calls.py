"""One call of a store's verb: what its caller holds of it, and how it can end."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from umbp.store.base import ClusterStore, StoreError

T = TypeVar("T")

Verb = Callable[[ClusterStore], T]
Late = Callable[[T | None], None]


class Why(StrEnum):
    """Why a call brought nothing."""

    SILENT = "silent"
    """The store had the call and didn't answer in time."""
    BROKEN = "broken"
    """The verb raised."""
    BUSY = "busy"
    """All threads were taken, or too many calls waited for one. It says nothing against the store."""
    OPEN_BREAKER = "open breaker"
    """The store isn't open yet, or failed a moment ago: it wasn't asked."""
    CLOSED = "closed"
    """The gate is closed."""
    GIVEN_UP = "given up"
    """By its caller."""


class StoreUnavailable(StoreError):  # noqa: N818 # a state of the store, in the field's own word
    """A call brought nothing in its time. Whatever memory it was given belongs to it until its `late` is
    called.
    """

    def __init__(self, name: str, why: Why) -> None:
        super().__init__(f"the store {name!r} brought nothing: {why}")
        self.why = why


class Owner(Protocol):
    """What a call needs of its gate."""

    def wait_for(self, call: Call[T], patience_s: float) -> None: ...

    def give_up(self, call: Call[T]) -> None: ...

    def is_overdue(self, call: Call[T]) -> bool: ...


class Call(Generic[T]):
    """A verb that was handed to a gate.

    It ends once: with what the verb returned, or as unavailable. Its fields change under the gate's lock.
    """

    __slots__ = (
        "_owner",
        "begun_at_s",
        "cause",
        "deadline_s",
        "epoch",
        "is_settled",
        "late",
        "name",
        "timeout_s",
        "value",
        "verb",
        "waiter",
        "why",
    )

    def __init__(
        self, owner: Owner, name: str, verb: Verb[T], timeout_s: float, late: Late[T] | None
    ) -> None:
        self._owner = owner
        self.name = name
        self.verb = verb
        self.timeout_s = timeout_s
        self.late = late
        self.deadline_s = math.inf
        self.epoch = 0
        self.begun_at_s: float | None = None
        self.is_settled = False
        self.value: T | None = None
        self.why: Why | None = None
        self.cause: BaseException | None = None
        self.waiter: threading.Condition | None = None

    @property
    def is_done(self) -> bool:
        """Whether `result` would return or raise at once."""
        return self.is_settled or self._owner.is_overdue(self)

    def wait(self, patience_s: float = math.inf) -> None:
        """Return when it has ended, one way or the other, or after so long."""
        if not self.is_settled:
            self._owner.wait_for(self, patience_s)

    def result(self) -> T:
        """What the verb returned, waiting until the call's time is over; `StoreUnavailable` where it brought
        nothing.
        """
        self.wait()
        if self.why is not None:
            raise StoreUnavailable(self.name, self.why) from self.cause
        return self.value  # type: ignore[return-value] # it is the verb's own, None too

    def give_up(self) -> None:
        """Nobody will ask for the result: `late` gets it, and before this returns if it has come already.
        Nothing where the call has ended as unavailable; not to be called after `result` has returned.
        """
        self._owner.give_up(self)

    def begin(self, now_s: float) -> None:
        """A thread has taken it; under the lock."""
        self.begun_at_s = now_s

    def settle(self, value: T | None, why: Why | None = None, cause: BaseException | None = None) -> None:
        """End it; under the lock."""
        self.value, self.why, self.cause = value, why, cause
        self.is_settled = True
        if self.waiter is not None:
            self.waiter.notify_all()

    def take_late(self) -> Late[T] | None:
        """Who is to be told that memory is free again: once."""
        late, self.late = self.late, None
        return late

    def __repr__(self) -> str:
        state = self.why or (
            "done" if self.is_settled else "waiting" if self.begun_at_s is None else "running"
        )
        return f"Call({self.name}: {state})"
