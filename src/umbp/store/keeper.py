"""The life of one process's store objects: made, opened, told of memory, probed, given up for a fresh one,
left.

Under the gate's lock and on its thread that watches the time, but for the attempts, which run on the thread
that each connection has for itself.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable
from typing import Any

from umbp.errors import ConfigError, InvariantError
from umbp.store.base import ClusterStore, StoreError
from umbp.store.bounds import GateLimits
from umbp.store.breaker import Breaker
from umbp.store.calls import Call, StoreUnavailable, Why
from umbp.store.connection import Connection, Memory
from umbp.store.news import StoreNews
from umbp.store.waiting import WaitingClock

logger = logging.getLogger("vllm.umbp")

HANGS = "it was asked whether it is well, and has not answered in time"


class StoreKeeper:
    """The current connection, those that were given up and still hold threads, and the breaker before them.

    `send_away(connection)` and `wake()` are called under the lock: the breaker has opened; `tend` is to be
    asked again. All but the attempts is called under the lock, and waits on the clock by giving it away.
    """

    def __init__(
        self,
        name: str,
        make_store: Callable[[], ClusterStore],
        *,
        limits: GateLimits,
        breaker: Breaker,
        before_return: Callable[[ClusterStore], bool] | None,
        clock: WaitingClock,
        lock: threading.Lock,
        came_back: Callable[[Connection, Call[Any], object, BaseException | None], None],
        send_away: Callable[[Connection], None],
        wake: Callable[[], None],
    ) -> None:
        self.name = name
        self.breaker = breaker
        self.current: Connection | None = None
        self.held: list[Connection] = []
        self.listeners: list[Callable[[], None]] = []
        self.is_closed = False
        self.openings = 0
        self.attempts = 0
        self.replaced = 0
        self._make_store = make_store
        self._limits = limits
        self._before_return = before_return
        self._clock = clock
        self._lock = lock
        self._came_back = came_back
        self._send_away = send_away
        self._wake = wake
        self._changed = threading.Condition(lock)
        self._memory: list[Memory] = []
        self._made = 0
        self._failure: Exception | None = None
        self._refusal: Exception | None = None
        self._news = StoreNews(name)

    # What the gate asks

    def begin(self) -> None:
        """From now on it is tried to open a store."""
        self.breaker.begin(self._clock())

    def connections(self) -> list[Connection]:
        """All that threads may be inside of."""
        return self.held + ([] if self.current is None else [self.current])

    def usable(self) -> Connection | None:
        """The connection that may be asked at this moment."""
        return None if self.breaker.is_open or self.is_closed else self.current

    def wait_usable(self, timeout_s: float) -> None:
        """Return when there is one; `StoreError` after that time, `ConfigError` where none can be made."""
        until_s = self._clock() + timeout_s
        while self.usable() is None:
            if self.is_closed:
                raise StoreUnavailable(self.name, Why.CLOSED)
            if isinstance(self._failure, ConfigError):
                raise self._failure
            if self._clock() >= until_s:
                why = f": {self._failure}" if self._failure else ""
                sentence = f"the store {self.name!r} does not answer within {timeout_s:g} s{why}"
                raise StoreError(sentence) from self._failure
            self._clock.wait(self._changed, until_s)

    def wait_probed(self, timeout_s: float) -> bool:
        """Have the store asked now where the breaker is open, and wait for what that tells; see the gate."""
        until_s = self._clock() + timeout_s
        while not self.is_closed and (now_s := self._clock()) < until_s:
            # The one that was under way may have failed for having begun before the store was well again.
            if self.breaker.hasten(now_s):
                self._wake()
            if not self.breaker.is_due(now_s):
                break
            self._clock.wait(self._changed, until_s)
        return self.usable() is not None

    def register(self, memory: Memory, timeout_s: float) -> None:
        """Remember memory, and tell the store that is usable of it, if any; see the gate. The store has its
        own time for it, however short the caller's is.
        """
        if memory not in self._memory:
            self._memory.append(memory)
        until_s = self._clock() + timeout_s
        has_asked = is_late = False
        while (connection := self.usable()) is not None and memory not in connection.registered:
            if memory not in self._memory:
                raise StoreError(f"the store {self.name!r} refuses memory: {self._refusal}")
            if self._clock() >= until_s:
                is_late = True
                break
            if connection.task is None:
                most_s = max(until_s, self._clock() + self._limits.open_timeout_s)
                connection.ask(self._attempt_to_register, most_s)
                self._wake()
            has_asked = True
            self._clock.wait(self._changed, until_s)
        if is_late or (has_asked and self._clock() >= until_s):
            raise StoreUnavailable(self.name, Why.SILENT)

    def forget(self, memory: Memory) -> None:
        """Tell no store of this memory any more; who was told is told otherwise by the caller."""
        self._memory = [each for each in self._memory if each != memory]
        for connection in self.connections():
            connection.registered.discard(memory)

    def fail(self, epoch: int, now_s: float, why: str) -> None:
        """Something that was begun in this epoch shows that the store is ill."""
        if not self.breaker.open(now_s, epoch):
            return
        self.openings += 1
        if self.current is not None:
            self._send_away(self.current)
        self._notify()
        self._news.away(now_s, why)

    def leave(self) -> None:
        """Ask nobody any more, and close the store when all have come out of it."""
        if self.is_closed:
            return
        self.is_closed = True
        if self.current is not None:
            self._give_up(self.current)
        self.current = None
        self._notify()

    def wait_left(self, timeout_s: float) -> bool:
        """Whether nothing is held any more, after that time at most."""
        until_s = self._clock() + timeout_s
        while self.held and self._clock() < until_s:
            self._clock.wait(self._changed, until_s)
        return not self.held

    def audit(self) -> None:
        self.breaker.audit()
        for each in self.connections():
            each.audit()
            if each.queue and each is not self.usable():
                raise InvariantError(f"calls wait for {each.name}, which nobody may ask")
        if len(self.held) > self._limits.most_held + self.is_closed:
            raise InvariantError(f"{len(self.held)} stores are held that were given up")

    def tend(self, now_s: float) -> float:
        """Give up what hangs, ask what is due; when to look again."""
        if self.is_closed:
            return math.inf
        connection = self.current
        if connection is not None and connection.task is not None:
            if now_s < connection.task_until_s:
                return connection.task_until_s
            self.fail(self.breaker.epoch, now_s, HANGS)
            self._news.still_away(now_s, HANGS)
            if not self._has_room():
                return math.inf
            self.breaker.put_off(now_s)
            self._replace("hangs")
        if not self.breaker.is_due(now_s):
            return self.breaker.probe_at_s if self.breaker.is_open else math.inf
        connection = self.current
        if connection is None:
            connection = self._connect()
        elif self._is_spent(connection, now_s):
            if self._has_room():
                connection = self._replace("stays broken")
            elif not connection.is_opened:
                return math.inf
        is_pressing = connection.is_opened and not connection.recovers
        limit_s = self._limits.probe_timeout_s if is_pressing else self._limits.open_timeout_s
        try:
            connection.ask(self._attempt_to_return, now_s + limit_s)
        except StoreError as no_thread:
            self._failure = no_thread
            self.breaker.put_off(now_s)
            self._changed.notify_all()
            self._news.still_away(now_s, str(no_thread))
            return self.breaker.probe_at_s
        return connection.task_until_s

    def _is_spent(self, connection: Connection, now_s: float) -> bool:
        if not connection.is_opened:
            return connection.failures > 0
        if connection.recovers:
            return connection.is_worn_out(now_s - self._limits.open_timeout_s)
        return connection.failures >= self._limits.patience or connection.is_worn_out()

    def _connect(self) -> Connection:
        self._made += 1
        name = f"umbp-{self.name}-{self._made}"
        self.current = Connection(
            name, self._lock, self._limits.most_threads, self._clock, self._came_back, self._has_left
        )
        return self.current

    def _replace(self, why: str) -> Connection:
        if self.current is not None:
            if self.current.is_opened:
                self.replaced += 1
                self._news.note(f"{why}: it is given up for a fresh connection")
            self._give_up(self.current)
        return self._connect()

    def _has_room(self) -> bool:
        return len(self.held) < self._limits.most_held

    def _notify(self) -> None:
        self._wake()
        self._changed.notify_all()

    def _give_up(self, connection: Connection) -> None:
        if connection.retire():
            self.held.append(connection)

    def _has_left(self, connection: Connection) -> None:
        with self._lock:
            connection.is_closed = True
            self.held.remove(connection)
            self._notify()

    # On a connection's own thread, without the lock

    def _attempt_to_register(self, connection: Connection) -> None:
        failure: Exception | None = None
        is_missing = True
        while is_missing and failure is None:
            try:
                self._register_missing(connection)
            except Exception as error:  # noqa: BLE001 # told to whoever registers
                failure = error
            with self._lock:
                is_missing = any(each not in connection.registered for each in self._memory)
                if failure is not None or not is_missing:
                    connection.task = None
                    if failure is not None and not self.breaker.is_open and not connection.is_retired:
                        self._refusal = failure
                        self._memory = [each for each in self._memory if each in connection.registered]
                    self._notify()

    def _attempt_to_return(self, connection: Connection) -> None:
        is_back = False
        is_over = False
        while not is_over:
            failure: Exception | None = None
            try:
                self._bring_back(connection)
            except Exception as error:  # noqa: BLE001 # whatever it is, the store isn't usable
                failure = error
            with self._lock:
                is_missing = any(each not in connection.registered for each in self._memory)
                is_over = connection.is_retired or failure is not None or not is_missing
                if is_over:
                    connection.task = None
                    is_back = failure is None and not connection.is_retired
                    self._attempted(connection, failure)
        if is_back:
            for listener in list(self.listeners):
                try:
                    listener()
                except Exception:  # a listener's fault ends no thread of ours
                    logger.exception("UMBP: a listener to the return of the store %r failed", self.name)

    def _attempted(self, connection: Connection, failure: Exception | None) -> None:
        now_s = self._clock()
        self.attempts += 1
        if not connection.is_retired:
            self._failure = failure
            if failure is None:
                connection.failures = 0
                self.breaker.close(now_s)
                self._news.back(now_s)
            else:
                connection.failures += 1
                self.breaker.put_off(now_s)
                # What stops a start is told by its end.
                if self.breaker.epoch or not isinstance(failure, ConfigError):
                    self._news.still_away(now_s, str(failure))
        self._notify()

    def _bring_back(self, connection: Connection) -> None:
        if connection.store is None:
            connection.store = self._make_store()
        store = connection.store
        if not connection.is_opened:
            store.open()
            connection.is_opened = True
        self._register_missing(connection)
        if not store.probe():
            raise StoreError("it does not answer its probe")
        with self._lock:
            if connection.is_retired:
                # It was given up while it hung; what must come first is another's by now.
                return
            connection.task_until_s = self._clock() + self._limits.open_timeout_s
        if self._before_return is not None and not self._before_return(store):
            raise StoreError("what must be done before it is used again is not done yet")

    def _register_missing(self, connection: Connection) -> None:
        while True:
            with self._lock:
                missing = [each for each in self._memory if each not in connection.registered]
            if not missing or connection.store is None:
                return
            for memory in missing:
                connection.store.register(memory.address, memory.size)
                with self._lock:
                    connection.registered.add(memory)
