"""Engines' runtimes over one cluster store in memory."""

from __future__ import annotations

from umbp.data import KVLayoutDescriptor, RankTopology, UMBPNamespace
from umbp.options import Options, parse_options
from umbp.runtime.distributed import DistributedRuntime
from umbp.runtime.far.scheduler import DistributedSchedulerHandle
from umbp.runtime.pool_worker import PoolWorkerHandle
from umbp.store.base import ClusterStore
from umbp.testing.stores.memory import MemoryCluster


class Node(DistributedRuntime):
    """One engine's runtime; `flush` waits for what it sends."""

    def __init__(self, cluster: MemoryCluster, **options: object) -> None:
        def connect(options: Options, *, serves_memory: bool) -> ClusterStore:
            return cluster.connect()

        extra: dict[str, object] = {"mode": "distributed", "store": "memory", "capacity_bytes": "4MiB"}
        super().__init__(parse_options(extra | options), connect)
        self.workers: list[PoolWorkerHandle] = []
        self.schedulers: list[DistributedSchedulerHandle] = []

    def create_worker_handle(
        self, namespace: UMBPNamespace, topology: RankTopology, layout: KVLayoutDescriptor
    ) -> PoolWorkerHandle:
        self.workers.append(super().create_worker_handle(namespace, topology, layout))
        return self.workers[-1]

    def create_scheduler_handle(
        self, namespace: UMBPNamespace, topology: RankTopology, layout: KVLayoutDescriptor
    ) -> DistributedSchedulerHandle:
        self.schedulers.append(super().create_scheduler_handle(namespace, topology, layout))
        return self.schedulers[-1]

    def flush(self) -> None:
        for worker in self.workers:
            assert worker.far is not None
            assert worker.far.flush(30)
