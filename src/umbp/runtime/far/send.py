"""From a pool to the store, in the background: whatever was published goes out when there is time for it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from umbp.data import LossReason
from umbp.errors import SegmentError, UMBPError
from umbp.pool import Outcome, Pool
from umbp.pool.pool import Tickets
from umbp.runtime.far.counts import FarCounts
from umbp.runtime.far.debts import Debts
from umbp.runtime.far.fetch import batches
from umbp.runtime.far.offers import NO_OFFERS, Offers
from umbp.runtime.far.turns import Turn, Turns
from umbp.store import base
from umbp.store.base import ClusterStore, StoreError
from umbp.store.gate import StoreGate, StoreUnavailable, Why
from umbp.store.threads import no_thread_for
from umbp.store.waiting import MonotonicClock, WaitingClock

logger = logging.getLogger("vllm.umbp")

MOST_WAITING = 65_536
"""So many objects may wait to be sent. They keep no slots, only their names: what the pool has evicted when
their turn comes is left out."""

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 2.0
"""How long to leave a store that is full or doesn't answer."""

REMOVE_TIMEOUT_S = 5.0

SPARE_THREADS = 1
"""While a batch is put the next one is sealed."""


@dataclass(frozen=True, slots=True)
class _Parcel:
    """Objects of one pool that go out together."""

    pool: Pool
    names: Sequence[str]
    offers: Offers = NO_OFFERS


@dataclass(frozen=True, slots=True)
class _Batch:
    """Held objects, as many as go in one put, and its turn."""

    pool: Pool
    names: Sequence[str]
    tickets: Tickets
    addresses: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.uint64]
    offers: Offers
    turn: Turn


class Sender:
    """Objects go out in the order in which they were offered, so prefixes before what builds on them; when
    too many wait the newest are dropped. Threads: as many as put at once, and one that seals meanwhile.
    """

    def __init__(
        self,
        gate: StoreGate,
        traits: base.StoreTraits,
        counts: FarCounts,
        debts: Debts,
        tell: Callable[[Pool], None],
        *,
        timeout_s: float,
        has_checksums: bool,
        most_waiting: int = MOST_WAITING,
        clock: WaitingClock | None = None,
    ) -> None:
        """`StoreError` where the system has no threads for it."""
        self._gate = gate
        self._traits = traits
        self._debts = debts
        self._tell = tell
        self._counts = counts
        self._timeout_s = timeout_s
        self._has_checksums = has_checksums
        self._most_waiting = most_waiting
        self._clock: WaitingClock = clock or MonotonicClock()
        self._change = threading.Condition()
        self._parcels: deque[_Parcel] = deque()
        self._waiting = 0
        self._being_put: dict[Turn, Sequence[str]] = {}
        """Each batch's names, by its turn."""
        self._on_their_way: Counter[Pool] = Counter()
        """Parcels and batches that threads have in their hands."""
        self._closes_at_s: float | None = None
        self._pause_s = FIRST_PAUSE_S
        self._taking = threading.Lock()
        self._turns = Turns(traits.calls_at_once)
        self._threads = [
            threading.Thread(target=self._run, name="umbp-send", daemon=True)
            for _ in range(traits.calls_at_once + SPARE_THREADS)
        ]
        gate.on_return(self._look_again)
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:
            with self._change:
                self._closes_at_s = self._clock()
                self._change.notify_all()
            raise no_thread_for("umbp-send", error) from error

    @property
    def waiting(self) -> int:
        """Objects that have been offered and have neither gone out nor been given up."""
        return self._waiting

    def offer(self, pool: Pool, names: Sequence[str]) -> None:
        """Send these, which the pool has, when their turn comes. Returns at once, never raises."""
        with self._change:
            room = self._most_waiting - self._waiting
            taken = names[:room] if self._closes_at_s is None else ()
            if taken:
                self._parcels.append(_Parcel(pool, taken))
                self._waiting += len(taken)
                self._change.notify_all()
        self._counts.add("dropped_send_objects", len(names) - len(taken), LossReason.FULL)

    def forget(self, pool: Pool) -> bool:
        """Leave out what waits of a pool that is being left; whether none of it is on its way, as far as
        somebody waits for it. False: after the time of one call something still is.
        """
        with self._change:
            gone = self._leave_out(pool)
            has_ended = self._change.wait_for(lambda: not self._on_their_way[pool], self._timeout_s)
            # What was on its way may have been handed back to wait once more.
            gone += self._leave_out(pool)
        self._counts.add("dropped_send_objects", gone, LossReason.GONE)
        return has_ended

    def _leave_out(self, pool: Pool) -> int:
        """Under the lock."""
        gone = sum(len(parcel.names) for parcel in self._parcels if parcel.pool is pool)
        self._parcels = deque(parcel for parcel in self._parcels if parcel.pool is not pool)
        self._waiting -= gone
        self._change.notify_all()
        return gone

    def doubtful(self) -> set[str]:
        """What is just being put, or must be removed again. The pool has the former, or it was cleared away:
        then what the store has under such a name is old.
        """
        with self._change:
            return self._debts.names().union(*self._being_put.values())

    def flush(self, timeout_s: float) -> bool:
        """Wait until nothing waits; False if that took too long."""
        with self._change:
            return self._change.wait_for(lambda: not self._waiting, timeout_s)

    def close(self, patience_s: float) -> None:
        """Send what waits for at most so long, then give up the rest."""
        with self._change:
            self._closes_at_s = self._clock() + patience_s
            self._change.notify_all()
        until_s = self._clock() + patience_s + 1.0
        for thread in self._threads:
            thread.join(max(until_s - self._clock(), 0.0))
        with self._change:
            left, self._waiting = self._waiting, 0
            self._parcels.clear()
            self._change.notify_all()
        if left:
            logger.warning("UMBP: %d objects had not been sent to the store when the engine ended", left)
        self._counts.add("dropped_send_objects", left, LossReason.GONE)

    # On the threads

    def _run(self) -> None:
        while (batch := self._take()) is not None:
            try:
                self._send(batch)
            except Exception:
                logger.exception("UMBP: sending %d objects to the store broke", len(batch.names))
                self._drop(batch.pool, len(batch.names))
            finally:
                batch.turn.end()

    def _take(self) -> _Batch | None:
        """The next objects that the pool still has, as many as the store takes at once; None when it is time
        to end.
        """
        # One by one: turns are in the order of the objects.
        with self._taking:
            while (parcel := self._next()) is not None:
                try:
                    batch = self._hold(parcel)
                except Exception:
                    logger.exception("UMBP: sending %d objects to the store broke", len(parcel.names))
                    self._drop(parcel.pool, len(parcel.names))
                    continue
                if batch is not None:
                    return batch
        return None

    def _next(self) -> _Parcel | None:
        with self._change:
            # While the store is away objects wait, so that what it misses now it gets when it is back.
            self._change.wait_for(lambda: (self._parcels and self._gate.is_well) or self._is_closing)
            if not self._parcels or self._is_over() or not self._gate.is_well:
                return None
            first = self._parcels.popleft()
            self._on_their_way[first.pool] += 1
            most = self._traits.most_objects
            names = list(first.names)
            while len(names) < most and self._parcels and self._joins(self._parcels[0], first):
                names += self._parcels.popleft().names
            if len(names) > most:
                self._parcels.appendleft(_Parcel(first.pool, names[most:], first.offers))
            return _Parcel(first.pool, names[:most], first.offers)

    def _look_again(self) -> None:
        """The store is back."""
        with self._change:
            self._change.notify_all()

    @property
    def _is_closing(self) -> bool:
        return self._closes_at_s is not None

    def _is_over(self) -> bool:
        return self._closes_at_s is not None and self._clock() >= self._closes_at_s

    @staticmethod
    def _joins(parcel: _Parcel, first: _Parcel) -> bool:
        return parcel.pool is first.pool and parcel.offers == first.offers

    def _hold(self, parcel: _Parcel) -> _Batch | None:
        """Hold what goes in one put, and let the rest wait; None where the pool has nothing of it."""
        pool = parcel.pool
        # Each once: a store may fail at two puts of one name.
        wanted = list(dict.fromkeys(parcel.names))
        tickets, outcomes = pool.acquire(wanted)
        rows = np.flatnonzero(outcomes == Outcome.HIT)
        names, held = [wanted[row] for row in rows.tolist()], tickets[rows]
        addresses, lengths = pool.sealed_ranges(held)
        part = next(batches(lengths, self._traits), slice(0, 0))
        pool.release(held[part.stop :])
        rest = names[part.stop :]
        with self._change:
            if rest:
                self._parcels.appendleft(_Parcel(pool, rest, parcel.offers))
            self._waiting -= len(parcel.names) - len(names)
            self._change.notify_all()
        self._counts.add("dropped_send_objects", len(wanted) - len(names), LossReason.ABSENT)
        if not names:
            self._hand_back(pool, 0)
            return None
        turn = self._turns.line_up()
        return _Batch(pool, names[part], held[part], addresses[part], lengths[part], parcel.offers, turn)

    def _send(self, batch: _Batch) -> None:
        """Seal and put a batch. What the store wants later is taken once more, after a pause for all."""
        is_told = False
        try:
            batch.pool.seal(batch.tickets, batch.names, checksum=self._has_checksums)
            batch.turn.wait(None)
            is_told = self._has_told(batch.pool)
        finally:
            if not is_told:
                with contextlib.suppress(SegmentError):
                    batch.pool.release(batch.tickets)
        again, offers = self._put(batch) if is_told else (batch.names, batch.offers.unasked())
        # Whoever ends doesn't wait for a store to have time.
        is_given_up = offers.are_over(self._clock()) or self._is_closing
        if is_given_up:
            self._counts.add("dropped_send_objects", len(again), LossReason.BUSY)
        else:
            self._again(_Parcel(batch.pool, again, offers))
        self._hand_back(batch.pool, len(batch.names) - (0 if is_given_up else len(again)))
        if again:
            self._pause()
        else:
            self._pause_s = FIRST_PAUSE_S

    def _pause(self) -> None:
        with self._change:
            until_s = self._clock() + self._pause_s
            while not self._is_closing and self._clock() < until_s:
                self._clock.wait(self._change, until_s)
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _again(self, parcel: _Parcel) -> None:
        if parcel.names:
            with self._change:
                self._parcels.appendleft(parcel)
                self._change.notify_all()

    def _hand_back(self, pool: Pool, ended: int) -> None:
        """A thread has done with a parcel or batch; so many of its objects don't wait any more."""
        with self._change:
            self._on_their_way[pool] -= 1
            if not self._on_their_way[pool]:
                del self._on_their_way[pool]
            self._waiting -= ended
            self._change.notify_all()

    def _drop(self, pool: Pool, count: int) -> None:
        self._counts.add("dropped_send_objects", count, LossReason.FAILED)
        self._hand_back(pool, count)

    def _has_told(self, pool: Pool) -> bool:
        """False: the store is away or takes no memory now, or the pool is being resized."""
        try:
            self._tell(pool)
        except (StoreError, SegmentError):
            return False
        return True

    def _put(self, batch: _Batch) -> tuple[Sequence[str], Offers]:
        """Those that the store has not taken, and what it has said to them by then."""
        names, lengths = batch.names, batch.lengths
        addresses, sizes = batch.addresses.tolist(), lengths.tolist()

        def put(store: ClusterStore) -> Sequence[base.Outcome]:
            outcomes = base.for_each(store.put(names, addresses, sizes), len(names))
            if base.are_done(outcomes):
                # The next one need not wait until these slots are given back.
                batch.turn.end()
            return outcomes

        def late(_: object) -> None:
            # Until now the store could read these slots.
            with contextlib.suppress(UMBPError):
                self._settle(batch)

        with self._change:
            self._being_put[batch.turn] = names
        try:
            outcomes = self._gate.call(put, self._timeout_s, late)
        except StoreUnavailable as unavailable:
            has_failed = unavailable.why in (Why.SILENT, Why.BROKEN)
            return names, batch.offers.failed() if has_failed else batch.offers.unasked()
        self._settle(batch)
        if base.are_done(outcomes):
            self._counts.add("sent_objects", len(names))
            self._counts.add("sent_bytes", int(lengths.sum()))
            return (), batch.offers
        rows = [row for row, outcome in enumerate(outcomes) if outcome is not base.Outcome.DONE]
        left = [names[row] for row in rows]
        self._counts.add("sent_objects", len(names) - len(left))
        self._counts.add("sent_bytes", int(lengths.sum()) - int(lengths[rows].sum()))
        if base.Outcome.BROKEN in outcomes:
            return left, batch.offers.failed()
        return left, batch.offers.later(self._clock())

    def _settle(self, batch: _Batch) -> None:
        """Give the slots back. What was cleared away while it was on its way must not stay in the store: held
        objects can't be evicted, so one that can't be found any more, or only as another of the same name,
        was removed.
        """
        pool, names, tickets = batch.pool, batch.names, batch.tickets
        try:
            found, _ = pool.acquire(names)
            pool.release(found[found != 0])
            is_there = found == tickets
            pool.release(tickets)
        except SegmentError:
            is_there = np.zeros(len(names), dtype=np.bool_)
        cleared = [names[row] for row in np.flatnonzero(~is_there).tolist()]
        if cleared:
            self._debts.owe(cleared)
        with self._change:
            del self._being_put[batch.turn]
        if cleared:
            self._gate.start(self._repay, REMOVE_TIMEOUT_S, lambda _: self._insist())

    def _repay(self, store: ClusterStore) -> bool:
        is_done = self._debts.repay(store)
        if not is_done:
            # It must not be fetched: the gate tries again before it lets anyone in.
            self._gate.report_broken()
        return is_done

    def _insist(self) -> None:
        """Nobody had time for it."""
        if self._debts.is_owed:
            self._gate.report_broken()
