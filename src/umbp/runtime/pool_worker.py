"""One rank's loads and stores between the engine's KV memory and a pool on the same host.

The handle's methods run on the worker's thread; the copies run on threads of the handle's own, loads and
stores each on theirs, so that a load never waits behind a store. Neither holds the GIL while bytes move.

A pool may be replaced while the engine runs: jobs end in the pool that they began in, and the next job finds
the new one.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, Protocol

import numpy as np

from umbp.data import (
    BlockIdentityCodec,
    BlockTransferPlan,
    KVLayoutDescriptor,
    LossReason,
    TensorLike,
    TransferJobState,
    TransferJobStatus,
)
from umbp.errors import SegmentError
from umbp.options import Options
from umbp.pool import Pool
from umbp.runtime.base import HandshakeExtra
from umbp.runtime.far.loads import FarLoads, Missing
from umbp.runtime.far.room import told_sizes
from umbp.runtime.far.side import FarSide
from umbp.runtime.lane import Lane
from umbp.runtime.mover import Moved, ObjectMover, settle
from umbp.runtime.moves import GroupRuns, Move
from umbp.transfer import Engine, engine_for
from umbp.transfer.cores import use_free_cores

logger = logging.getLogger("vllm.umbp")

Direction = Literal["load", "store"]

TURN_BYTES = 64 << 20
"""So much of a job is copied before the next one has its turn: some milliseconds."""

LOCK_PATIENCE_S = 0.1
"""How long a job waits for the pool's lock. Far longer than the scheduler may: a promised object must not be
missed only because a busy host let the lock's holder wait for a processor."""


_USAGE = {
    "pool_capacity_bytes": "capacity_bytes",
    "pool_used_bytes": "used_bytes",
    "pool_objects": "objects",
    "pool_pinned_objects": "pinned",
}
"""The gauges, by what the pool calls them."""

_EVICTIONS = {
    "evicted": "evicted_objects",
    "evicted_bytes": "evicted_bytes",
    "evicted_tokens": "evicted_tokens",
}
"""What the pool counts of evictions, and its name in the usage."""


class PoolKeeper(Protocol):
    """Where a worker's pool comes from, and which pool it is now. Used on the worker's thread."""

    def open(self, groups: GroupRuns) -> None:
        """Make or find the pool for objects of these sizes; `UMBPError` stops the engine's start."""
        ...

    def current(self) -> tuple[Pool, int] | None:
        """The pool to work on and the namespace's number in it, or None while there is none; never blocks for
        long, never raises.
        """
        ...

    def handshake_extra(self) -> HandshakeExtra:
        """What the scheduler needs to attach to it."""
        ...

    def close(self) -> None:
        """Leave the pool."""
        ...


@dataclass(slots=True)
class _Note:
    """What the handle remembers of a job."""

    direction: Direction
    future: Future[None]
    keys: Sequence[str]
    mover: ObjectMover | None
    stored: Mapping[str, int] = field(default_factory=dict)
    """Tickets of what a store has written itself, by key."""
    is_published: bool = False


class PoolWorkerHandle:
    """A worker's handle on its keeper's pool, once it knows how large its objects are."""

    def __init__(
        self,
        options: Options,
        layout: KVLayoutDescriptor,
        keeper: PoolKeeper,
        *,
        shared_codec: BlockIdentityCodec | None = None,
        counts_usage: bool = True,
        make_engine: Callable[[Mapping[str, TensorLike], int], Engine] = engine_for,
        far: FarSide | None = None,
    ) -> None:
        """`shared_codec` gives the keys under which several ranks keep one and the same object;
        `counts_usage` is false where another handle reports the same pool; `make_engine` takes the KV caches
        and a number of threads; `far` is closed with the handle.
        """
        self._options = options
        self._layout = layout
        self._keeper = keeper
        self._shared_codec = shared_codec
        self._counts_usage = counts_usage
        self._make_engine = make_engine
        self._groups: GroupRuns | None = None
        self._kv_caches: Mapping[str, TensorLike] = {}
        """Held, so that no copy reads or writes memory that was freed."""
        self._engine: Engine | None = None
        self._mover: ObjectMover | None = None
        self._loader = Lane("umbp-load", use_free_cores)
        self._storer = Lane("umbp-store", use_free_cores)
        self._far = far
        self._far_loads = None if far is None else FarLoads(far, self._loader)
        self._leaving: list[threading.Thread] = []
        """Each of them leaves a pool that was replaced."""
        self._notes: weakref.WeakKeyDictionary[TransferJobState, _Note] = weakref.WeakKeyDictionary()
        self._evicted = dict.fromkeys(_EVICTIONS, 0)
        self._evicted_before = dict.fromkeys(_EVICTIONS, 0)
        self._is_closed = False

    @property
    def far(self) -> FarSide | None:
        """What stands behind the pool."""
        return self._far

    def register_buffers(self, kv_caches: Mapping[str, TensorLike]) -> None:
        groups = GroupRuns(self._layout, kv_caches, self._shared_codec)
        if self._groups is None:
            self._keeper.open(groups)
        elif groups.object_sizes != self._groups.object_sizes:
            raise ValueError("the new KV caches have blocks of another size than those registered first")
        before, self._engine = self._engine, self._make_engine(kv_caches, self._options.num_workers)
        self._groups = groups
        if self._mover is not None:
            self._mover.use(self._engine)
        if before is not None:
            before.close()
        self._kv_caches = dict(kv_caches)
        if (found := self._keeper.current()) is not None:
            self._engine.prepare(found[0])

    def handshake_extra(self) -> HandshakeExtra:
        if self._groups is None:
            raise RuntimeError("register_buffers comes first: the pool is opened for the size of its objects")
        told = self._keeper.handshake_extra()
        return told if self._far is None else {**told, **told_sizes(self._groups.bytes_by_group())}

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
        if note is None or note.direction != "store" or not job.status.is_final:
            raise ValueError("only a store of this handle that is final can be published")
        # A job is final a moment before its thread has returned.
        note.future.result()
        if note.is_published or self._is_closed:
            return
        note.is_published = True
        if note.mover is None:
            return
        try:
            if job.status is TransferJobStatus.CANCELLED:
                note.mover.abandon(note.keys)
                return
            lost, reason = note.mover.publish(note.keys), f"{LossReason.CLEARED}: before it was published"
        except SegmentError as error:  # the pool has been left, as it was replaced
            lost, reason = sorted(job.completed_keys), f"{LossReason.GONE}: {error}"
        if lost:
            job.completed_keys.difference_update(lost)
            job.fail(lost, reason)
        if self._far is not None and self._groups is not None:
            missing = set(lost)
            new = [key for key in note.stored if key not in missing]
            self._far.offer(note.mover.pool, self._groups.names(new))

    def usage(self) -> Mapping[str, float]:
        # Looked at in any case: a pool that was replaced is left, and its memory goes, without a transfer.
        mover = self._current_mover()
        if self._groups is None or self._is_closed:
            return {}
        far = {} if self._far is None else dict(self._far.usage())
        if not self._counts_usage:
            return far
        stats = dict.fromkeys(_USAGE.values(), 0) if mover is None else mover.pool.stats()
        if mover is not None:
            # Another pool counts from another number; what went before this worker came isn't its own.
            for name, before in self._evicted_before.items():
                self._evicted[name] += stats[name] - before
                self._evicted_before[name] = stats[name]
        usage = {name: float(stats[counter]) for name, counter in _USAGE.items()}
        usage |= {_EVICTIONS[name]: float(total) for name, total in self._evicted.items()}
        return usage | far

    def take_counts(self) -> Mapping[tuple[str, ...], float]:
        return {} if self._far is None else self._far.take_counts()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._far_loads is not None:
            self._loader.finish_all()
            self._far_loads.close()
        for thread in self._leaving:
            thread.join()
        self._loader.close()
        self._storer.close()
        if self._mover is not None:
            self._mover.close()
        if self._engine is not None:
            self._engine.close()
        if self._far is None or self._far.close():
            self._keeper.close()
        self._groups = None
        self._kv_caches = {}

    def audit(self) -> None:
        """The pool's own audit; nothing may run meanwhile."""
        found = self._keeper.current()
        if found is not None:
            found[0].audit()

    # Jobs

    def _submit(self, direction: Direction, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        job = TransferJobState(plans)
        job.start()
        keys = job.key_column
        mover = self._current_mover()
        if not keys or self._groups is None or mover is None:
            if keys:
                job.fail(keys, self._why_nothing_moves())
            else:
                job.complete()
            at_once: Future[None] = Future()
            at_once.set_result(None)
            self._notes[job] = _Note(direction, at_once, keys, None)
            return job
        stored: dict[str, int] = {}
        if direction == "load" and self._far is None:
            turns = self._in_turns(job, self._groups, partial(mover.load, fence=mover.fence()))
            future = self._loader.start(turns)
        elif direction == "load":
            future = Future()
            self._loader.start(self._load_in_turns(job, self._groups, mover, mover.fence(), future))
        else:
            store = partial(_store, mover, mover.fence(), stored)
            # Whoever forgets a store without publishing it must not keep its slots.
            weakref.finalize(job, mover.abandon_forgotten, stored).atexit = False
            future = self._storer.start(self._in_turns(job, self._groups, store))
        self._notes[job] = _Note(direction, future, keys, mover, stored)
        return job

    def _why_nothing_moves(self) -> str:
        if self._is_closed:
            return f"{LossReason.GONE}: the handle is closed"
        if self._groups is None:
            return f"{LossReason.FAILED}: no buffers are registered"
        return f"{LossReason.GONE}: the pool is gone"

    def _current_mover(self) -> ObjectMover | None:
        """The mover of the pool that is there now."""
        if self._is_closed or self._engine is None:
            return None
        found = self._keeper.current()
        if self._mover is not None and (found is None or found[0] is not self._mover.pool):
            self._retire(self._mover, self._engine)
            self._mover = None
        if self._mover is None and found is not None:
            pool, namespace_id = found
            self._mover = ObjectMover(
                pool,
                namespace_id,
                self._engine,
                has_checksums=self._options.verify == "always",
                leaves=self._far is not None and self._far.sends_checksums,
                told_damaged=None if self._far is None else self._far.discard,
            )
            stats = pool.stats()
            self._evicted_before = {name: stats[name] for name in _EVICTIONS}
        return self._mover

    def _retire(self, mover: ObjectMover, engine: Engine) -> None:
        """Leave a pool that has been replaced once its last job has ended."""
        loads, stores = self._loader.unfinished(), self._storer.unfinished()
        if self._far_loads is not None:
            loads += self._far_loads.unfinished()

        def leave() -> Iterator[None]:
            while not all(store.done() for store in stores):
                yield
            for load in loads:
                load.result()
            mover.close()
            engine.leave(mover.pool)
            if self._far is None:
                mover.pool.close()

        def leave_far(far: FarSide) -> None:
            for job in loads + stores:
                job.result()
            self._storer.start(leave()).result()
            far.leave(mover.pool, mover.pool.close)

        if self._far is None:
            self._storer.start(leave())
            return
        # No store waits behind what is fetched late, or behind a store that hangs.
        self._leaving = [thread for thread in self._leaving if thread.is_alive()]
        thread = threading.Thread(target=leave_far, args=(self._far,), name="umbp-leave", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the system has no thread for it
            logger.warning(
                "UMBP: no thread is left to leave a pool that isn't used any more: it stays mapped"
            )
            return
        self._leaving.append(thread)

    def _in_turns(
        self,
        job: TransferJobState,
        groups: GroupRuns,
        move_objects: Callable[[Move], Moved],
    ) -> Iterator[None]:
        """One job, on its thread, which may work at others between its parts; every key gets its outcome,
        whatever happens.
        """
        moves: list[Moved] = []
        error = None
        try:
            for move in groups.moves(job.plans):
                for part in move.parts(TURN_BYTES):
                    if moves:
                        yield
                    moves.append(move_objects(part))
        except Exception as broken:
            # The top of the thread: an outcome for every key that has none, and one line in the log.
            logger.exception("UMBP: a transfer of %d objects broke", len(job.keys))
            error = str(broken)
        settle(job, moves, error)

    def _load_in_turns(
        self,
        job: TransferJobState,
        groups: GroupRuns,
        mover: ObjectMover,
        fence: object,
        done: Future[None],
    ) -> Iterator[None]:
        """A load that goes on beyond the pool with what that lacks."""
        assert self._far is not None
        assert self._far_loads is not None
        deadline_s = self._far.deadline_s()
        moves: list[Moved] = []
        missing: list[Missing] = []
        error = None
        try:
            for move in groups.moves(job.plans):
                for part in move.parts(TURN_BYTES):
                    if moves:
                        yield
                    moved = mover.load(part, fence)
                    moves.append(moved)
                    if moved.absent is not None:
                        rows = np.flatnonzero(moved.absent)
                        missing.append(Missing(moved, rows, part.only(rows.tolist())))
        except Exception as broken:
            logger.exception("UMBP: a load of %d objects broke", len(job.keys))
            error = str(broken)
        if missing and error is None:
            self._far_loads.finish(job, moves, missing, mover, fence, deadline_s, done)
            return
        settle(job, moves, error)
        done.set_result(None)


def _store(mover: ObjectMover, fence: object, tickets: dict[str, int], move: Move) -> Moved:
    """Store, and note the tickets of what then waits to be published."""
    moved = mover.store(move, fence)
    tickets.update(mover.unpublished(move.keys))
    return moved
