"""Objects between engine blocks and pool slots: what one job does, without knowing of jobs and threads."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from umbp.errors import ConfigError
from umbp.pool import CopyStatus, Outcome, Pool, slot_bytes
from umbp.runtime.moves import Move
from umbp.transfer import Engine

logger = logging.getLogger("vllm.umbp")

PUBLISH_TRIES = 5
"""How often a publish asks a busy lock again before its objects are given up."""

SLAB_BYTES = 16 << 20
SLABS_AT_LEAST = 64
"""Slabs are this large, or smaller where a pool would have fewer than so many."""


class ObjectMover:
    """Loads, stores and publishes objects of one namespace. One thread loads, one stores, one publishes.

    A store's slots stay reserved under their keys until `publish` or `abandon`.
    """

    def __init__(self, pool: Pool, namespace_id: int, engine: Engine, has_checksums: bool) -> None:
        """The engine stays its owner's."""
        self._pool = pool
        self._namespace_id = namespace_id
        self._engine = engine
        self._has_checksums = has_checksums
        self._unpublished: dict[str, int] = {}
        """Tickets by key: the storing thread adds, the publishing one takes, one operation at a time."""

    @property
    def pool(self) -> Pool:
        return self._pool

    def use(self, engine: Engine) -> None:
        """Copy by another engine from now on. No job may run."""
        self._engine = engine

    def fence(self) -> object:
        """Taken on the engine's thread when a transfer is asked for; goes into its load or store."""
        return self._engine.fence()

    def load(self, move: Move, fence: object) -> Moved:
        """Fill blocks from the pool. Objects that are absent or damaged are lost, each by itself."""
        tickets, outcomes = self._pool.acquire(move.names)
        rows = np.flatnonzero(outcomes == Outcome.HIT)
        held = tickets[rows]
        blocks = np.asarray(move.block_ids)[rows]
        try:
            statuses = self._engine.load(
                move.runs, blocks, self._pool, held, checksum=self._has_checksums, fence=fence
            )
        finally:
            self._pool.release(held)
        moved = Moved()
        moved.lose_all_but(move.keys, rows, "not stored")
        damaged = []
        for row, status in zip(rows.tolist(), statuses.tolist(), strict=True):
            key = move.keys[row]
            if status == CopyStatus.OK:
                moved.finish(key, move.runs.object_bytes)
            else:
                moved.lose(key, f"copy failed: {CopyStatus(status).name.lower()}")
                damaged += [move.names[row]] if status == CopyStatus.BAD_CHECKSUM else []
        if damaged:
            logger.warning("UMBP: removed %d objects whose checksum was wrong", len(damaged))
            self._pool.remove(damaged)
        return moved

    def store(self, move: Move, fence: object) -> Moved:
        """Copy blocks into reserved slots. What is stored already is done; what finds no room is lost."""
        tickets, outcomes = self._pool.reserve(
            self._namespace_id, move.names, move.runs.object_bytes, move.parent_names
        )
        rows = np.flatnonzero(outcomes == Outcome.RESERVED)
        blocks = np.asarray(move.block_ids)[rows]
        try:
            statuses = self._engine.store(
                move.runs, blocks, self._pool, tickets[rows], checksum=self._has_checksums, fence=fence
            )
        except BaseException:
            self._pool.abandon(tickets[rows])
            raise
        moved = Moved()
        for row, status in zip(rows.tolist(), statuses.tolist(), strict=True):
            key, ticket = move.keys[row], int(tickets[row])
            if status == CopyStatus.OK:
                if key in self._unpublished:
                    # A clear has taken the key away from an earlier store that is not published yet.
                    self.abandon([key])
                self._unpublished[key] = ticket
                moved.finish(key, move.runs.object_bytes)
            else:
                self._pool.abandon([ticket])
                moved.lose(key, f"copy failed: {CopyStatus(status).name.lower()}")
        for row in np.flatnonzero(outcomes != Outcome.RESERVED).tolist():
            key, outcome = move.keys[row], Outcome(outcomes[row])
            # Busy: being written by an earlier row or job of ours, or by another process that shares the
            # pool. Should that one fail, the object is missing, as if it had been evicted.
            if outcome is Outcome.EXISTS or (outcome is Outcome.BUSY and key not in moved.lost):
                moved.finish(key, 0)
            else:
                moved.lose(key, f"no room: {outcome.name.lower()}")
        return moved

    def publish(self, keys: Sequence[str]) -> list[str]:
        """Make these keys' stored objects visible; returns those that can't be, as their namespace was
        cleared meanwhile or the lock is held for long. A lock that is busy is asked for a few times.
        """
        waiting = self._take(keys)
        lost = []
        for _ in range(PUBLISH_TRIES):
            if not waiting:
                break
            outcomes = self._pool.publish(list(waiting.values()))
            again = {}
            for (key, ticket), outcome in zip(waiting.items(), outcomes, strict=True):
                if outcome == Outcome.NOT_NOW:
                    again[key] = ticket
                elif outcome != Outcome.PUBLISHED:
                    lost.append(key)
            waiting = again
        self._pool.abandon(list(waiting.values()))
        return lost + list(waiting)

    def abandon(self, keys: Sequence[str]) -> None:
        """Give the slots of these keys' stored objects back."""
        self._pool.abandon(list(self._take(keys).values()))

    def close(self) -> None:
        """Give back what is not published. No job may run."""
        self.abandon(list(self._unpublished))

    def _take(self, keys: Sequence[str]) -> dict[str, int]:
        tickets = {key: self._unpublished.pop(key, None) for key in dict.fromkeys(keys)}
        return {key: ticket for key, ticket in tickets.items() if ticket is not None}


@dataclass(slots=True)
class Moved:
    """The outcomes of a job's keys so far. A key that was lost once is lost."""

    done: set[str] = field(default_factory=set)
    lost: set[str] = field(default_factory=set)
    copied_bytes: dict[str, int] = field(default_factory=dict)
    error: str | None = None

    def finish(self, key: str, copied_bytes: int) -> None:
        self.done.add(key)
        self.copied_bytes[key] = max(copied_bytes, self.copied_bytes.get(key, 0))

    def lose(self, key: str, error: str) -> None:
        self.lost.add(key)
        self.error = error

    def lose_all_but(self, keys: Sequence[str], rows: npt.NDArray[np.intp], error: str) -> None:
        if len(rows) < len(keys):
            kept = set(rows.tolist())
            self.lost.update(key for row, key in enumerate(keys) if row not in kept)
            self.error = error

    def add(self, other: Moved) -> None:
        self.done |= other.done
        self.lost |= other.lost
        self.copied_bytes |= other.copied_bytes
        self.error = other.error or self.error

    def plan_bytes(self, keys: Sequence[str]) -> list[int]:
        """Bytes that were copied for each plan; a key's second plan counts nothing."""
        left = dict(self.copied_bytes)
        return [left.pop(key, 0) for key in keys]


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
