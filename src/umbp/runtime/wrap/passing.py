"""Wrappers' common ground: handles that pass every verb on, and jobs of their own around the wrapped ones.

Handles here have the methods of all extras; as ever, only those are called whose capability is stated, and a
wrapper states what the wrapped runtime states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Generic, Protocol, TypeVar, cast
from weakref import WeakKeyDictionary

from umbp.data import (
    BlockLoadBatch,
    BlockStoreBatch,
    BlockTransferPlan,
    KVLayoutDescriptor,
    Rank,
    RankTopology,
    TensorLike,
    TransferJobState,
    TransferJobStatus,
    UMBPNamespace,
)
from umbp.runtime import base
from umbp.runtime.base import Capabilities, HandshakeExtra, IUMBPRuntime, LookupState, NotePhase


class AnyScheduler(
    base.UMBPSchedulerHandle,
    base.SupportsHold,
    base.SupportsRawLookup,
    base.SupportsPresence,
    base.SupportsRawHold,
    base.SupportsLookupStates,
    base.SupportsNote,
    base.SupportsEvictedKeys,
    base.SupportsWatch,
    base.SupportsPrepare,
    base.SupportsCounts,
    base.SupportsAttach,
    Protocol,
):
    """A scheduler handle with every extra."""


class AnyWorker(
    base.UMBPWorkerHandle,
    base.SupportsHandshakeExtra,
    base.SupportsCancel,
    base.SupportsUsage,
    base.SupportsCounts,
    Protocol,
):
    """A worker handle with every extra."""


class PassingSchedulerHandle:
    """Passes every verb on."""

    def __init__(self, inner: base.UMBPSchedulerHandle) -> None:
        self._inner = cast(AnyScheduler, inner)

    def lookup(self, keys: Sequence[str]) -> Sequence[bool]:
        return self._inner.lookup(keys)

    def lookup_raw(self, group_id: int, block_hashes: Sequence[bytes]) -> int:
        return self._inner.lookup_raw(group_id, block_hashes)

    def present_raw(self, group_id: int, block_hashes: Sequence[bytes]) -> Sequence[bool]:
        return self._inner.present_raw(group_id, block_hashes)

    def lookup_states(self, keys: Sequence[str]) -> Sequence[LookupState]:
        return self._inner.lookup_states(keys)

    def hold(self, request_id: str, keys: Sequence[str]) -> int:
        return self._inner.hold(request_id, keys)

    def hold_raw(self, request_id: str, group_id: int, block_hashes: Sequence[bytes]) -> int:
        return self._inner.hold_raw(request_id, group_id, block_hashes)

    def unhold(self, request_id: str) -> None:
        self._inner.unhold(request_id)

    def note(
        self,
        request_id: str,
        phase: NotePhase,
        block_hashes: Sequence[bytes],
        output_tokens: int = 0,
        finish: str = "",
        group_id: int = 0,
    ) -> None:
        self._inner.note(
            request_id, phase, block_hashes, output_tokens, finish, *((group_id,) if group_id else ())
        )

    def take_evicted_keys(self) -> Sequence[str]:
        return self._inner.take_evicted_keys()

    def watch(self, group_id: int, block_hashes: Sequence[bytes]) -> Sequence[bool]:
        return self._inner.watch(group_id, block_hashes)

    def take_lost(self) -> Sequence[tuple[int, bytes]]:
        return self._inner.take_lost()

    def prepare(self, request_id: str, wanted: Sequence[base.Wanted], patience_s: float = 0.0) -> bool:
        return self._inner.prepare(request_id, wanted, patience_s)

    def unprepare(self, request_id: str) -> None:
        self._inner.unprepare(request_id)

    def to_fetch(self, request_id: str) -> Mapping[int, int]:
        return self._inner.to_fetch(request_id)

    def disbelieve(self, blocks: Collection[tuple[int, bytes]]) -> None:
        self._inner.disbelieve(blocks)

    def is_cut_off(self) -> bool:
        return self._inner.is_cut_off()

    def clear_soon(self) -> None:
        self._inner.clear_soon()

    def take_counts(self) -> Mapping[tuple[str, ...], float]:
        return self._inner.take_counts()

    def bind_workers(self, extras: Mapping[Rank, HandshakeExtra]) -> None:
        self._inner.bind_workers(extras)

    def clear(self) -> bool:
        return self._inner.clear()

    def close(self) -> None:
        self._inner.close()


class PassingWorkerHandle:
    """Passes every verb on."""

    def __init__(self, inner: base.UMBPWorkerHandle) -> None:
        self._inner = cast(AnyWorker, inner)

    def register_buffers(self, kv_caches: Mapping[str, TensorLike]) -> None:
        self._inner.register_buffers(kv_caches)

    def load(self, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        return self._inner.load(plans)

    def store(self, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        return self._inner.store(plans)

    def wait(self, job: TransferJobState) -> TransferJobState:
        return self._inner.wait(job)

    def poll(self, job: TransferJobState) -> TransferJobState | None:
        return self._inner.poll(job)

    def publish(self, job: TransferJobState) -> None:
        self._inner.publish(job)

    def cancel(self, job: TransferJobState) -> None:
        self._inner.cancel(job)

    def handshake_extra(self) -> HandshakeExtra:
        return self._inner.handshake_extra()

    def usage(self) -> Mapping[str, float]:
        return self._inner.usage()

    def take_counts(self) -> Mapping[tuple[str, ...], float]:
        return self._inner.take_counts()

    def close(self) -> None:
        self._inner.close()


class PassingRuntime:
    """Wraps a runtime; subclasses say which handles stand around the wrapped ones."""

    def __init__(self, inner: IUMBPRuntime) -> None:
        self._inner = inner
        self.capabilities: Capabilities = base.capabilities_of(inner)

    def create_scheduler_handle(
        self, namespace: UMBPNamespace, topology: RankTopology, layout: KVLayoutDescriptor
    ) -> base.UMBPSchedulerHandle:
        inner = self._inner.create_scheduler_handle(namespace, topology, layout)
        return self._around_scheduler(inner, topology)

    def create_worker_handle(
        self, namespace: UMBPNamespace, topology: RankTopology, layout: KVLayoutDescriptor
    ) -> base.UMBPWorkerHandle:
        return self._around_worker(self._inner.create_worker_handle(namespace, topology, layout), topology)

    def _around_scheduler(
        self, inner: base.UMBPSchedulerHandle, topology: RankTopology
    ) -> base.UMBPSchedulerHandle:
        return PassingSchedulerHandle(inner)

    def _around_worker(self, inner: base.UMBPWorkerHandle, topology: RankTopology) -> base.UMBPWorkerHandle:
        return PassingWorkerHandle(inner)


N = TypeVar("N")


class NotesByJob(Generic[N]):
    """What a wrapper remembers of jobs until nobody has them any more."""

    def __init__(self) -> None:
        self._notes: WeakKeyDictionary[TransferJobState, N] = WeakKeyDictionary()

    def __setitem__(self, job: TransferJobState, note: N) -> None:
        self._notes[job] = note

    def get(self, job: TransferJobState) -> N | None:
        return self._notes.get(job)

    def pop(self, job: TransferJobState) -> N | None:
        return self._notes.pop(job, None)


def mirror(inner: TransferJobState, outer: TransferJobState) -> None:
    """Carry a wrapped job's final outcome over to the wrapper's own job; its other keys are settled."""
    error = inner.error or outer.error
    if inner.plan_bytes is not None:
        sizes: Counter[str] = Counter()
        for key, size in zip(inner.key_column, inner.plan_bytes, strict=True):
            sizes[key] += size
        # A key's second plan counts nothing: its sum stands at the first.
        outer.plan_bytes = [sizes.pop(key, 0) for key in outer.key_column]
    if inner.completed_keys:
        outer.complete(inner.completed_keys)
    if inner.failed_keys:
        outer.completed_keys -= inner.failed_keys
        outer.fail(inner.failed_keys, error)
    if inner.status is TransferJobStatus.CANCELLED:
        outer.cancel(inner.error or "cancelled")
    elif not outer.keys:
        outer.complete()
    outer.error = error


def without(plans: Sequence[BlockTransferPlan], keys: Collection[str]) -> Sequence[BlockTransferPlan]:
    """The same kind of plans without those keys."""
    if not isinstance(plans, BlockLoadBatch | BlockStoreBatch):
        return [plan for plan in plans if plan.key not in keys]
    kept = [row for row, key in enumerate(plans.keys) if key not in keys]
    names = (field.name for field in fields(plans) if field.name != "request_id")
    columns: dict[str, Any] = {name: [getattr(plans, name)[row] for row in kept] for name in names}
    return replace(plans, **columns)
