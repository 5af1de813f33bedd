"""The embedded runtime: each worker makes a pool of its own in host memory, and the scheduler attaches to all
of them.

A pool is an anonymous segment of its worker's process: it has no name that could collide, and it goes when
the last process that attached it goes. No data and no question passes through a socket.
"""

from __future__ import annotations

from umbp.data import KVLayoutDescriptor, RankTopology, UMBPNamespace
from umbp.errors import ConfigError
from umbp.options import Options
from umbp.pool.pool import LOCK_PATIENCE_S
from umbp.runtime.base import Capabilities
from umbp.runtime.pool_scheduler import PoolSchedulerHandle
from umbp.runtime.pool_worker import PoolWorkerHandle


class EmbeddedRuntime:
    """Mode `embedded`."""

    capabilities = Capabilities(hold=True, lookup_raw=True, note=True, attach=True, usage=True, local=True)

    def __init__(self, options: Options) -> None:
        _refuse_unbuilt(options)
        self._options = options

    def create_scheduler_handle(
        self, namespace: UMBPNamespace, topology: RankTopology, layout: KVLayoutDescriptor
    ) -> PoolSchedulerHandle:
        patience_s = min(LOCK_PATIENCE_S, self._options.lookup_timeout_ms / 1000)
        return PoolSchedulerHandle(namespace, topology, lock_patience_s=patience_s)

    def create_worker_handle(
        self, namespace: UMBPNamespace, topology: RankTopology, layout: KVLayoutDescriptor
    ) -> PoolWorkerHandle:
        return PoolWorkerHandle(self._options, namespace, topology, layout)


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
