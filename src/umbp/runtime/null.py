"""The runtime that keeps nothing: every lookup misses and every store is refused. What the engine pays
without hits.

It runs the whole path of the contract, so it measures the connector's own cost and stands where a cache is
unwanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakSet

from umbp.data import (
    BlockTransferPlan,
    KVLayoutDescriptor,
    RankTopology,
    TensorLike,
    TransferJobState,
    UMBPNamespace,
)
from umbp.runtime.base import Capabilities, LookupState


class NullRuntime:
    """Keeps nothing, and says so."""

    capabilities = Capabilities(
        hold=True, lookup_raw=True, presence=True, lookup_states=True, note=True, watch=True, cancel=True
    )

    def create_scheduler_handle(
        self, namespace: UMBPNamespace, topology: RankTopology, layout: KVLayoutDescriptor
    ) -> NullSchedulerHandle:
        return NullSchedulerHandle()

    def create_worker_handle(
        self, namespace: UMBPNamespace, topology: RankTopology, layout: KVLayoutDescriptor
    ) -> NullWorkerHandle:
        return NullWorkerHandle()


class NullSchedulerHandle:
    """Misses."""

    def lookup(self, keys: Sequence[str]) -> list[bool]:
        return [False] * len(keys)

    def lookup_raw(self, group_id: int, block_hashes: Sequence[bytes]) -> int:
        return 0

    def present_raw(self, group_id: int, block_hashes: Sequence[bytes]) -> list[bool]:
        return [False] * len(block_hashes)

    def lookup_states(self, keys: Sequence[str]) -> list[LookupState]:
        return [LookupState.MISS] * len(keys)

    def hold(self, request_id: str, keys: Sequence[str]) -> int:
        return 0

    def hold_raw(self, request_id: str, group_id: int, block_hashes: Sequence[bytes]) -> int:
        return 0

    def unhold(self, request_id: str) -> None: ...

    def note(
        self,
        request_id: str,
        phase: str,
        block_hashes: Sequence[bytes],
        output_tokens: int = 0,
        finish: str = "",
        group_id: int = 0,
    ) -> None: ...

    def watch(self, group_id: int, block_hashes: Sequence[bytes]) -> list[bool]:
        return [False] * len(block_hashes)

    def take_lost(self) -> list[tuple[int, bytes]]:
        return []

    def clear(self) -> bool:
        return True

    def close(self) -> None: ...


class NullWorkerHandle:
    """Refuses: its jobs are over when they are returned."""

    def __init__(self) -> None:
        self._stores: WeakSet[TransferJobState] = WeakSet()

    def register_buffers(self, kv_caches: Mapping[str, TensorLike]) -> None: ...

    def load(self, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        return refused(plans, "nothing is kept")

    def store(self, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        job = refused(plans, "nothing is kept")
        self._stores.add(job)
        return job

    def wait(self, job: TransferJobState) -> TransferJobState:
        return job

    def poll(self, job: TransferJobState) -> TransferJobState | None:
        return job

    def publish(self, job: TransferJobState) -> None:
        if job not in self._stores:
            raise ValueError("only a store of this handle can be published")

    def cancel(self, job: TransferJobState) -> None: ...

    def close(self) -> None: ...


def refused(plans: Sequence[BlockTransferPlan], error: str) -> TransferJobState:
    """A job that is over before it began: every key failed."""
    job = TransferJobState(plans)
    job.start()
    job.fail(job.keys, error)
    return job
