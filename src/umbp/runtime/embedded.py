"""The embedded runtime: each worker makes a pool of its own in host memory, and the scheduler attaches to all
of them.

A pool is an anonymous segment of its worker's process: it has no name that could collide, and it goes when
the last process that attached it goes. No data and no question passes through a socket.
"""

from __future__ import annotations

import logging

from umbp.data import KVLayoutDescriptor, RankTopology, UMBPNamespace
from umbp.errors import ConfigError
from umbp.kinds import format_size
from umbp.options import Options
from umbp.pool import Pool, slot_bytes
from umbp.pool.limits import memory_limits
from umbp.pool.pool import LOCK_PATIENCE_S as LOOKUP_PATIENCE_S
from umbp.runtime.base import Capabilities, HandshakeExtra
from umbp.runtime.mover import pool_geometry
from umbp.runtime.moves import GroupRuns
from umbp.runtime.pool_scheduler import PoolSchedulerHandle
from umbp.runtime.pool_worker import LOCK_PATIENCE_S, PoolWorkerHandle

logger = logging.getLogger("vllm.umbp")


class EmbeddedRuntime:
    """Mode `embedded`."""

    capabilities = Capabilities(hold=True, lookup_raw=True, note=True, attach=True, usage=True, local=True)

    def __init__(self, options: Options) -> None:
        _refuse_unbuilt(options)
        self._options = options

    def create_scheduler_handle(
        self, namespace: UMBPNamespace, topology: RankTopology, layout: KVLayoutDescriptor
    ) -> PoolSchedulerHandle:
        patience_s = min(LOOKUP_PATIENCE_S, self._options.lookup_timeout_ms / 1000)
        return PoolSchedulerHandle(namespace, topology, lock_patience_s=patience_s)

    def create_worker_handle(
        self, namespace: UMBPNamespace, topology: RankTopology, layout: KVLayoutDescriptor
    ) -> PoolWorkerHandle:
        return PoolWorkerHandle(self._options, layout, OwnPool(self._options, namespace, topology.rank_count))


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
            lock_patience_s=LOCK_PATIENCE_S,
        )
        if self._options.dram_prefault and not pool.prefault():
            logger.warning("UMBP: dram_prefault: this kernel can't map the pool's pages early; go on without")
        # The options themselves are said once an engine, by its scheduler.
        logger.info(
            "UMBP: %s of host memory for %d blocks of %s; %s for all %d workers of this engine",
            format_size(pool.capacity_bytes),
            pool.capacity_bytes // slot_bytes(max(groups.object_sizes)),
            " and ".join(map(format_size, groups.object_sizes)),
            format_size(pool.capacity_bytes * self._workers),
            self._workers,
        )
        warn_of_few_blocks(pool, groups)
        return pool


def warn_of_few_blocks(pool: Pool, groups: GroupRuns) -> None:
    """A pool with less room than the engine itself has will hardly ever be asked for what it holds."""
    fitting = pool.capacity_bytes // slot_bytes(max(groups.object_sizes))
    if fitting < groups.block_count:
        logger.warning(
            "UMBP: the pool holds %d blocks, fewer than the %d of the engine's own KV memory: little "
            "will be found in it; raise capacity_bytes or total_capacity_bytes",
            fitting,
            groups.block_count,
        )


def _refuse_unbuilt(options: Options) -> None:
    """A value without effect would be found out much later; say so at the start. (The parser refuses what
    isn't built at all.)
    """
    unbuilt = {
        "eviction_policy": options.eviction_policy == "hazard",
        "write_policy": options.write_policy == "lazy",
        "dram_use_hugepages": options.dram_use_hugepages is True,
        "dram_numa_node": options.dram_numa_node != -1,
        "lookup_async": options.lookup_async,
    }
    for name, is_asked in unbuilt.items():
        if is_asked:
            raise ConfigError(f"option '{name}' is not in this version yet; leave it out")
