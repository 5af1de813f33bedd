"""From the store into a pool's slots: whose it is is checked, it is published, and held for whoever asked."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from umbp.data import LossReason
from umbp.errors import SegmentError
from umbp.pool import Outcome, Pool, SealStatus
from umbp.pool.pool import Tickets
from umbp.runtime.far.counts import FarCounts
from umbp.runtime.far.turns import Turn, Turns
from umbp.runtime.mover import chosen
from umbp.runtime.moves import Move
from umbp.store import base
from umbp.store.base import ClusterStore
from umbp.store.gate import Call, StoreGate, StoreUnavailable, Why

OTHERS_S = 0.25
"""How long others are waited for, who may be fetching an object, or storing it, or need all slots at this
moment."""

FIRST_PAUSE_S = 0.001
LONGEST_PAUSE_S = 0.02
"""How long to leave a slot that somebody else is filling, before looking again."""

ASKED_S = 0.005
"""How long a call that was begun is given to reach the store, before the interpreter does something else."""

Rows = npt.NDArray[np.intp]


@dataclass(slots=True)
class Brought:
    """What a pool has of some names by now, row by row."""

    tickets: Tickets
    is_held: npt.NDArray[np.bool_]
    """The caller gives these back."""
    lost: dict[int, str] = field(default_factory=dict)
    """Why each of the others isn't there, by row; each begins with a `LossReason`."""

    @classmethod
    def nothing(cls, count: int, error: str | None = None) -> Brought:
        """None of so many rows, all for one reason."""
        brought = cls(np.zeros(count, dtype=np.uint64), np.zeros(count, dtype=np.bool_))
        if error is not None:
            brought.lost = dict.fromkeys(range(count), error)
        return brought

    @property
    def error(self) -> str | None:
        """Why the first of the others isn't there: without it those behind it are often of no use."""
        return self.lost[min(self.lost)] if self.lost else None

    def reasons(self) -> Mapping[str, int]:
        """How many aren't there, for each `LossReason`."""
        return Counter(why.partition(":")[0] for why in self.lost.values())

    def hold(self, rows: Rows, tickets: Tickets) -> None:
        """These are there."""
        self.tickets[rows] = tickets
        self.is_held[rows] = True
        if self.lost:
            for row in rows.tolist():
                self.lost.pop(row, None)

    def lose(self, rows: Rows, why: str) -> None:
        """These are not, as it looks now."""
        self.lost.update(dict.fromkeys(rows.tolist(), why))


@dataclass(frozen=True, slots=True)
class _Get:
    """A batch on its way: its rows, its turn, whether the store is asked by now, and the answer."""

    part: slice
    turn: Turn
    is_asked: threading.Event
    call: Call[Sequence[base.Outcome]]


class Fetcher:
    """Brings objects of one namespace into one pool. Threads may call it side by side, for the same names
    too: one of them fetches, the others wait for it. What has come is checked as far as its seal tells; its
    payload is by whoever loads it first.
    """

    def __init__(
        self,
        gate: StoreGate,
        traits: base.StoreTraits,
        turns: Turns,
        pool: Pool,
        namespace_id: int,
        counts: FarCounts,
        *,
        has_checksums: bool,
        doubtful: Callable[[], set[str]] = set,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._gate = gate
        self._traits = traits
        self._turns = turns
        self._pool = pool
        self._namespace_id = namespace_id
        self._counts = counts
        self._has_checksums = has_checksums
        self._doubtful = doubtful
        self._fetching: set[str] = set()
        self._clock = clock
        self._pause = pause

    def bring(self, move: Move, deadline_s: float) -> Brought:
        """Get a move's objects, under its names. Returns at `deadline_s` of the clock, or soon after; what
        has not come by then is not there.
        """
        names = move.names
        brought = Brought.nothing(len(names))
        rows: Rows = np.arange(len(names))
        pause_s = FIRST_PAUSE_S
        others_until_s = min(self._clock() + OTHERS_S, deadline_s)
        try:
            while True:
                rows = self._leave_out_doubtful(names, self._hold(names, rows, brought), brought)
                if not len(rows):
                    return brought
                rows, others = self._reserve_and_fetch(move, rows, brought, deadline_s)
                if len(rows):
                    others_until_s = min(self._clock() + OTHERS_S, deadline_s)
                    # Published by this fetch a moment ago, or by somebody before it could.
                    rows = self._hold(names, rows, brought)
                    brought.lose(rows, f"{LossReason.ABSENT}: evicted as soon as it was fetched")
                if not len(others):
                    return brought
                is_here = not self._fetching.isdisjoint(names[row] for row in others.tolist())
                if self._clock() >= (deadline_s if is_here else others_until_s):
                    return brought
                self._pause(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
                rows = others
        except BaseException:
            self._pool.release(brought.tickets[brought.is_held])
            raise

    def _leave_out_doubtful(self, names: Sequence[str], rows: Rows, brought: Brought) -> Rows:
        """Without what the store may have from before a clear."""
        doubtful = self._doubtful() if len(rows) else set()
        if not doubtful:
            return rows
        is_doubtful = np.array([names[row] in doubtful for row in rows.tolist()], dtype=np.bool_)
        brought.lose(rows[is_doubtful], f"{LossReason.CLEARED}: while it was being sent")
        left: Rows = rows[~is_doubtful]
        return left

    def _hold(self, names: Sequence[str], rows: Rows, brought: Brought) -> Rows:
        """Hold what is there; the rows that are not."""
        tickets, outcomes = self._pool.acquire(chosen(names, rows))
        is_hit = outcomes == Outcome.HIT
        brought.hold(rows[is_hit], tickets[is_hit])
        missing: Rows = rows[~is_hit]
        return missing

    def _reserve_and_fetch(
        self, move: Move, rows: Rows, brought: Brought, deadline_s: float
    ) -> tuple[Rows, Rows]:
        """The rows that are published now, and those that others are at or that find no room for others'; the
        rest is lost.
        """
        part = move if len(rows) == len(move.names) else move.only(rows.tolist())
        wanted = part.names
        tickets, outcomes = self._pool.reserve(
            self._namespace_id, wanted, part.runs.object_bytes, part.parent_names, part.tokens
        )
        is_mine = outcomes == Outcome.RESERVED
        is_published = outcomes == Outcome.EXISTS
        if is_mine.any():
            mine = np.flatnonzero(is_mine)
            own = chosen(wanted, mine)
            # One operation each, so that other threads see them whole.
            self._fetching.update(own)
            try:
                is_published[mine], lost = self._fetch(own, tickets[mine], deadline_s)
            finally:
                self._fetching.difference_update(own)
            brought.lost.update({int(rows[mine[place]]): why for place, why in lost.items()})
        is_busy = (outcomes == Outcome.BUSY) | (outcomes == Outcome.NOT_NOW)
        brought.lose(rows[is_busy], f"{LossReason.BUSY}: somebody else was still fetching or storing it")
        is_refused = ~is_mine & ~is_busy & (outcomes != Outcome.EXISTS)
        for outcome in set(outcomes[is_refused].tolist()):
            why = f"{LossReason.FULL}: no room ({Outcome(outcome).name.lower()})"
            brought.lose(rows[outcomes == outcome], why)
        return rows[is_published], rows[is_busy | (outcomes == Outcome.FULL)]

    def _fetch(
        self, names: Sequence[str], tickets: Tickets, deadline_s: float
    ) -> tuple[npt.NDArray[np.bool_], Mapping[int, str]]:
        """Fill reserved slots and publish them; which of them are published, and why each of the others is
        not. All tickets are given back, those of a call that hangs as soon as it returns.
        """
        addresses, lengths = self._pool.sealed_ranges(tickets)
        is_done = np.zeros(len(names), dtype=np.bool_)
        gets: deque[_Get] = deque()
        lost: dict[int, str] = {}
        begun = 0
        try:
            for part in batches(lengths, self._traits):
                turn = self._turns.line_up()
                if len(gets) == self._traits.calls_at_once:
                    # Its thread is free then, and takes this one.
                    gets[0].call.wait()
                    gets[0].turn.end()
                has_waited_in_vain = bool(gets) and gets[0].call.why in (Why.SILENT, Why.BUSY)
                if has_waited_in_vain or not turn.wait(deadline_s - self._clock()):
                    turn.end()
                    why = f"{LossReason.BUSY}: others were still fetching"
                    lost.update(dict.fromkeys(range(part.start, len(names)), why))
                    break
                # While this one is under way, those that have come are published.
                begun = part.stop
                gets.append(
                    self._start(
                        part, turn, names[part], addresses[part], lengths[part], tickets[part], deadline_s
                    )
                )
                if len(gets) > self._traits.calls_at_once:
                    # Else its thread waits for the interpreter until this one has published.
                    gets[-1].is_asked.wait(ASKED_S)
                    lost |= self._end(names, tickets, is_done, gets.popleft())
            while gets:
                lost |= self._end(names, tickets, is_done, gets.popleft())
        finally:
            for each in gets:
                each.call.give_up()
            self._pool.abandon(tickets[begun:])
        return is_done, lost

    def _end(
        self, names: Sequence[str], tickets: Tickets, is_done: npt.NDArray[np.bool_], get: _Get
    ) -> Mapping[int, str]:
        """Wait for a batch; note which of its objects are published, and say why the others are not."""
        part = get.part
        try:
            outcomes = get.call.result()
        except StoreUnavailable as unavailable:
            return dict.fromkeys(range(part.start, part.stop), why_unavailable(unavailable))
        finally:
            get.turn.end()
        is_done[part], lost = self._admit(names[part], tickets[part], outcomes)
        return {part.start + place: why for place, why in lost.items()}

    def _start(
        self,
        part: slice,
        turn: Turn,
        names: Sequence[str],
        addresses: npt.NDArray[np.uint64],
        lengths: npt.NDArray[np.uint64],
        tickets: Tickets,
        deadline_s: float,
    ) -> _Get:
        at, sizes = addresses.tolist(), lengths.tolist()
        is_asked = threading.Event()

        def get(store: ClusterStore) -> Sequence[base.Outcome]:
            is_asked.set()
            return base.for_each(store.get(names, at, sizes), len(names))

        def late(_: object) -> None:
            # Until now the store could write to these slots.
            turn.end()
            with contextlib.suppress(SegmentError):
                self._pool.abandon(tickets)

        return _Get(part, turn, is_asked, self._gate.start(get, max(deadline_s - self._clock(), 0.0), late))

    def _admit(
        self, names: Sequence[str], tickets: Tickets, outcomes: Sequence[base.Outcome]
    ) -> tuple[npt.NDArray[np.bool_], Mapping[int, str]]:
        """Publish what has come and is what it should be; why the rest isn't published."""
        rows: Rows = np.arange(len(names))
        lost: dict[int, str] = {}
        if not base.are_done(outcomes):
            lost = {
                row: f"{_REASONS[outcome]}: the store answered {outcome}"
                for row, outcome in enumerate(outcomes)
                if outcome is not base.Outcome.DONE
            }
            rows = np.delete(rows, list(lost))
        damaged = [row for row in lost if outcomes[row] is base.Outcome.DAMAGED]
        arrived, own = tickets[rows], chosen(names, rows)
        if self._has_checksums:
            seals = self._pool.adopt_seal(arrived, own)
        else:
            seals = self._pool.check_seal(arrived, own, checksum=False)
        is_good = seals == SealStatus.OK
        for row, seal in zip(rows[~is_good].tolist(), seals[~is_good].tolist(), strict=True):
            damaged.append(row)
            lost[row] = f"{LossReason.DAMAGED}: {SealStatus(seal).name.lower()}"
        if damaged:
            self._remove([names[row] for row in damaged])
        good = rows[is_good]
        published = np.zeros(len(names), dtype=np.bool_)
        published[good] = self._pool.publish(tickets[good]) == Outcome.PUBLISHED
        lost.update(
            dict.fromkeys(good[~published[good]].tolist(), f"{LossReason.CLEARED}: while it was fetched")
        )
        self._pool.abandon(tickets[~published])
        self._counts.add("fetched_objects", int(published.sum()))
        return published, lost

    def _remove(self, names: Sequence[str]) -> None:
        """Make room for whole ones of what came damaged; nobody waits for it."""
        self._gate.start(lambda store: store.remove(names), REMOVE_TIMEOUT_S)


REMOVE_TIMEOUT_S = 5.0

_REASONS = {
    base.Outcome.MISS: LossReason.ABSENT,
    base.Outcome.DAMAGED: LossReason.DAMAGED,
    base.Outcome.LATER: LossReason.BUSY,
    base.Outcome.BROKEN: LossReason.GONE,
}


def why_unavailable(unavailable: StoreUnavailable) -> str:
    """Of a store that was too slow, or has too many callers, that it is busy; else that it is gone."""
    is_late = unavailable.why in (Why.SILENT, Why.BUSY, Why.GIVEN_UP)
    return f"{LossReason.BUSY if is_late else LossReason.GONE}: {unavailable}"


def batches(lengths: npt.NDArray[np.uint64], traits: base.StoreTraits) -> Iterator[slice]:
    """Objects of these lengths in as few batches as the store's bounds allow."""
    ends = np.cumsum(lengths)
    start = before = 0
    while start < len(lengths):
        fitting = int(np.searchsorted(ends, before + traits.most_bytes, side="right"))
        stop = min(max(fitting, start + 1), start + traits.most_objects)
        yield slice(start, stop)
        start, before = stop, int(ends[stop - 1])
