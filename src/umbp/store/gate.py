"""One process's bounded way to a cluster store, which may answer late, never, or not be there.

The gate makes the store, opens it, and asks it on threads of its own, so that nobody waits longer than he
said. After a failure a breaker keeps everybody away: calls are refused in microseconds, and the store is
probed on a thread of its own until it is well, at once where somebody has found that it is (`wait_probed`).
One whose probe hangs, or that stays broken, or that holds all threads, is given up for a fresh object. So
many objects may be given up and still hold threads; beyond, the last one is waited for.

Threads: for each store object `most_threads` for calls and one for the rest, and one that watches the time.
All are daemons; nothing here keeps an interpreter from exiting. Any thread may call the gate.
"""

from __future__ import annotations

import logging
import math
import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, TypeVar

from umbp.errors import InvariantError
from umbp.store.base import ClusterStore, Outcome, StoreError
from umbp.store.bounds import GateCounts, GateLimits
from umbp.store.breaker import Backoff, Breaker
from umbp.store.calls import Call, Late, StoreUnavailable, Verb, Why
from umbp.store.connection import Connection, Memory
from umbp.store.keeper import StoreKeeper
from umbp.store.threads import start_thread
from umbp.store.waiting import MonotonicClock, WaitingClock

__all__ = ["Backoff", "Call", "GateCounts", "GateLimits", "StoreGate", "StoreUnavailable", "Why"]

T = TypeVar("T")

logger = logging.getLogger("vllm.umbp")


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
        self._clock: WaitingClock = clock or MonotonicClock()
        self._lock = threading.Lock()
        self._watch = threading.Condition(self._lock)
        self._watch_until_s = math.inf
        self._keeper = StoreKeeper(
            name,
            make_store,
            limits=self.limits,
            breaker=Breaker(backoff or Backoff(), random.Random(seed)),
            before_return=before_return,
            clock=self._clock,
            lock=self._lock,
            came_back=self._came_back,
            send_away=self._send_away,
            wake=self._watch.notify,
        )
        self._pending: dict[Call[Any], None] = {}
        self._due: deque[Call[Any]] = deque()
        """Calls that never began, whose `late` is to be called."""
        self._is_begun = False
        self._ended: Counter[Why] = Counter()
        self._calls = 0
        self._broken = 0

    # Life

    def begin(self) -> None:
        """Open the store in the background, and go on trying. `StoreError` where the system has no thread for
        that.
        """
        with self._lock:
            if self._is_begun or self._keeper.is_closed:
                return
            self._is_begun = True
            self._keeper.begin()
        try:
            start_thread(self._watch_time, f"umbp-{self.name}-watch")
        except StoreError:
            self._is_begun = False
            raise

    def open(self, timeout_s: float) -> None:
        """Open the store and wait for it; `StoreError` where it isn't usable by then (it is still tried until
        `close`), `ConfigError` at once where it can't be made as configured.
        """
        self.begin()
        with self._lock:
            self._keeper.wait_usable(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """End all calls as unavailable and leave the store; whether it was left in that time. Where a call
        hangs, its thread stays behind, and `late` is still called if it comes back.
        """
        with self._lock:
            for call in list(self._pending):
                self._end(call, Why.CLOSED)
            self._keeper.leave()
            return self._keeper.wait_left(timeout_s)

    def register(self, address: int, size: int, timeout_s: float) -> None:
        """Tell the store of memory, and every store object that comes after it; the memory lives until
        `close`, and beyond where that returned False. `StoreError` where the store refuses it or doesn't
        answer. While the breaker is open it is only remembered.
        """
        with self._lock:
            self._keeper.register(Memory(address, size), timeout_s)

    def forget(self, address: int, size: int, timeout_s: float) -> bool:
        """Unregister memory that no call has any more. False: the store may still know it, and it must not
        go.
        """
        with self._lock:
            self._keeper.forget(Memory(address, size))

        def unregister(store: ClusterStore) -> bool:
            store.unregister(address, size)
            return True

        try:
            return self.call(unregister, timeout_s)
        except StoreUnavailable:
            return False

    def on_return(self, listener: Callable[[], None]) -> None:
        """Call this on the probing thread whenever the store has become usable, the first time included;
        calls may be under way by then.
        """
        self._keeper.listeners.append(listener)

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
            self._calls += 1
            connection = self._keeper.usable()
            if connection is not None and len(connection.queue) < self.limits.most_waiting:
                call.deadline_s = self._clock() + timeout_s
                call.epoch = self._keeper.breaker.epoch
                self._pending[call] = None
                connection.take(call)
                if call.deadline_s < self._watch_until_s:
                    self._watch.notify()
                return call
            why = Why.BUSY if connection else Why.CLOSED if self._keeper.is_closed else Why.OPEN_BREAKER
            self._ended[why] += 1
            call.settle(None, why)
        self._tell_late(call, None)
        return call

    def report_broken(self) -> None:
        """A result told its caller that the store is broken: ask it nothing until a probe went well."""
        with self._lock:
            self._keeper.fail(self._keeper.breaker.epoch, self._clock(), "what it answered shows it")
            self._broken += 1

    def wait_probed(self, timeout_s: float) -> bool:
        """Whether calls are let through. For whoever knows that somebody else has found the store well a
        moment ago: where the breaker is open the store is probed at once, or when the probe under way has
        failed, and that is waited for. False where it fails or takes longer, and without a wait where one
        that was asked for has failed and its pause isn't over yet, or the gate is closed.
        """
        if self.is_well:
            return True
        with self._lock:
            return self._keeper.wait_probed(timeout_s)

    @property
    def openings(self) -> int:
        """How often the breaker has opened for a failure; costs nothing."""
        return self._keeper.openings

    @property
    def is_well(self) -> bool:
        """Whether calls are let through at this moment; costs nothing."""
        return not self._keeper.breaker.is_open and not self._keeper.is_closed

    def counts(self) -> GateCounts:
        with self._lock:
            now_s = self._clock()
            keeper = self._keeper
            connections = keeper.connections()
            return GateCounts(
                calls=self._calls,
                timeouts=self._ended[Why.SILENT],
                raised=self._ended[Why.BROKEN],
                busy=self._ended[Why.BUSY],
                refused=self._ended[Why.OPEN_BREAKER] + self._ended[Why.CLOSED],
                given_up=self._ended[Why.GIVEN_UP],
                broken=self._broken,
                openings=keeper.openings,
                probes=keeper.attempts,
                replaced=keeper.replaced,
                seconds_open=keeper.breaker.seconds_open(now_s),
                is_open=keeper.breaker.is_open,
                running=sum(len(each.running) for each in connections),
                waiting=sum(len(each.queue) for each in connections),
                stuck_threads=sum(each.stuck(now_s) for each in connections),
                held_stores=len(keeper.held),
            )

    def audit(self) -> None:
        """At any time: every call is in one place, and every bound is kept."""
        with self._lock:
            self._keeper.audit()
            inside = [call for each in self._keeper.connections() for call in (*each.queue, *each.running)]
            if len(set(inside)) != len(inside):
                raise InvariantError("a call is in two places")
            lost = set(self._pending).symmetric_difference(call for call in inside if not call.is_settled)
            if lost:
                raise InvariantError(f"calls that are neither under way nor ended, or both: {lost}")

    def __repr__(self) -> str:
        return f"StoreGate({self.name}: {self.counts()})"

    # What a call needs of its gate

    def wait_for(self, call: Call[T], patience_s: float) -> None:
        with self._lock:
            until_s = min(self._clock() + patience_s, call.deadline_s)
            while not call.is_settled:
                now_s = self._clock()
                if now_s >= call.deadline_s:
                    self._expire(call, now_s)
                if now_s >= until_s:
                    return
                if call.waiter is None:
                    call.waiter = threading.Condition(self._lock)
                self._clock.wait(call.waiter, until_s)

    def give_up(self, call: Call[T]) -> None:
        with self._lock:
            if call.why is not None:
                return
            value = call.value
            has_come = call.is_settled
            if has_come:
                self._ended[Why.GIVEN_UP] += 1
                call.settle(None, Why.GIVEN_UP)
            else:
                self._end(call, Why.GIVEN_UP)
        if has_come:
            self._tell_late(call, value)

    def is_overdue(self, call: Call[T]) -> bool:
        return self._clock() >= call.deadline_s

    # Under the lock

    def _end(self, call: Call[Any], why: Why, cause: BaseException | None = None) -> None:
        """End a pending call as unavailable. Where it was begun, its thread calls `late` when it comes
        back.
        """
        del self._pending[call]
        self._ended[why] += 1
        call.settle(None, why, cause)
        if call.begun_at_s is None:
            if self._keeper.current is not None:
                self._keeper.current.queue.remove(call)
            self._due.append(call)
            self._watch.notify()

    def _expire(self, call: Call[Any], now_s: float) -> None:
        had_s = -1.0 if call.begun_at_s is None else now_s - call.begun_at_s
        current = self._keeper.current
        if had_s >= call.timeout_s / 2:
            self._end(call, Why.SILENT)
            is_ill = had_s >= self.limits.least_silence_s
        else:
            # It spent its time waiting for a thread, which is no word about the store, unless the threads are
            # in calls that never end: those that were given up, or had too little time to say anything.
            self._end(call, Why.BUSY)
            is_ill = current is not None and current.is_worn_out()
        if is_ill:
            self._keeper.fail(call.epoch, now_s, f"it has not answered within {call.timeout_s:g} s")

    def _send_away(self, connection: Connection) -> None:
        """The breaker has opened: nobody waits for a thread any more; who is inside has his own time."""
        for call in list(connection.queue):
            self._end(call, Why.OPEN_BREAKER)

    # The thread that watches the time

    def _watch_time(self) -> None:
        while True:
            with self._lock:
                if self._keeper.is_closed and not self._due:
                    return
                now_s = self._clock()
                for call in [each for each in self._pending if now_s >= each.deadline_s]:
                    if not call.is_settled:  # the first may have sent others away
                        self._expire(call, now_s)
                next_s = self._keeper.tend(now_s)
                due = list(self._due)
                self._due.clear()
                if not due:
                    self._watch_until_s = min([next_s, *(each.deadline_s for each in self._pending)])
                    self._clock.wait(self._watch, self._watch_until_s)
                    self._watch_until_s = -math.inf
            for call in due:
                self._tell_late(call, None)

    # The threads inside a store

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
                self._broken += 1
                if connection is self._keeper.current:
                    self._keeper.fail(call.epoch, now_s, str(failure or "it answers that it is broken"))
            is_late = call.is_settled
            if not is_late:
                del self._pending[call]
                call.settle(value)
        if is_late:
            self._tell_late(call, value)

    def _tell_late(self, call: Call[Any], value: object) -> None:
        late = call.take_late()
        if late is None:
            return
        try:
            late(value)
        except Exception:  # a caller's fault ends no thread of ours
            logger.exception("UMBP: who gave up a call of the store %r failed at its late end", self.name)


def _is_broken(result: object) -> bool:
    if isinstance(result, list | tuple):
        return bool(result) and all(each is Outcome.BROKEN for each in result)
    return result is Outcome.BROKEN
