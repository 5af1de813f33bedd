"""The distributed runtime: node pools with a cluster store behind them.

Each engine keeps what it stores and loads in a node pool, its own or one that the node's engines share; what
is published there goes out to the store in the background, and what the pool lacks is fetched into it. So
whatever an engine has computed any engine of the cluster can restore, as far as the store keeps it: nothing
that it promises is relied upon.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from umbp.data import BlockIdentityCodec, KVLayoutDescriptor, Rank, RankTopology, UMBPNamespace
from umbp.options import Options
from umbp.pool.memory import check_node
from umbp.pool.sharing import pool_path
from umbp.runtime.embedded import EmbeddedRuntime, OwnPool, WorkersPools, lookup_patience_s
from umbp.runtime.far.scheduler import Clearing, DistributedSchedulerHandle
from umbp.runtime.far.worker import WorkerFar
from umbp.runtime.pool_scheduler import PoolBinding
from umbp.runtime.pool_worker import PoolKeeper, PoolWorkerHandle
from umbp.runtime.standalone import SharedBinding, SharedKeeper, standing_for
from umbp.store.base import ClusterStore
from umbp.store.factory import create_store
from umbp.store.gate import StoreGate, StoreUnavailable

logger = logging.getLogger("vllm.umbp")

START_TIMEOUT_S = 30.0
"""How long a start waits for the store."""


DESCRIBE_TIMEOUT_S = 2.0

NOT_TOLD = ("clock", "tried with")
"""What stores say of themselves for the doctor alone."""


class MakeStore(Protocol):
    """Makes a connection to the store that the options name; `ConfigError` for wrong settings."""

    def __call__(self, options: Options, *, serves_memory: bool) -> ClusterStore: ...


class DistributedRuntime:
    """Mode `distributed`."""

    capabilities = replace(
        EmbeddedRuntime.capabilities, local=False, local_stores=True, prepare=True, counts=True
    )

    def __init__(self, options: Options, make_store: MakeStore = create_store) -> None:
        """`make_store` gives one connection, not opened yet; it is told whether the process that asks has
        objects to offer memory for.
        """
        check_node(options.dram_numa_node)
        self._options = options
        self._make_store = make_store
        self._path = None if options.pool is None else pool_path(options.pool_dir, options.pool)
        # Wrong settings are told before anything is made.
        self._traits = make_store(options, serves_memory=False).traits
        self.capabilities = replace(self.capabilities, far_tier=self._traits.name)

    def create_scheduler_handle(
        self, namespace: UMBPNamespace, topology: RankTopology, layout: KVLayoutDescriptor
    ) -> DistributedSchedulerHandle:
        options = self._options
        clearing = Clearing(namespace)
        gate = self._open_gate(serves_memory=False, before_return=clearing)
        self._tell(gate, namespace)
        stored_as = {rank: standing_for(rank, layout) for rank in topology.all_namespaces()}
        return DistributedSchedulerHandle(
            namespace,
            topology,
            self._binding(namespace, topology, set(stored_as.values())),
            stored_as,
            gate,
            clearing,
            timeout_s=options.lookup_timeout_ms / 1000,
            lease_s=self._traits.lease_s,
            is_async=options.lookup_async,
            is_shared=self._path is not None,
        )

    def _tell(self, gate: StoreGate, namespace: UMBPNamespace) -> None:
        """Which store it is, and what of it is this engine's: whoever wonders why two engines don't share
        compares these lines.
        """
        try:
            told = gate.call(lambda store: dict(store.describe()), DESCRIBE_TIMEOUT_S)
        except StoreUnavailable as error:
            told = {"which doesn't say what it is": str(error)}
        logger.info(
            "UMBP: cluster store %s: %s; this engine's namespace is %s",
            self._traits.name,
            ", ".join(f"{name} {value}" for name, value in told.items() if name not in NOT_TOLD),
            namespace.value,
        )

    def _open_gate(self, *, serves_memory: bool, before_return: Callable[[ClusterStore], bool]) -> StoreGate:
        def connect() -> ClusterStore:
            return self._make_store(self._options, serves_memory=serves_memory)

        gate = StoreGate(self._traits.name, connect, before_return=before_return)
        gate.open(START_TIMEOUT_S)
        return gate

    def _binding(
        self, namespace: UMBPNamespace, topology: RankTopology, stored_ranks: set[Rank]
    ) -> PoolBinding:
        patience_s = lookup_patience_s(self._options)
        if self._path is None:
            return WorkersPools(namespace, topology, patience_s)
        return SharedBinding(self._path, namespace, topology, stored_ranks, patience_s)

    def create_worker_handle(
        self, namespace: UMBPNamespace, topology: RankTopology, layout: KVLayoutDescriptor
    ) -> PoolWorkerHandle:
        options = self._options
        rank = topology.local_namespace
        # In every pool and in the store objects have the standing rank's keys, so that engines of both
        # set-ups find them.
        standing = standing_for(rank, layout)
        tp, pcp, dcp, pp = standing
        has_own_pool = self._path is None
        keeper: PoolKeeper = (
            OwnPool(options, namespace, topology.rank_count)
            if self._path is None
            else SharedKeeper(options, self._path, namespace)
        )
        far = WorkerFar(
            lambda repay: self._open_gate(serves_memory=True, before_return=repay),
            self._traits,
            timeout_s=options.timeout_ms / 1000,
            has_checksums=options.verify != "off",
            # In pools of their own all that hold the same store it; the store needs it once.
            sends=rank == standing or not has_own_pool,
        )
        first = topology.all_namespaces()[0]
        return PoolWorkerHandle(
            options,
            # In a shared pool, whoever of those that hold the first rank's KV is quickest stores it for all.
            layout.counted_if((rank if has_own_pool else standing) == first),
            keeper,
            shared_codec=None if standing == rank else BlockIdentityCodec(namespace, tp, pp, pcp, dcp),
            counts_usage=has_own_pool or rank == first,
            far=far,
        )
