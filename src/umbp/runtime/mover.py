"""Objects between engine blocks and pool slots: what one job does, without knowing of jobs and threads."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from umbp.data import LossReason, TransferJobState
from umbp.errors import ConfigError, SegmentError
from umbp.pool import CopyStatus, Outcome, Pool, slot_bytes
from umbp.pool.pool import Tickets
from umbp.runtime.moves import Move
from umbp.transfer import Engine

logger = logging.getLogger("vllm.umbp")

_DAMAGED = (CopyStatus.BAD_CHECKSUM, CopyStatus.BAD_ARRIVAL)

PUBLISH_TRIES = 5
"""How often a publish asks a busy lock again before its objects are given up."""

SLAB_BYTES = 16 << 20
SLABS_AT_LEAST = 64
"""Slabs are this large, or smaller where a pool would have fewer than so many."""


class ObjectMover:
    """Loads, stores and publishes objects of one namespace. One thread loads, one stores, one publishes.

    A store's slots stay reserved under their keys until `publish` or `abandon`.
    """

    def __init__(
        self,
        pool: Pool,
        namespace_id: int,
        engine: Engine,
        *,
        has_checksums: bool,
        leaves: bool = False,
        told_damaged: Callable[[Sequence[str]], None] | None = None,
    ) -> None:
        """The engine stays its owner's. With `has_checksums` all is stored with one and loaded by it. What
        `leaves` the pool soon, under a checksum, is stored with one where that costs little. `told_damaged`
        gets the names of what a load has found to have come damaged from elsewhere; it returns at once.
        """
        self._pool = pool
        self._namespace_id = namespace_id
        self._engine = engine
        self._has_checksums = has_checksums
        self._leaves = leaves
        self._told_damaged = told_damaged
        self._is_closed = False
        self._unpublished: dict[str, int] = {}
        """Tickets by key: the storing thread adds, the publishing one takes, one operation at a time."""

    @property
    def pool(self) -> Pool:
        return self._pool

    @property
    def namespace_id(self) -> int:
        return self._namespace_id

    def use(self, engine: Engine) -> None:
        """Copy by another engine from now on. No job may run."""
        self._engine = engine

    def fence(self) -> object:
        """Taken on the engine's thread when a transfer is asked for; goes into its load or store."""
        return self._engine.fence()

    def load(self, move: Move, fence: object) -> Moved:
        """Fill blocks from the pool. Objects that are absent or damaged are lost, each by itself."""
        tickets, outcomes = self._pool.acquire(move.names)
        return self.load_held(move, tickets, outcomes == Outcome.HIT, fence)

    def load_held(self, move: Move, tickets: Tickets, is_held: npt.NDArray[np.bool_], fence: object) -> Moved:
        """Fill blocks from objects that are held, and give those back; the others are absent."""
        rows = np.flatnonzero(is_held)
        held = tickets[rows]
        blocks = np.asarray(move.block_ids, dtype=np.int64)[rows]
        try:
            statuses = self._engine.load(
                move.runs, blocks, self._pool, held, checksum=self._has_checksums, fence=fence
            )
        finally:
            self._pool.release(held)
        moved = Moved.none_of(move)
        if len(rows) < len(tickets):
            moved.absent = ~is_held
            moved.error = f"{LossReason.ABSENT}: not stored"
        self._settle_copies(moved, move, rows, statuses)
        if not moved.is_done.all():
            self._remove_damaged(move.names, rows, held, statuses)
        return moved

    def _remove_damaged(
        self,
        names: Sequence[str],
        rows: npt.NDArray[np.intp],
        held: Tickets,
        statuses: npt.NDArray[np.uint8],
    ) -> None:
        """Not what has taken its place meanwhile: somebody else may have found it, and stored a whole one."""
        bad = np.flatnonzero((statuses == CopyStatus.BAD_ARRIVAL) | (statuses == CopyStatus.BAD_CHECKSUM))
        if not len(bad):
            return
        found, _ = self._pool.acquire([names[row] for row in rows[bad].tolist()])
        self._pool.release(found[found != 0])
        bad = bad[found == held[bad]]
        damaged = [names[row] for row in rows[bad].tolist()]
        if damaged:
            logger.warning("UMBP: removed %d objects whose checksum was wrong", len(damaged))
            self._pool.remove(damaged)
        arrived = rows[bad[statuses[bad] == CopyStatus.BAD_ARRIVAL]].tolist()
        if arrived and self._told_damaged is not None:
            self._told_damaged(list(dict.fromkeys(names[row] for row in arrived)))

    def store(self, move: Move, fence: object) -> Moved:
        """Copy blocks into reserved slots. What is stored already is done; what finds no room is lost."""
        tickets, outcomes = self._pool.reserve(
            self._namespace_id, move.names, move.runs.object_bytes, move.parent_names, move.tokens
        )
        rows = np.flatnonzero(outcomes == Outcome.RESERVED)
        blocks = np.asarray(move.block_ids, dtype=np.int64)[rows]
        try:
            statuses = self._engine.store(
                move.runs,
                blocks,
                self._pool,
                tickets[rows],
                checksum=self._has_checksums or (self._leaves and self._engine.sums_in_passing),
                fence=fence,
            )
        except BaseException:
            self._pool.abandon(tickets[rows])
            raise
        moved = Moved.none_of(move)
        is_good = self._settle_copies(moved, move, rows, statuses)
        self._keep(chosen(move.keys, rows[is_good]), tickets[rows[is_good]])
        if len(rows) < len(outcomes):
            # Busy: being written by an earlier row or job of ours, or by another process that shares the
            # pool. Should that one fail, the object is missing, as if it had been evicted.
            lost_here = set(chosen(move.keys, rows[~is_good]))
            moved.is_done |= outcomes == Outcome.EXISTS
            for row in np.flatnonzero(outcomes == Outcome.BUSY).tolist():
                moved.is_done[row] = move.keys[row] not in lost_here
            refused = np.flatnonzero(~moved.is_done & (outcomes != Outcome.RESERVED))
            if len(refused):
                outcome = Outcome(outcomes[refused[-1]])
                reason = LossReason.BUSY if outcome == Outcome.NOT_NOW else LossReason.FULL
                moved.error = f"{reason}: no room ({outcome.name.lower()})"
        if not is_good.all():
            self._pool.abandon(tickets[rows[~is_good]])
        return moved

    def publish(self, keys: Sequence[str]) -> list[str]:
        """Make these keys' stored objects visible; returns those that can't be, as their namespace was
        cleared meanwhile or the lock is held for long. A lock that is busy is asked for a few times.
        """
        waiting = self._take(keys)
        if self._is_closed:
            # The pool is being left, and `close` may have given back what isn't in `waiting`.
            self._pool.abandon([ticket for _, ticket in waiting])
            return list(keys)
        lost: list[str] = []
        for _ in range(PUBLISH_TRIES):
            if not waiting:
                break
            outcomes = self._pool.publish([ticket for _, ticket in waiting])
            left = np.flatnonzero(outcomes != Outcome.PUBLISHED).tolist()
            lost += [waiting[row][0] for row in left if outcomes[row] != Outcome.NOT_NOW]
            waiting = [waiting[row] for row in left if outcomes[row] == Outcome.NOT_NOW]
        self._pool.abandon([ticket for _, ticket in waiting])
        return lost + [key for key, _ in waiting]

    def abandon(self, keys: Sequence[str]) -> None:
        """Give the slots of these keys' stored objects back."""
        self._pool.abandon([ticket for _, ticket in self._take(keys)])

    def unpublished(self, keys: Sequence[str]) -> dict[str, int]:
        """Of these keys, those whose stored objects wait to be published, with their tickets."""
        return {key: self._unpublished[key] for key in keys if key in self._unpublished}

    def abandon_forgotten(self, tickets: Mapping[str, int]) -> None:
        """Give back what `unpublished` has told at some time, as far as it still waits. Never raises."""
        waiting = [key for key, ticket in tickets.items() if self._unpublished.get(key) == ticket]
        if waiting:
            # In a pool that has taken this process for dead, or was left, there is nothing to give back.
            with contextlib.suppress(SegmentError):
                self.abandon(waiting)

    def close(self) -> None:
        """Give back what is not published; what is published from now on is lost. No job may run."""
        self._is_closed = True
        # In a pool that has taken this process for dead, or is damaged, there is nothing to give back.
        with contextlib.suppress(SegmentError):
            self.abandon(list(self._unpublished))

    def _settle_copies(
        self, moved: Moved, move: Move, rows: npt.NDArray[np.intp], statuses: npt.NDArray[np.uint8]
    ) -> npt.NDArray[np.bool_]:
        """Note the copies of these rows; which of them are good."""
        is_good: npt.NDArray[np.bool_] = statuses == CopyStatus.OK
        moved.is_done[rows] = is_good
        moved.copied_bytes[rows[is_good]] = move.runs.object_bytes
        bad = statuses[~is_good]
        if len(bad):
            status = CopyStatus(bad[-1])
            reason = LossReason.DAMAGED if status in _DAMAGED else LossReason.FAILED
            moved.error = f"{reason}: the copy ended with {status.name.lower()}"
        return is_good

    def _keep(self, keys: Sequence[str], tickets: npt.NDArray[np.uint64]) -> None:
        if not self._unpublished.keys().isdisjoint(keys):
            # A clear has taken keys away from an earlier store that is not published yet.
            self.abandon([key for key in keys if key in self._unpublished])
        self._unpublished.update(zip(keys, tickets.tolist(), strict=True))

    def _take(self, keys: Sequence[str]) -> list[tuple[str, int]]:
        """What is not published of these keys, each once, with its ticket; it is the caller's now."""
        take = self._unpublished.pop
        return [(key, ticket) for key in keys if (ticket := take(key, None)) is not None]


@dataclass(slots=True)
class Moved:
    """What became of a move, row by row. A key that was lost in one row is lost."""

    keys: Sequence[str]
    is_done: npt.NDArray[np.bool_]
    """The object is where it should be, by a copy or without one."""
    copied_bytes: npt.NDArray[np.int64]
    error: str | None = None
    """Why the last of the lost rows was lost, where there are any."""
    absent: npt.NDArray[np.bool_] | None = None
    """The rows of a load whose objects the pool does not have, where there are any."""

    @classmethod
    def none_of(cls, move: Move) -> Moved:
        """Nothing has moved yet."""
        count = len(move.keys)
        return cls(move.keys, np.zeros(count, dtype=np.bool_), np.zeros(count, dtype=np.int64))


def settle(job: TransferJobState, moves: Sequence[Moved], error: str | None = None) -> None:
    """Give every key of a job the outcome of its rows; a key without any is lost, for `error`."""
    column = job.key_column
    if len(moves) == 1 and moves[0].keys is column and len(job.keys) == len(column):
        (moved,) = moves
        job.plan_bytes = moved.copied_bytes.tolist()
        if moved.is_done.all():
            job.complete()
            return
        lost = set(chosen(column, np.flatnonzero(~moved.is_done)))
    else:
        lost = set(job.keys).difference(*(moved.keys for moved in moves))
        sizes: dict[str, int] = {}
        for moved in moves:
            for key, is_done, size in zip(
                moved.keys, moved.is_done, moved.copied_bytes.tolist(), strict=True
            ):
                sizes[key] = max(size, sizes.get(key, 0))
                if not is_done:
                    lost.add(key)
        # A key's second plan counts nothing.
        job.plan_bytes = [sizes.pop(key, 0) for key in column]
    if done := job.keys - lost:
        job.complete(done)
    if lost:
        job.fail(lost, error or next((moved.error for moved in reversed(moves) if moved.error), None))


def chosen(keys: Sequence[str], rows: npt.NDArray[np.intp]) -> Sequence[str]:
    """The keys of these rows, which are each there once and in order: mostly all."""
    return keys if len(rows) == len(keys) else [keys[row] for row in rows.tolist()]


def pool_geometry(capacity_bytes: int, object_sizes: Sequence[int]) -> tuple[int, int]:
    """Slab size and smallest object, such that slabs hold whole slots of the largest object and waste
    nothing.

    `ConfigError` if not one object fits.
    """
    largest = slot_bytes(max(object_sizes))
    if capacity_bytes < largest:
        raise ConfigError(
            f"a pool of {capacity_bytes} bytes a worker holds not one block of this model, which takes "
            f"{largest} bytes; set a larger capacity_bytes or total_capacity_bytes"
        )
    slots = max(1, min(SLAB_BYTES, capacity_bytes // SLABS_AT_LEAST) // largest)
    return slots * largest, min(object_sizes)
