"""One rank's loads and stores between the engine's KV memory and a pool on the same host.

The handle's methods run on the worker's thread; the copies run on threads of the handle's own, loads and
stores each on theirs, so that a load never waits behind a store. Neither holds the GIL while bytes move.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from umbp.data import (
    BlockTransferPlan,
    KVLayoutDescriptor,
    RankTopology,
    TensorLike,
    TransferJobState,
    TransferJobStatus,
    UMBPNamespace,
)
from umbp.kinds import format_size
from umbp.options import Options
from umbp.pool import Pool, slot_bytes
from umbp.pool.limits import memory_limits
from umbp.runtime.base import HandshakeExtra
from umbp.runtime.mover import Moved, ObjectMover, engine_for, pool_geometry
from umbp.runtime.moves import GroupRuns, Move

logger = logging.getLogger("vllm.umbp")

Direction = Literal["load", "store"]

LOCK_PATIENCE_S = 0.1
"""How long a job waits for the pool's lock. Far longer than the scheduler may: a promised object must not be
missed only because a busy host let the lock's holder wait for a processor."""


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
        self._groups: GroupRuns | None = None
        self._mover: ObjectMover | None = None
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="umbp-load")
        self._storer = ThreadPoolExecutor(1, thread_name_prefix="umbp-store")
        self._notes: weakref.WeakKeyDictionary[TransferJobState, _Note] = weakref.WeakKeyDictionary()
        self._is_closed = False

    def register_buffers(self, kv_caches: Mapping[str, TensorLike]) -> None:
        groups = GroupRuns(self._layout, kv_caches)
        if self._groups is not None and groups.object_sizes != self._groups.object_sizes:
            raise ValueError("the new KV caches have blocks of another size than those registered first")
        if self._pool is None:
            self._pool = self._make_pool(groups)
        engine = engine_for(kv_caches, self._options.num_workers)
        if self._mover is None:
            namespace_id = self._pool.namespace(self._namespace.value)
            self._mover = ObjectMover(self._pool, namespace_id, engine, self._options.verify == "always")
        else:
            self._mover.use(engine)
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
        if note is None or note.direction != "store" or not job.status.is_final:
            raise ValueError("only a store of this handle that is final can be published")
        # A job is final a moment before its thread has returned.
        note.future.result()
        if note.is_published or self._is_closed:
            return
        note.is_published = True
        if self._mover is None:
            return
        if job.status is TransferJobStatus.CANCELLED:
            self._mover.abandon(note.keys)
        elif lost := self._mover.publish(note.keys):
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
        if self._mover is not None and self._pool is not None:
            self._mover.close()
            self._pool.close()
        self._groups = None

    def audit(self) -> None:
        """The pool's own audit; nothing may run meanwhile."""
        self._open_pool().audit()

    # The pool

    def _open_pool(self) -> Pool:
        if self._pool is None:
            raise RuntimeError("register_buffers comes first: the pool is made for the size of its objects")
        return self._pool

    def _make_pool(self, groups: GroupRuns) -> Pool:
        free_bytes = min((limit.free_bytes for limit in memory_limits()), default=0)
        capacity = self._options.worker_capacity(free_bytes, self._workers)
        slab_bytes, min_object_bytes = pool_geometry(capacity, groups.object_sizes)
        pool = Pool.create_memfd(
            capacity,
            slab_bytes=slab_bytes,
            min_object_bytes=min_object_bytes,
            high_watermark=self._options.dram_high_watermark,
            low_watermark=self._options.dram_low_watermark,
            lock_patience_s=LOCK_PATIENCE_S,
        )
        if self._options.dram_prefault and not pool.prefault():
            logger.warning("UMBP: dram_prefault: this kernel can't map the pool's pages early; go on without")
        fitting = pool.capacity_bytes // slot_bytes(max(groups.object_sizes))
        # The options themselves are said once an engine, by its scheduler.
        logger.info(
            "UMBP: %s of host memory for %d blocks of %s; %s for all %d workers of this engine",
            format_size(pool.capacity_bytes),
            fitting,
            " and ".join(map(format_size, groups.object_sizes)),
            format_size(pool.capacity_bytes * self._workers),
            self._workers,
        )
        if fitting < groups.block_count:
            logger.warning(
                "UMBP: the pool holds %d blocks, fewer than the %d of the engine's own KV memory: little "
                "will be found in it; raise capacity_bytes or total_capacity_bytes",
                fitting,
                groups.block_count,
            )
        return pool

    # Jobs

    def _submit(self, direction: Direction, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        job = TransferJobState(plans)
        job.start()
        keys = job.key_column
        if not keys or self._is_closed or self._groups is None or self._mover is None:
            if keys:
                job.fail(keys, "the handle is closed" if self._is_closed else "no buffers are registered")
            else:
                job.complete()
            at_once: Future[None] = Future()
            at_once.set_result(None)
            self._notes[job] = _Note(direction, at_once, keys)
            return job
        thread = self._loader if direction == "load" else self._storer
        move_objects = self._mover.load if direction == "load" else self._mover.store
        future = thread.submit(self._run, job, self._groups, move_objects, self._mover.fence())
        self._notes[job] = _Note(direction, future, keys)
        return job

    def _run(
        self,
        job: TransferJobState,
        groups: GroupRuns,
        move_objects: Callable[[Move, object], Moved],
        fence: object,
    ) -> None:
        """One job, on its thread; every key gets its outcome, whatever happens."""
        moved = Moved()
        try:
            for move in groups.moves(job.plans):
                moved.add(move_objects(move, fence))
        except Exception as error:
            # The top of the thread: an outcome for every key that has none, and one line in the log.
            logger.exception("UMBP: a transfer of %d objects broke", len(job.keys))
            moved.add(Moved(lost=set(job.keys - moved.done), error=str(error)))
        job.plan_bytes = moved.plan_bytes(job.key_column)
        if done := moved.done - moved.lost:
            job.complete(done)
        if moved.lost:
            job.fail(moved.lost, moved.error)
