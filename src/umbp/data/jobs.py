"""What became of a transfer: the state of a job, and what ranks report of a store."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property

from umbp.data.plans import BlockLoadBatch, BlockStoreBatch, BlockTransferPlan


class TransferJobStatus(StrEnum):
    """Where a job stands; the last three are final."""

    PENDING = "pending"
    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self not in (TransferJobStatus.PENDING, TransferJobStatus.RUNNING)


@dataclass(eq=False)
class TransferJobState:
    """One load or store of many objects, each with its own outcome: a failed key never fails its siblings.

    Written by one thread at a time. Jobs compare and hash by identity: a runtime may keep notes by job.
    """

    plans: Sequence[BlockTransferPlan]
    status: TransferJobStatus = TransferJobStatus.PENDING
    completed_keys: set[str] = field(default_factory=set)
    failed_keys: set[str] = field(default_factory=set)
    error: str | None = None
    plan_bytes: Sequence[int] | None = None

    @cached_property
    def keys(self) -> frozenset[str]:
        return frozenset(self.key_column)

    @property
    def completed_bytes(self) -> int:
        """Bytes of the completed keys: from `plan_bytes` where given, else from the plans' ranges."""
        if self.plan_bytes is not None and len(self.plan_bytes):
            if len(self.completed_keys) == len(self.keys):
                return sum(self.plan_bytes)
            pairs = zip(self.key_column, self.plan_bytes, strict=True)
            return sum(size for key, size in pairs if key in self.completed_keys)
        if isinstance(self.plans, BlockLoadBatch | BlockStoreBatch):
            return 0
        return sum(r.length for plan in self.plans if plan.key in self.completed_keys for r in plan.ranges)

    @property
    def failed_block_ids(self) -> set[int]:
        pairs = zip(self.key_column, self._block_ids, strict=True)
        return {block_id for key, block_id in pairs if key in self.failed_keys}

    def start(self) -> None:
        if self.status is not TransferJobStatus.PENDING:
            raise RuntimeError(f"a {self.status.value} job can't be started")
        self.status = TransferJobStatus.RUNNING

    def complete(self, keys: Iterable[str] = ()) -> None:
        """These keys have moved; none named means all."""
        done = set(keys)
        self.completed_keys |= done or self.keys
        self._settle()

    def fail(self, keys: Iterable[str], error: str | None = None) -> None:
        """These keys have not moved; `error` replaces what was said before, also by None."""
        self.failed_keys.update(keys)
        self.error = error
        self._settle()

    def cancel(self, error: str = "cancelled") -> None:
        """The job is over without a verdict on what remains; the outcomes so far stand."""
        self.status = TransferJobStatus.CANCELLED
        self.error = error

    def _settle(self) -> None:
        # The sum of the lengths bounds their union: most calls of a long job end at this comparison.
        if len(self.completed_keys) + len(self.failed_keys) < len(self.keys):
            return
        if self.keys <= self.completed_keys | self.failed_keys:
            self.status = TransferJobStatus.FAILED if self.failed_keys else TransferJobStatus.COMPLETED

    @property
    def key_column(self) -> Sequence[str]:
        """The keys in the order of the plans, doubles included."""
        if isinstance(self.plans, BlockLoadBatch | BlockStoreBatch):
            return self.plans.keys
        return [plan.key for plan in self.plans]

    @property
    def _block_ids(self) -> Sequence[int]:
        if isinstance(self.plans, BlockLoadBatch | BlockStoreBatch):
            return self.plans.block_ids
        return [plan.block_id for plan in self.plans]


@dataclass
class StoreEventResult:
    """What workers have reported of one store; an object is (group id, block hash)."""

    completed_workers: int = 0
    failed_objects: set[tuple[int, bytes]] = field(default_factory=set)

    def merge(self, other: StoreEventResult) -> None:
        self.completed_workers += other.completed_workers
        self.failed_objects |= other.failed_objects
