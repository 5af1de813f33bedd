"""One process's bounded way to a cluster store, which may answer late, never, or not be there.

The gate makes the store, opens it, and asks it on threads of its own, so that nobody waits longer than he
said. After a failure a breaker keeps everybody away: calls are refused in microseconds, and the store is
probed on a thread of its own until it is well. One whose probe hangs, or that stays broken, or that holds
all threads, is given up for a fresh object. So many objects may be given up and still hold threads; beyond,
the last one is waited for.

Threads: for each store object `most_threads` for calls and one for the rest, and one that watches the time.
All are daemons; nothing here keeps an interpreter from exiting. Any thread may call the gate.
"""

from __future__ import annotations

import logging
import math
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from umbp.errors import ConfigError, InvariantError
from umbp.store.base import ClusterStore, Outcome, StoreError
from umbp.store.bounds import GateCounts, GateLimits
from umbp.store.breaker import Backoff, Breaker
from umbp.store.calls import Call, Late, StoreUnavailable, Verb, Why
from umbp.store.connection import Connection, Memory
from umbp.store.waiting import MonotonicClock, WaitingClock

__all__ = ["Backoff", "Call", "GateCounts", "GateLimits", "StoreGate", "StoreUnavailable", "Why"]

T = TypeVar("T")

_log = logging.getLogger(__name__)

QUIET_S = 30.0
"""A store that fails again and again is told of at most so often."""


class StoreGate:
    """See the module. The life: `begin` or `open`, `register` at any time, calls, `close`.

    A call ends in one of two ways. Either its result is delivered; or it is unavailable, and then its
    `late` is called, exactly once, when the store no longer touches what it was given: with what the verb
    returned in the end, or None where it raised or never began. A call that was refused has its `late`
    called before `start` returns, on the caller's thread; all others on threads of the gate's. `late` must
    be short and not raise.

    `before_return(store)` runs before the breaker closes, on the probing thread; False keeps it open.
    """

    def __init__(
        self,
        name: str,
        make_store: Callable[[], ClusterStore],
        *,
        limits: GateLimits | None = None,
        backoff: Backoff | None = None,
        before_return: Callable[[ClusterStore], bool] | None = None,
        clock: WaitingClock | None = None,
        seed: int | None = None,
    ) -> None:
        self.name = name
        self.limits = limits or GateLimits()
        self._make_store = make_store
        self._before_return = before_return
        self._clock: WaitingClock = clock or MonotonicClock()
        self._lock = threading.Lock()
        self._watch = threading.Condition(self._lock)
        self._changed = threading.Condition(self._lock)
        self._breaker = Breaker(backoff or Backoff(), random.Random(seed))
        self._connection: Connection | None = None
        self._held: list[Connection] = []
        self._memory: list[Memory] = []
        self._listeners: list[Callable[[], None]] = []
        self._pending: dict[Call[Any], None] = {}
        self._due: deque[Call[Any]] = deque()
        """Calls that never began, whose `late` is to be called."""
        self._watch_until_s = math.inf
        self._is_begun = False
        self._is_closed = False
        self._made = 0
        self._failure: Exception | None = None
        self._refusal: Exception | None = None
        self._told_at_s = -math.inf
        self._counts = dict.fromkeys(
            ("calls", "timeouts", "raised", "busy", "refused", "given_up", "broken", "openings", "probes",
             "replaced"), 0,
        )  # fmt: skip

    # Life

    def begin(self) -> None:
        """Open the store in the background, and go on trying."""
        with self._lock:
            self._begin()

    def open(self, timeout_s: float) -> None:
        """Open the store and wait for it; `StoreError` where it isn't usable by then (it is still tried until
        `close`), `ConfigError` at once where it can't be made as configured.
        """
        with self._lock:
            self._begin()
            until_s = self._clock() + timeout_s
            while self._breaker.is_open or self._is_closed:
                if self._is_closed:
                    raise StoreUnavailable(self.name, Why.CLOSED)
                if isinstance(self._failure, ConfigError):
                    raise self._failure
                if self._clock() >= until_s:
                    why = f": {self._failure}" if self._failure else ""
                    raise StoreError(
                        f"the store {self.name!r} does not answer within {timeout_s:g} s{why}"
                    ) from self._failure
                self._clock.wait(self._changed, until_s)

    def close(self, timeout_s: float) -> bool:
        """End all calls as unavailable and leave the store; whether it was left in that time. Where a call
        hangs, its thread stays behind, and `late` is still called if it comes back.
        """
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                for call in list(self._pending):
                    self._end(call, Why.CLOSED)
                if self._connection is not None:
                    self._give_up_store(self._connection)
                self._connection = None
                self._watch.notify()
                self._changed.notify_all()
            until_s = self._clock() + timeout_s
            while self._held and self._clock() < until_s:
                self._clock.wait(self._changed, until_s)
            return not self._held

    def register(self, address: int, size: int, timeout_s: float) -> None:
        """Tell the store of memory, and every store object that comes after it; the memory lives until
        `close`, and beyond where that returned False. `StoreError` where the store refuses it or doesn't
        answer. While the breaker is open it is only remembered.
        """
        memory = Memory(address, size)
        with self._lock:
            if memory not in self._memory:
                self._memory.append(memory)
            until_s = self._clock() + timeout_s
            has_asked = False
            while (connection := self._usable()) is not None and memory not in connection.registered:
                if memory not in self._memory:
                    raise StoreError(f"the store {self.name!r} refuses memory: {self._refusal}")
                if self._clock() >= until_s:
                    break
                if connection.task is None:
                    connection.ask(self._attempt_to_register, until_s)
                    self._watch.notify()
                has_asked = True
                self._clock.wait(self._changed, until_s)
            if has_asked and self._clock() >= until_s:
                raise StoreUnavailable(self.name, Why.SILENT)

    def on_return(self, listener: Callable[[], None]) -> None:
        """Call this on the probing thread whenever the store has become usable, the first time included."""
        self._listeners.append(listener)

    # Calls

    def call(self, verb: Verb[T], timeout_s: float, late: Late[T] | None = None) -> T:
        """The verb's result, or `StoreUnavailable` after at most this time."""
        return self.start(verb, timeout_s, late).result()

    def start(self, verb: Verb[T], timeout_s: float, late: Late[T] | None = None) -> Call[T]:
        """Begin a call without waiting for anything. A verb whose result is an `Outcome` or a list or tuple
        of them tells by it whether the store is broken: when all are; for others there is `report_broken`.
        """
        call = Call(self, self.name, verb, timeout_s, late)
        with self._lock:
            self._counts["calls"] += 1
            connection = self._usable()
            if connection is not None and len(connection.queue) < self.limits.most_waiting:
                call.deadline_s = self._clock() + timeout_s
                call.epoch = self._breaker.epoch
                self._pending[call] = None
                connection.take(call)
                if call.deadline_s < self._watch_until_s:
                    self._watch.notify()
                return call
            why = Why.BUSY if connection else Why.CLOSED if self._is_closed else Why.OPEN_BREAKER
            self._count_end(why)
            call.settle(None, why)
        self._tell_late(call, None)
        return call

    def report_broken(self) -> None:
        """A result told its caller that the store is broken: ask it nothing until a probe went well."""
        with self._lock:
            self._fail(self._breaker.epoch, self._clock())
            self._counts["broken"] += 1

    @property
    def is_well(self) -> bool:
        """Whether calls are let through at this moment; costs nothing."""
        return not self._breaker.is_open and not self._is_closed

    def counts(self) -> GateCounts:
        with self._lock:
            now_s = self._clock()
            connections = self._connections()
            return GateCounts(
                **self._counts,
                seconds_open=self._breaker.seconds_open(now_s),
                is_open=self._breaker.is_open,
                running=sum(len(each.running) for each in connections),
                waiting=sum(len(each.queue) for each in connections),
                stuck_threads=sum(each.stuck(now_s) for each in connections),
                held_stores=len(self._held),
            )

    def audit(self) -> None:
        """At any time: every call is in one place, and every bound is kept."""
        with self._lock:
            self._breaker.audit()
            connections = self._connections()
            for each in connections:
                each.audit()
            inside = [call for each in connections for call in (*each.queue, *each.running)]
            if len(set(inside)) != len(inside):
                raise InvariantError("a call is in two places")
            lost = set(self._pending).symmetric_difference(call for call in inside if not call.is_settled)
            if lost:
                raise InvariantError(f"calls that are neither under way nor ended, or both: {lost}")
            if len(self._held) > self.limits.most_held + self._is_closed:
                raise InvariantError(f"{len(self._held)} stores are held that were given up")
            if any(each.queue for each in connections) and self._usable() is None:
                raise InvariantError("calls wait for a store that nobody may ask")

    def __repr__(self) -> str:
        return f"StoreGate({self.name}: {self.counts()})"

    # What a call needs of its gate

    def wait_for(self, call: Call[T]) -> None:
        with self._lock:
            while not call.is_settled:
                now_s = self._clock()
                if now_s >= call.deadline_s:
                    self._expire(call, now_s)
                    return
                if call.waiter is None:
                    call.waiter = threading.Condition(self._lock)
                self._clock.wait(call.waiter, call.deadline_s)

    def give_up(self, call: Call[T]) -> None:
        with self._lock:
            if call.why is not None:
                return
            value = call.value
            has_come = call.is_settled
            if has_come:
                self._counts["given_up"] += 1
                call.settle(None, Why.GIVEN_UP)
            else:
                self._end(call, Why.GIVEN_UP)
        if has_come:
            self._tell_late(call, value)

    def is_overdue(self, call: Call[T]) -> bool:
        return self._clock() >= call.deadline_s

    # Under the lock

    def _begin(self) -> None:
        if self._is_begun or self._is_closed:
            return
        self._is_begun = True
        self._breaker.begin(self._clock())
        threading.Thread(target=self._watch_time, name=f"umbp-{self.name}-watch", daemon=True).start()

    def _connections(self) -> list[Connection]:
        return self._held + ([] if self._connection is None else [self._connection])

    def _usable(self) -> Connection | None:
        return None if self._breaker.is_open or self._is_closed else self._connection

    def _count_end(self, why: Why) -> None:
        self._counts[_COUNTED_AS[why]] += 1

    def _end(self, call: Call[Any], why: Why, cause: BaseException | None = None) -> None:
        """End a pending call as unavailable. Where it was begun, its thread calls `late` when it comes
        back.
        """
        del self._pending[call]
        self._count_end(why)
        call.settle(None, why, cause)
        if call.begun_at_s is None:
            if self._connection is not None:
                self._connection.queue.remove(call)
            self._due.append(call)
            self._watch.notify()

    def _expire(self, call: Call[Any], now_s: float) -> None:
        begun_at_s = call.begun_at_s
        if begun_at_s is None or now_s - begun_at_s < call.timeout_s / 2:
            # It spent its time waiting for a thread: that is no word about the store.
            self._end(call, Why.BUSY)
        else:
            self._end(call, Why.SILENT)
            self._fail(call.epoch, now_s)

    def _fail(self, epoch: int, now_s: float) -> None:
        """Open the breaker: who waits for a thread is sent away, who is inside has his own time."""
        if not self._breaker.open(now_s, epoch):
            return
        self._counts["openings"] += 1
        if self._connection is not None:
            for call in list(self._connection.queue):
                self._end(call, Why.OPEN_BREAKER)
        self._watch.notify()
        self._changed.notify_all()
        self._tell(now_s, "fails: it is left alone until it answers again")

    def _give_up_store(self, connection: Connection) -> None:
        self._held.append(connection)
        connection.retire()

    def _tell(self, now_s: float, what: str) -> None:
        level = logging.WARNING if now_s - self._told_at_s >= QUIET_S else logging.DEBUG
        if level == logging.WARNING:
            self._told_at_s = now_s
        _log.log(level, "the store %r %s", self.name, what)

    # The thread that watches the time

    def _watch_time(self) -> None:
        while True:
            with self._lock:
                if self._is_closed and not self._due:
                    return
                now_s = self._clock()
                for call in [each for each in self._pending if now_s >= each.deadline_s]:
                    if not call.is_settled:  # the first may have sent others away
                        self._expire(call, now_s)
                next_s = math.inf if self._is_closed else self._tend(now_s)
                due = list(self._due)
                self._due.clear()
                if not due:
                    self._watch_until_s = min([next_s, *(each.deadline_s for each in self._pending)])
                    self._clock.wait(self._watch, self._watch_until_s)
                    self._watch_until_s = -math.inf
            for call in due:
                self._tell_late(call, None)

    def _tend(self, now_s: float) -> float:
        """Give up what hangs, ask what is due; when to look again."""
        connection = self._connection
        has_room = len(self._held) < self.limits.most_held
        if connection is not None and connection.task is not None:
            if now_s < connection.task_until_s:
                return connection.task_until_s
            self._fail(self._breaker.epoch, now_s)
            if not has_room:
                return math.inf
            self._breaker.put_off(now_s)
            self._replace(now_s, "hangs")
        if not self._breaker.is_open:
            return math.inf
        if now_s < self._breaker.probe_at_s:
            return self._breaker.probe_at_s
        connection = self._connection
        if connection is None:
            connection = self._connect()
        elif self._is_spent(connection):
            if len(self._held) < self.limits.most_held:
                connection = self._replace(now_s, "stays broken")
            elif not connection.is_opened:
                return math.inf
        limit_s = self.limits.probe_timeout_s if connection.is_opened else self.limits.open_timeout_s
        connection.ask(self._attempt_to_return, now_s + limit_s)
        return connection.task_until_s

    def _is_spent(self, connection: Connection) -> bool:
        if not connection.is_opened:
            return connection.failures > 0
        return connection.failures >= self.limits.patience or connection.has_no_thread_left()

    def _connect(self) -> Connection:
        self._made += 1
        name = f"umbp-{self.name}-{self._made}"
        self._connection = Connection(
            name, self._lock, self.limits.most_threads, self._clock, self._came_back, self._has_left
        )
        return self._connection

    def _replace(self, now_s: float, why: str) -> Connection:
        if self._connection is not None:
            if self._connection.is_opened:
                self._counts["replaced"] += 1
                self._tell(now_s, f"{why}: it is given up for a fresh connection")
            self._give_up_store(self._connection)
        return self._connect()

    # Threads of a connection

    def _came_back(
        self, connection: Connection, call: Call[Any], value: object, failure: BaseException | None
    ) -> None:
        with self._lock:
            connection.came_out(call)
            now_s = self._clock()
            if not call.is_settled and now_s >= call.deadline_s:
                self._expire(call, now_s)
            if not call.is_settled and failure is not None:
                self._end(call, Why.BROKEN, failure)
            if failure is not None or _is_broken(value):
                self._counts["broken"] += 1
                if connection is self._connection:
                    self._fail(call.epoch, now_s)
            is_late = call.is_settled
            if not is_late:
                del self._pending[call]
                call.settle(value)
        if is_late:
            self._tell_late(call, value)

    def _has_left(self, connection: Connection) -> None:
        with self._lock:
            connection.is_closed = True
            self._held.remove(connection)
            self._watch.notify()
            self._changed.notify_all()

    def _tell_late(self, call: Call[Any], value: object) -> None:
        late = call.take_late()
        if late is None:
            return
        try:
            late(value)
        except Exception:  # noqa: BLE001 # a caller's fault ends no thread of ours
            _log.exception("the store %r: who gave a call up failed at its late end", self.name)

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
                    if failure is not None and not self._breaker.is_open and not connection.is_retired:
                        self._refusal = failure
                        self._memory = [each for each in self._memory if each in connection.registered]
                    self._watch.notify()
                    self._changed.notify_all()

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
            for listener in list(self._listeners):
                try:
                    listener()
                except Exception:  # noqa: BLE001 # a listener's fault ends no thread of ours
                    _log.exception("the store %r: a listener to its return failed", self.name)

    def _attempted(self, connection: Connection, failure: Exception | None) -> None:
        now_s = self._clock()
        self._counts["probes"] += 1
        if not connection.is_retired:
            self._failure = failure
            if failure is None:
                connection.failures = 0
                self._breaker.close(now_s)
            else:
                connection.failures += 1
                self._breaker.put_off(now_s)
        self._watch.notify()
        self._changed.notify_all()

    def _bring_back(self, connection: Connection) -> None:
        if connection.store is None:
            connection.store = self._make_store()
        store = connection.store
        if not connection.is_opened:
            store.open()
            connection.is_opened = True
        self._register_missing(connection)
        if not store.probe():
            raise StoreError(f"the store {self.name!r} does not answer its probe")
        with self._lock:
            connection.task_until_s = self._clock() + self.limits.open_timeout_s
        if self._before_return is not None and not self._before_return(store):
            raise StoreError(f"the store {self.name!r} is not ready to return")

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


_COUNTED_AS = {
    Why.SILENT: "timeouts",
    Why.BROKEN: "raised",
    Why.BUSY: "busy",
    Why.OPEN_BREAKER: "refused",
    Why.CLOSED: "refused",
    Why.GIVEN_UP: "given_up",
}


def _is_broken(result: object) -> bool:
    if isinstance(result, list | tuple):
        return bool(result) and all(each is Outcome.BROKEN for each in result)
    return result is Outcome.BROKEN
