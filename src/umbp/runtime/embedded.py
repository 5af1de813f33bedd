"""The embedded runtime: each worker makes a pool of its own in host memory, and the scheduler attaches to all
of them.

A pool is an anonymous segment of its worker's process: it has no name that could collide, and it goes when
the last process that attached it goes. No data and no question passes through a socket.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from umbp.data import KVLayoutDescriptor, Rank, RankTopology, UMBPNamespace
from umbp.errors import SegmentError
from umbp.kinds import format_size
from umbp.options import Options
from umbp.pool import Pool, PoolHandle, slot_bytes
from umbp.pool.limits import memory_limits
from umbp.pool.memory import check_node
from umbp.pool.pool import LOCK_PATIENCE_S as LOOKUP_PATIENCE_S
from umbp.runtime.base import Capabilities, HandshakeExtra
from umbp.runtime.mover import pool_geometry
from umbp.runtime.moves import GroupRuns
from umbp.runtime.pool_memory import memory_policy, progress_log, settle_memory
from umbp.runtime.pool_scheduler import PoolSchedulerHandle
from umbp.runtime.pool_worker import LOCK_PATIENCE_S, PoolWorkerHandle

logger = logging.getLogger("vllm.umbp")


class EmbeddedRuntime:
    """Mode `embedded`."""

    capabilities = Capabilities(
        hold=True,
        lookup_raw=True,
        presence=True,
        lookup_states=True,
        note=True,
        evicted_keys=True,
        watch=True,
        attach=True,
        usage=True,
        local=True,
        tier="dram",
    )

    def __init__(self, options: Options) -> None:
        check_node(options.dram_numa_node)
        self._options = options

    def create_scheduler_handle(
        self, namespace: UMBPNamespace, topology: RankTopology, layout: KVLayoutDescriptor
    ) -> PoolSchedulerHandle:
        return PoolSchedulerHandle(
            namespace,
            topology,
            WorkersPools(namespace, topology, lookup_patience_s(self._options)),
        )

    def create_worker_handle(
        self, namespace: UMBPNamespace, topology: RankTopology, layout: KVLayoutDescriptor
    ) -> PoolWorkerHandle:
        layout = layout.counted_if(topology.local_namespace == topology.all_namespaces()[0])
        return PoolWorkerHandle(self._options, layout, OwnPool(self._options, namespace, topology.rank_count))


class WorkersPools:
    """The scheduler's binding to the pools that the workers made, one for each rank."""

    def __init__(self, namespace: UMBPNamespace, topology: RankTopology, lock_patience_s: float) -> None:
        self._namespace = namespace
        self._ranks = topology.all_namespaces()
        self._lock_patience_s = lock_patience_s
        self._pools: dict[Rank, Pool] = {}
        self._namespace_ids: dict[Rank, int] = {}

    def bind(self, extras: Mapping[Rank, HandshakeExtra]) -> None:
        require_all_ranks(self._ranks, extras)
        self.close()
        for rank in self._ranks:
            handle = _pool_handle(rank, extras[rank])
            pool = Pool.attach(handle, lock_patience_s=self._lock_patience_s)
            self._pools[rank] = pool
            self._namespace_ids[rank] = pool.namespace(self._namespace.value)

    def pools(self) -> Mapping[Rank, Pool]:
        return self._pools

    def clear(self) -> bool:
        cleared = [pool.clear(number) for pool, number in self.namespaces()]
        return all(cleared)

    def namespaces(self) -> Collection[tuple[Pool, int]]:
        return [(pool, self._namespace_ids[rank]) for rank, pool in self._pools.items()]

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools = {}


def require_all_ranks(ranks: Sequence[Rank], extras: Mapping[Rank, HandshakeExtra]) -> None:
    """`SegmentError` where a rank's worker has reported no pool."""
    missing = [rank for rank in ranks if rank not in extras]
    if missing:
        raise SegmentError(
            f"the worker of rank {missing[0]} reported no pool: all workers must run this connector"
        )


def lookup_patience_s(options: Options) -> float:
    """How long the scheduler may wait for a pool's lock."""
    return min(LOOKUP_PATIENCE_S, options.lookup_timeout_ms / 1000)


def _pool_handle(rank: Rank, extra: HandshakeExtra) -> PoolHandle:
    try:
        return PoolHandle(pid=int(extra["pid"]), fd=int(extra["fd"]), boot_id=str(extra["boot_id"]))
    except (KeyError, TypeError, ValueError):
        raise SegmentError(f"the worker of rank {rank} reported no usable pool: {dict(extra)!r}") from None


class OwnPool:
    """The keeper of a pool that a worker makes for itself."""

    def __init__(self, options: Options, namespace: UMBPNamespace, workers: int) -> None:
        self._options = options
        self._namespace = namespace
        self._workers = workers
        self._found: tuple[Pool, int] | None = None

    def open(self, groups: GroupRuns) -> None:
        pool = self._make(groups)
        self._found = pool, pool.namespace(self._namespace.value)

    def current(self) -> tuple[Pool, int] | None:
        return self._found

    def handshake_extra(self) -> HandshakeExtra:
        assert self._found is not None, "the pool is opened first"
        handle = self._found[0].handle
        return {"pid": handle.pid, "fd": handle.fd, "boot_id": handle.boot_id}

    def close(self) -> None:
        if self._found is not None:
            self._found[0].close()
            self._found = None

    def _make(self, groups: GroupRuns) -> Pool:
        free_bytes = min((limit.free_bytes for limit in memory_limits()), default=0)
        capacity = self._options.worker_capacity(free_bytes, self._workers)
        slab_bytes, min_object_bytes = pool_geometry(capacity, groups.object_sizes)
        pool = Pool.create_memfd(
            capacity,
            slab_bytes=slab_bytes,
            min_object_bytes=min_object_bytes,
            high_watermark=self._options.dram_high_watermark,
            low_watermark=self._options.dram_low_watermark,
            eviction_policy=self._options.eviction_policy,
            lock_patience_s=LOCK_PATIENCE_S,
            memory=memory_policy(self._options),
            progress=progress_log("taking the pool's memory"),
        )
        settle_memory(pool, self._options, pool.memory)
        # The options themselves are said once an engine, by its scheduler.
        logger.info(
            "UMBP: %s of host memory for %d blocks of %s; %s for all %d workers of this engine",
            format_size(pool.capacity_bytes),
            pool.capacity_bytes // slot_bytes(max(groups.object_sizes)),
            " and ".join(map(format_size, groups.object_sizes)),
            format_size(pool.capacity_bytes * self._workers),
            self._workers,
        )
        warn_of_few_blocks(pool, groups, "raise capacity_bytes or total_capacity_bytes")
        return pool


def warn_of_few_blocks(pool: Pool, groups: GroupRuns, remedy: str) -> None:
    """A pool with less room than the engine itself has will hardly ever be asked for what it holds."""
    fitting = pool.capacity_bytes // slot_bytes(max(groups.object_sizes))
    if fitting < groups.block_count:
        logger.warning(
            "UMBP: the pool holds %d blocks, fewer than the %d of the engine's own KV memory: little "
            "will be found in it: %s",
            fitting,
            groups.block_count,
            remedy,
        )
