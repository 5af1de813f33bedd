"""The standalone runtime: all engines of a node share one pool, which outlives them.

The pool is a file in a RAM file system, made by an operator or by the first engine. Every process that uses
it attaches it and works on it directly: no server, no data and no question through a socket. The ranks of an
engine share it too, so what several of them hold alike is kept once.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from pathlib import Path

from umbp.data import BlockIdentityCodec, KVLayoutDescriptor, Rank, RankTopology, UMBPNamespace
from umbp.errors import ConfigError, SegmentError
from umbp.kinds import format_size
from umbp.options import Options
from umbp.pool import Pool, slot_bytes
from umbp.pool.geometry import shared_geometry
from umbp.pool.handle import boot_id
from umbp.pool.memory import check_node
from umbp.pool.sharing import pool_path
from umbp.runtime.base import Capabilities, HandshakeExtra
from umbp.runtime.embedded import (
    lookup_patience_s,
    require_all_ranks,
    warn_of_few_blocks,
)
from umbp.runtime.moves import GroupRuns
from umbp.runtime.named_pool import NamedPool
from umbp.runtime.pool_memory import map_in_background, memory_policy, progress_log, settle_memory
from umbp.runtime.pool_scheduler import PoolSchedulerHandle
from umbp.runtime.pool_worker import LOCK_PATIENCE_S, PoolWorkerHandle

logger = logging.getLogger("vllm.umbp")

CREATE_TURN_S = 120.0
"""How long a worker waits for another that is just making a pool in the same folder."""

CREATION_OPTIONS = (
    "dram_high_watermark",
    "dram_low_watermark",
    "dram_numa_node",
    "dram_use_hugepages",
    "eviction_policy",
)
"""What a pool is made with, and what an engine that finds it made can't choose any more."""


class StandaloneRuntime:
    """Mode `standalone`."""

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
        assert options.pool is not None, "the options require a name in this mode"
        self._options = options
        self._path = pool_path(options.pool_dir, options.pool)

    def create_scheduler_handle(
        self, namespace: UMBPNamespace, topology: RankTopology, layout: KVLayoutDescriptor
    ) -> PoolSchedulerHandle:
        stored_as = {rank: standing_for(rank, layout) for rank in topology.all_namespaces()}
        binding = SharedBinding(
            self._path, namespace, topology, set(stored_as.values()), lookup_patience_s(self._options)
        )
        return PoolSchedulerHandle(namespace, topology, binding, stored_as)

    def create_worker_handle(
        self, namespace: UMBPNamespace, topology: RankTopology, layout: KVLayoutDescriptor
    ) -> PoolWorkerHandle:
        rank = topology.local_namespace
        standing = standing_for(rank, layout)
        tp, pcp, dcp, pp = standing
        first = topology.all_namespaces()[0]
        return PoolWorkerHandle(
            self._options,
            # Whoever of those that hold the first rank's KV is quickest stores it for all.
            layout.counted_if(standing == first),
            SharedKeeper(self._options, self._path, namespace),
            shared_codec=None if standing == rank else BlockIdentityCodec(namespace, tp, pp, pcp, dcp),
            # All ranks would report the same pool.
            counts_usage=rank == first,
        )


def standing_for(rank: Rank, layout: KVLayoutDescriptor) -> Rank:
    """The first of the ranks that hold the same KV as this one; objects are stored under its keys.

    Prefill-context ranks share out the computing alone; decode context is what cuts KV between ranks.
    """
    tp, pcp, dcp, pp = rank
    if layout.topology.dcp_size == 1:
        pcp = 0
    return tp - tp % layout.kv_tp_replicas, pcp, dcp, pp


class SharedBinding:
    """The scheduler's binding to the one pool of all ranks."""

    def __init__(
        self,
        path: str,
        namespace: UMBPNamespace,
        topology: RankTopology,
        stored_ranks: set[Rank],
        lock_patience_s: float,
    ) -> None:
        self._ranks = topology.all_namespaces()
        self._stored_ranks = [rank for rank in self._ranks if rank in stored_ranks]
        self._path = path
        self._namespace = namespace
        self._lock_patience_s = lock_patience_s
        self._pool: NamedPool | None = None

    def bind(self, extras: Mapping[Rank, HandshakeExtra]) -> None:
        require_all_ranks(self._ranks, extras)
        for rank in self._ranks:
            self._check(rank, extras[rank])
        self.close()
        pool = NamedPool(self._path, self._namespace.value, lock_patience_s=self._lock_patience_s)
        pool.attach()
        self._pool = pool

    def _check(self, rank: Rank, extra: HandshakeExtra) -> None:
        if extra.get("boot_id") != boot_id():
            raise SegmentError(
                f"the worker of rank {rank} is on another host (its boot id differs); a standalone pool "
                "serves the engines of one host"
            )
        if extra.get("path") != self._path:
            raise SegmentError(
                f"the worker of rank {rank} has opened the pool {extra.get('path')!r}, the scheduler's "
                f"options name {self._path!r}: all processes of an engine need the same options"
            )

    def pools(self) -> Mapping[Rank, Pool]:
        found = self._pool.current() if self._pool is not None else None
        return {} if found is None else dict.fromkeys(self._stored_ranks, found[0])

    def clear(self) -> bool:
        cleared = [pool.clear(number) for pool, number in self.namespaces()]
        return all(cleared)

    def namespaces(self) -> Collection[tuple[Pool, int]]:
        found = self._pool.current() if self._pool is not None else None
        return () if found is None else (found,)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


class SharedKeeper:
    """The keeper of a worker's attachment to the shared pool, which it makes if nobody has yet."""

    def __init__(self, options: Options, path: str, namespace: UMBPNamespace) -> None:
        self._options = options
        self._path = path
        self._namespace = namespace
        self._pool: NamedPool | None = None

    def open(self, groups: GroupRuns) -> None:
        options = self._options
        pool = NamedPool(
            self._path,
            self._namespace.value,
            quota=options.namespace_quota if "namespace_quota" in options.given else None,
            lock_patience_s=LOCK_PATIENCE_S,
            object_bytes=max(groups.object_sizes),
            found_again=partial(map_in_background, options=options),
        )
        with _turn_to_create(Path(self._path).parent):
            made = None if os.path.exists(self._path) else self._create(groups)
            found, _ = pool.attach()
        self._pool = pool
        settle_memory(found, options, None if made is None else made.memory)
        self._tell(found, groups, made is not None)
        if made is not None:
            made.close()

    def current(self) -> tuple[Pool, int] | None:
        return None if self._pool is None else self._pool.current()

    def handshake_extra(self) -> HandshakeExtra:
        return {"path": self._path, "boot_id": boot_id()}

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _wanted_bytes(self) -> int | None:
        return self._options.capacity_bytes or self._options.total_capacity_bytes

    def _create(self, groups: GroupRuns) -> Pool | None:
        """The new pool; None if somebody else was first."""
        wanted, options = self._wanted_bytes(), self._options
        if wanted is None:
            raise ConfigError(
                f"there is no pool {options.pool!r} in {options.pool_dir}: make it with `umbp pool create "
                f"{options.pool} --dir {options.pool_dir} --size 16GiB`, or set option 'capacity_bytes' "
                "and the first engine makes it"
            )
        slab_bytes, min_object_bytes = shared_geometry(wanted)
        # Whole slots of this engine's blocks, which are known: others' may leave a little of a slab over.
        largest = slot_bytes(max(groups.object_sizes))
        slab_bytes = max(1, slab_bytes // largest) * largest
        logger.info("UMBP: making the pool %s of %s", self._path, format_size(wanted))
        begun_s = time.monotonic()
        try:
            made = Pool.create(
                self._path,
                wanted,
                slab_bytes=slab_bytes,
                min_object_bytes=min_object_bytes,
                high_watermark=options.dram_high_watermark,
                low_watermark=options.dram_low_watermark,
                eviction_policy=options.eviction_policy,
                lock_patience_s=LOCK_PATIENCE_S,
                memory=memory_policy(options),
                progress=progress_log(f"taking the memory of the pool {options.pool}"),
            )
        except SegmentError:
            if os.path.exists(self._path):
                return None
            raise
        logger.info("UMBP: made the pool %s in %.1f s", self._path, time.monotonic() - begun_s)
        return made

    def _tell(self, pool: Pool, groups: GroupRuns, is_new: bool) -> None:
        stats = pool.stats()
        logger.info(
            "UMBP: pool %s of %s, evicting by %s, with room for %d blocks of %s; %d objects, %d processes;"
            " this engine's namespace is %s",
            self._path,
            format_size(pool.capacity_bytes),
            pool.eviction_policy,
            pool.capacity_bytes // slot_bytes(max(groups.object_sizes)),
            " and ".join(map(format_size, groups.object_sizes)),
            stats["objects"],
            stats["processes"],
            self._namespace.value,
        )
        name = self._options.pool
        warn_of_few_blocks(
            pool, groups, f"`umbp pool resize {name} SIZE`, or make {name} anew with a larger --max-size"
        )
        if is_new:
            return
        late = [f"'{name}'" for name in CREATION_OPTIONS if name in self._options.given]
        if late:
            logger.warning(
                "UMBP: the pool %s is there already; what it was made with holds, not %s",
                self._path,
                ", ".join(late),
            )
        wanted = self._wanted_bytes()
        if wanted is not None and wanted // pool.slab_bytes * pool.slab_bytes != pool.capacity_bytes:
            logger.warning(
                "UMBP: the pool %s is there already, with %s; the %s that the options ask for have no effect "
                "(`umbp pool resize` changes it)",
                self._path,
                format_size(pool.capacity_bytes),
                format_size(wanted),
            )


@contextlib.contextmanager
def _turn_to_create(folder: Path) -> Iterator[None]:
    """One process at a time looks for a pool in this folder and makes it: two that make one side by side
    would take the memory twice. The lock is the folder's own, and goes with its holder; whoever doesn't get
    it goes on without, since only one can win in the end.
    """
    if not folder.is_dir():
        raise ConfigError(f"option 'pool_dir': there is no folder {folder}; mount a RAM file system there")
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        deadline_s = time.monotonic() + CREATE_TURN_S
        while time.monotonic() < deadline_s:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)
