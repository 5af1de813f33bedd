"""One store object and the threads that may be inside it: so many for calls, and one of its own for the rest
(opening, registering, probing, closing).

A thread that hangs in the store stays there, and with it the object: it is closed by its own thread when
nobody is inside any more, which may be never. All threads are daemons. Every field changes under the gate's
lock.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from umbp.errors import InvariantError
from umbp.store.base import ClusterStore, StoreError
from umbp.store.calls import Call
from umbp.store.threads import start_thread

logger = logging.getLogger("vllm.umbp")


@dataclass(frozen=True, slots=True)
class Memory:
    """A range that a store was told of."""

    address: int
    size: int


class Connection:
    """Threads around one store object.

    `came_back(connection, call, value, failure)` and `left(connection)` are called without the lock: a verb
    has returned; the store is closed and nobody is inside.
    """

    def __init__(
        self,
        name: str,
        lock: threading.Lock,
        most_threads: int,
        clock: Callable[[], float],
        came_back: Callable[[Connection, Call[Any], object, BaseException | None], None],
        left: Callable[[Connection], None],
    ) -> None:
        self.name = name
        self.store: ClusterStore | None = None
        self.is_opened = False
        self.failures = 0
        """Attempts to reach the store that failed, one after another."""
        self.registered: set[Memory] = set()
        self.queue: deque[Call[Any]] = deque()
        self.running: dict[Call[Any], None] = {}
        self.task: Callable[[Connection], None] | None = None
        """What the thread of its own is to do or does; it takes it away itself."""
        self.task_until_s = math.inf
        self.is_retired = False
        self.is_closed = False
        self._lock = lock
        self._most_threads = most_threads
        self._clock = clock
        self._came_back = came_back
        self._left = left
        self._threads = 0
        self._idle: list[threading.Condition] = []
        """What wakes each thread that waits. The last to come is the first to be woken: one call after
        another has the same thread, whose core has at hand what it needs.
        """
        self._has_own_thread = False
        self._turn = threading.Condition(lock)

    # Under the lock

    def take(self, call: Call[Any]) -> None:
        """Have a thread of the crew begin this call as soon as one is free."""
        self.queue.append(call)
        if self._idle:
            self._idle.pop().notify()
        elif self._threads < self._most_threads:
            self._threads += 1
            try:
                self._start(self._work_off, f"{self._threads}")
            except StoreError:  # it waits for a thread that is there, or for a call that brings one
                self._threads -= 1

    def ask(self, task: Callable[[Connection], None], until_s: float) -> None:
        """Have the thread of its own do this; only one thing at a time. `StoreError` where the system has no
        thread for it.
        """
        if not self._has_own_thread:
            self._start(self._attend, "own")
            self._has_own_thread = True
        self.task = task
        self.task_until_s = until_s
        self._turn.notify()

    def retire(self) -> bool:
        """Nobody calls any more: leave the store when all have come out of it. False where nobody has ever
        been in it, and nobody will tell of leaving it.
        """
        self.is_retired = True
        while self._idle:
            self._idle.pop().notify()
        self._turn.notify()
        return self._has_own_thread

    def came_out(self, call: Call[Any]) -> None:
        """A thread of the crew has left the store."""
        del self.running[call]
        if self.is_retired and not self.running:
            self._turn.notify()

    def stuck(self, now_s: float) -> int:
        """Threads that are inside although nobody waits for them any more."""
        lost = sum(call.is_settled for call in self.running)
        return lost + (self.task is not None and now_s >= self.task_until_s)

    def is_worn_out(self, since_s: float = math.inf) -> bool:
        """Whether more than half of the crew is stuck, in calls that began before then: too few are left for
        what comes.
        """
        stuck = sum(
            call.is_settled and call.begun_at_s is not None and call.begun_at_s <= since_s
            for call in self.running
        )
        return 2 * stuck > self._most_threads

    @property
    def recovers(self) -> bool:
        """Whether what is broken or silent here works again by itself."""
        return self.is_opened and self.store is not None and self.store.traits.recovers

    def audit(self) -> None:
        idle = len(self._idle)
        if not len(self.running) + idle <= self._threads <= self._most_threads:
            raise InvariantError(
                f"{self.name}: of {self._threads} threads {idle} are idle, {len(self.running)} inside"
            )
        if any(call.is_settled or call.begun_at_s is not None for call in self.queue):
            raise InvariantError(f"{self.name}: a call waits that was begun or has ended")
        if self.is_retired and self.queue:
            raise InvariantError(f"{self.name}: calls wait for a store that was given up")
        if self.is_closed and self.running:
            raise InvariantError(f"{self.name}: closed while {len(self.running)} calls were inside")

    # Its threads

    def _start(self, target: Callable[[], None], what: str) -> None:
        start_thread(target, f"{self.name}-{what}")

    def _work_off(self) -> None:
        while (begun := self._next()) is not None:
            call, store = begun
            value: object = None
            failure: BaseException | None = None
            try:
                value = call.verb(store)
            except BaseException as error:  # noqa: BLE001 # top of a thread
                failure = error
            self._came_back(self, call, value, failure)
            # Nothing that was fetched or raised lives on in an idle thread.
            del begun, call, value, failure

    def _next(self) -> tuple[Call[Any], ClusterStore] | None:
        with self._lock:
            wake = threading.Condition(self._lock)
            while not self.queue:
                if self.is_retired:
                    self._threads -= 1
                    return None
                self._idle.append(wake)
                wake.wait()
            call = self.queue.popleft()
            self.running[call] = None
            call.begin(self._clock())
            if self.store is None:
                raise InvariantError(f"{self.name}: a call came before the store")
            return call, self.store

    def _attend(self) -> None:
        while True:
            with self._lock:
                while not self._may_leave() and (self.task is None or self.is_retired):
                    self._turn.wait()
                task = None if self._may_leave() else self.task
            if task is None:
                break
            task(self)
        try:
            if self.store is not None:
                self.store.close()
        except Exception:  # top of a thread
            logger.exception("UMBP: closing the store connection %s failed", self.name)
        self._left(self)

    def _may_leave(self) -> bool:
        return self.is_retired and not self.running
