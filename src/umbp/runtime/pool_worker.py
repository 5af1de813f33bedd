"""One rank's loads and stores between the engine's KV memory and a pool on the same host.

The handle's methods run on the worker's thread; the copies run on threads of the handle's own, loads and
stores each on theirs, so that a load never waits behind a store. Neither holds the GIL while bytes move.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from umbp.data import (
    BlockTransferPlan,
    KVLayoutDescriptor,
    RankTopology,
    TensorLike,
    TransferJobState,
    TransferJobStatus,
    UMBPNamespace,
)
from umbp.errors import ConfigError
from umbp.options import Options
from umbp.pool import CopyStatus, Outcome, Pool, slot_bytes
from umbp.pool.limits import memory_limits
from umbp.runtime.base import HandshakeExtra
from umbp.runtime.moves import GroupRuns, Move
from umbp.transfer import CopyEngine

logger = logging.getLogger("vllm.umbp")

Direction = Literal["load", "store"]

PUBLISH_TRIES = 50
"""How often a publish asks a busy lock again before its objects are given up: a tenth of a second in all."""

SLAB_BYTES = 16 << 20
SLABS_AT_LEAST = 64
"""Slabs are this large, or smaller where a pool would have fewer than so many."""


@dataclass(slots=True)
class _Note:
    """What the handle remembers of a job."""

    direction: Direction
    future: Future[None]
    keys: Sequence[str]
    is_published: bool = False


class PoolWorkerHandle:
    """A worker's handle on a pool that it makes itself, once it knows how large its objects are."""

    def __init__(
        self, options: Options, namespace: UMBPNamespace, topology: RankTopology, layout: KVLayoutDescriptor
    ) -> None:
        self._options = options
        self._namespace = namespace
        self._workers = topology.rank_count
        self._layout = layout
        self._pool: Pool | None = None
        self._namespace_id = -1
        self._groups: GroupRuns | None = None
        self._engine = CopyEngine(options.num_workers)
        self._has_checksums = options.verify == "always"
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="umbp-load")
        self._storer = ThreadPoolExecutor(1, thread_name_prefix="umbp-store")
        self._notes: weakref.WeakKeyDictionary[TransferJobState, _Note] = weakref.WeakKeyDictionary()
        self._unpublished: dict[str, int] = {}
        """Tickets of objects that are stored and not yet published, by key. Filled by the store thread,
        emptied by the worker's: single dict operations only."""
        self._is_closed = False

    def register_buffers(self, kv_caches: Mapping[str, TensorLike]) -> None:
        groups = GroupRuns(self._layout, kv_caches)
        if self._pool is None:
            self._pool = self._make_pool(groups.object_sizes)
            self._namespace_id = self._pool.namespace(self._namespace.value)
        elif self._groups is not None and groups.object_sizes != self._groups.object_sizes:
            raise ValueError("the new KV caches have blocks of another size than those registered first")
        self._groups = groups

    def handshake_extra(self) -> HandshakeExtra:
        handle = self._open_pool().handle
        return {"pid": handle.pid, "fd": handle.fd, "boot_id": handle.boot_id}

    def load(self, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        return self._submit("load", plans)

    def store(self, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        return self._submit("store", plans)

    def wait(self, job: TransferJobState) -> TransferJobState:
        note = self._notes.get(job)
        if note is not None:
            note.future.result()
        return job

    def poll(self, job: TransferJobState) -> TransferJobState | None:
        note = self._notes.get(job)
        return job if note is None or note.future.done() else None

    def publish(self, job: TransferJobState) -> None:
        note = self._notes.get(job)
        if note is None or note.direction != "store" or not note.future.done():
            raise ValueError("only a store of this handle that is final can be published")
        if note.is_published or self._is_closed:
            return
        note.is_published = True
        pool = self._open_pool()
        tickets = {key: self._unpublished.pop(key) for key in set(note.keys) if key in self._unpublished}
        if job.status is TransferJobStatus.CANCELLED:
            pool.abandon(list(tickets.values()))
            return
        lost = self._publish_patiently(pool, tickets)
        if lost:
            # The namespace was cleared meanwhile, and these bytes with it.
            job.completed_keys.difference_update(lost)
            job.fail(lost, "cleared before it was published")

    def usage(self) -> Mapping[str, float]:
        if self._pool is None or self._is_closed:
            return {}
        stats = self._pool.stats()
        return {
            "pool_capacity_bytes": float(stats["capacity_bytes"]),
            "pool_used_bytes": float(stats["used_bytes"]),
            "pool_objects": float(stats["objects"]),
            "pool_pinned_objects": float(stats["pinned"]),
            "evicted_objects": float(stats["evicted"]),
        }

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._loader.shutdown(wait=True)
        self._storer.shutdown(wait=True)
        self._engine.close()
        if self._pool is not None:
            self._pool.abandon(list(self._unpublished.values()))
            self._pool.close()
        self._unpublished.clear()
        self._groups = None

    def audit(self) -> None:
        """The pool's own audit; nothing may run meanwhile."""
        self._open_pool().audit()

    # The pool

    def _open_pool(self) -> Pool:
        if self._pool is None:
            raise RuntimeError("register_buffers comes first: the pool is made for the size of its objects")
        return self._pool

    def _make_pool(self, object_sizes: Sequence[int]) -> Pool:
        free_bytes = min((limit.free_bytes for limit in memory_limits()), default=0)
        capacity = self._options.worker_capacity(free_bytes, self._workers)
        slab_bytes, min_object_bytes = pool_geometry(capacity, object_sizes)
        pool = Pool.create_memfd(
            capacity,
            slab_bytes=slab_bytes,
            min_object_bytes=min_object_bytes,
            high_watermark=self._options.dram_high_watermark,
            low_watermark=self._options.dram_low_watermark,
        )
        logger.info(
            "UMBP: embedded pool of %d bytes for objects of %s bytes; %s",
            pool.capacity_bytes,
            " and ".join(map(str, object_sizes)),
            self._options.describe(capacity, self._workers),
        )
        return pool

    def _publish_patiently(self, pool: Pool, tickets: Mapping[str, int]) -> list[str]:
        """Publish these tickets; returns the keys that can't be. A lock that is busy is asked for a few
        times.
        """
        waiting = dict(tickets)
        lost = []
        for _ in range(PUBLISH_TRIES):
            if not waiting:
                break
            outcomes = pool.publish(list(waiting.values()))
            again = {}
            for (key, ticket), outcome in zip(waiting.items(), outcomes, strict=True):
                if outcome == Outcome.NOT_NOW:
                    again[key] = ticket
                elif outcome != Outcome.PUBLISHED:
                    lost.append(key)
            waiting = again
        pool.abandon(list(waiting.values()))
        return lost + list(waiting)

    # Jobs

    def _submit(self, direction: Direction, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        job = TransferJobState(plans)
        job.start()
        keys = job.key_column
        if not keys or self._is_closed or self._groups is None:
            if keys:
                job.fail(keys, "the handle is closed" if self._is_closed else "no buffers are registered")
            else:
                job.complete()
            at_once: Future[None] = Future()
            at_once.set_result(None)
            self._notes[job] = _Note(direction, at_once, keys)
            return job
        thread = self._loader if direction == "load" else self._storer
        move = self._load_objects if direction == "load" else self._store_objects
        self._notes[job] = _Note(direction, thread.submit(self._run, job, self._groups, move), keys)
        return job

    def _run(self, job: TransferJobState, groups: GroupRuns, move_objects: Callable[[Move], _Moved]) -> None:
        """One job, on its thread; every key gets its outcome, whatever happens."""
        moved = _Moved()
        try:
            for move in groups.moves(job.plans):
                moved.add(move_objects(move))
        except Exception as error:
            # The top of the thread: an outcome for every key that has none, and one line in the log.
            logger.exception("UMBP: a transfer of %d objects broke", len(job.keys))
            moved.add(_Moved(lost=set(job.keys - moved.done), error=str(error)))
        job.plan_bytes = moved.plan_bytes(job.key_column)
        if done := moved.done - moved.lost:
            job.complete(done)
        if moved.lost:
            job.fail(moved.lost, moved.error)

    def _load_objects(self, move: Move) -> _Moved:
        pool = self._open_pool()
        tickets, outcomes = pool.acquire(move.keys)
        rows = np.flatnonzero(outcomes == Outcome.HIT)
        held = tickets[rows]
        try:
            statuses = self._engine.load(
                move.runs, np.asarray(move.block_ids)[rows], pool, held, checksum=self._has_checksums
            )
        finally:
            pool.release(held)
        moved = _Moved()
        moved.lose_all_but(move.keys, rows, "not stored")
        damaged = []
        for row, status in zip(rows.tolist(), statuses.tolist(), strict=True):
            key = move.keys[row]
            if status == CopyStatus.OK:
                moved.finish(key, move.runs.object_bytes)
            else:
                moved.lose(key, f"copy failed: {CopyStatus(status).name.lower()}")
                damaged += [key] if status == CopyStatus.BAD_CHECKSUM else []
        if damaged:
            logger.warning("UMBP: removed %d objects whose checksum was wrong", len(damaged))
            pool.remove(damaged)
        return moved

    def _store_objects(self, move: Move) -> _Moved:
        pool = self._open_pool()
        tickets, outcomes = pool.reserve(
            self._namespace_id, move.keys, move.runs.object_bytes, move.parent_keys
        )
        rows = np.flatnonzero(outcomes == Outcome.RESERVED)
        statuses = self._engine.store(
            move.runs, np.asarray(move.block_ids)[rows], pool, tickets[rows], checksum=self._has_checksums
        )
        moved = _Moved()
        for row, status in zip(rows.tolist(), statuses.tolist(), strict=True):
            key, ticket = move.keys[row], int(tickets[row])
            if status == CopyStatus.OK:
                self._unpublished[key] = ticket
                moved.finish(key, move.runs.object_bytes)
            else:
                pool.abandon([ticket])
                moved.lose(key, f"copy failed: {CopyStatus(status).name.lower()}")
        for row in np.flatnonzero(outcomes != Outcome.RESERVED).tolist():
            key, outcome = move.keys[row], Outcome(outcomes[row])
            # Busy: by an earlier row, or an earlier job that is not published yet; or by somebody else.
            if outcome is Outcome.EXISTS or (outcome is Outcome.BUSY and key in self._unpublished):
                moved.finish(key, 0)
            else:
                moved.lose(key, f"no room: {outcome.name.lower()}")
        return moved


@dataclass(slots=True)
class _Moved:
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

    def add(self, other: _Moved) -> None:
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
