"""Runtimes around a runtime, for tests of whoever uses one: they lose what they are told to lose, count, take
their time on a clock that ticks by hand, and die.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from umbp.data import BlockTransferPlan, RankTopology, TransferJobState
from umbp.errors import UMBPError
from umbp.runtime.base import IUMBPRuntime, LookupState, NotePhase, UMBPSchedulerHandle, UMBPWorkerHandle
from umbp.runtime.pool_scheduler import PoolSchedulerHandle
from umbp.runtime.pool_worker import PoolWorkerHandle
from umbp.runtime.wrap.passing import (
    NotesByJob,
    PassingRuntime,
    PassingSchedulerHandle,
    PassingWorkerHandle,
    mirror,
    without,
)
from umbp.runtime.wrap.slow import Pace, SlowRuntime
from umbp.testing.clock import TickClock
from umbp.testing.reference import ReferenceRuntime


def _never(rank: int, index: int, key: str) -> bool:
    return False


class PickyRuntime(PassingRuntime):
    """A runtime that loses chosen keys of loads (`loses`) and of stores (`refuses`): both are asked with the
    rank, the place in the job and the key. The job says why by `error`.
    """

    def __init__(
        self,
        inner: IUMBPRuntime,
        loses: Callable[[int, int, str], bool] = _never,
        error: str = "lost on purpose",
    ) -> None:
        super().__init__(inner)
        self.loses = loses
        self.refuses: Callable[[int, int, str], bool] = _never
        self.error = error
        self.loads: list[int] = []
        """How many keys each load of rank 0 had."""

    def _around_worker(self, inner: UMBPWorkerHandle, topology: RankTopology) -> UMBPWorkerHandle:
        return PickyWorkerHandle(inner, self, topology.tp_rank)


class PickyWorkerHandle(PassingWorkerHandle):
    def __init__(self, inner: UMBPWorkerHandle, runtime: PickyRuntime, rank: int) -> None:
        super().__init__(inner)
        self._runtime = runtime
        self._rank = rank
        self._jobs: NotesByJob[TransferJobState] = NotesByJob()

    def load(self, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        if self._rank == 0:
            self._runtime.loads.append(len(plans))
        return self._without(self._runtime.loses, super().load, plans)

    def store(self, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        return self._without(self._runtime.refuses, super().store, plans)

    def publish(self, job: TransferJobState) -> None:
        inner = self._jobs.get(job)
        super().publish(job if inner is None else inner)
        if inner is not None:
            mirror(inner, job)

    def _without(
        self,
        loses: Callable[[int, int, str], bool],
        begin: Callable[[Sequence[BlockTransferPlan]], TransferJobState],
        plans: Sequence[BlockTransferPlan],
    ) -> TransferJobState:
        job = TransferJobState(plans)
        job.start()
        lost = {key for index, key in enumerate(job.key_column) if loses(self._rank, index, key)}
        if lost:
            job.fail(lost, self._runtime.error)
        self._jobs[job] = begin(without(plans, lost))
        return job

    def wait(self, job: TransferJobState) -> TransferJobState:
        if (inner := self._jobs.get(job)) is None:
            return super().wait(job)
        mirror(super().wait(inner), job)
        return job

    def poll(self, job: TransferJobState) -> TransferJobState | None:
        if (inner := self._jobs.get(job)) is None:
            return super().poll(job)
        if (final := super().poll(inner)) is None:
            return None
        mirror(final, job)
        return job

    def cancel(self, job: TransferJobState) -> None:
        super().cancel(self._jobs.get(job) or job)


class CountingRuntime(PassingRuntime):
    """A runtime that counts what the scheduler asks of it, by verb."""

    def __init__(self, inner: IUMBPRuntime) -> None:
        super().__init__(inner)
        self.asked: Counter[str] = Counter()
        self.notes: list[tuple[int, str, str, int, int, str]] = []
        """Each note: cache group, request, phase, number of hashes, output tokens, reason of the end."""

    def _around_scheduler(self, inner: UMBPSchedulerHandle, topology: RankTopology) -> UMBPSchedulerHandle:
        return CountingSchedulerHandle(inner, self.asked, self.notes)


class CountingSchedulerHandle(PassingSchedulerHandle):
    def __init__(
        self,
        inner: UMBPSchedulerHandle,
        asked: Counter[str],
        notes: list[tuple[int, str, str, int, int, str]],
    ) -> None:
        super().__init__(inner)
        self._asked = asked
        self._notes = notes

    def note(
        self,
        request_id: str,
        phase: NotePhase,
        block_hashes: Sequence[bytes],
        output_tokens: int = 0,
        finish: str = "",
        group_id: int = 0,
    ) -> None:
        self._notes.append((group_id, request_id, phase, len(block_hashes), output_tokens, finish))
        super().note(request_id, phase, block_hashes, output_tokens, finish, group_id)

    def lookup(self, keys: Sequence[str]) -> Sequence[bool]:
        self._asked["lookup"] += 1
        return super().lookup(keys)

    def lookup_raw(self, group_id: int, block_hashes: Sequence[bytes]) -> int:
        self._asked["lookup"] += 1
        return super().lookup_raw(group_id, block_hashes)

    def hold(self, request_id: str, keys: Sequence[str]) -> int:
        self._asked["hold"] += 1
        return super().hold(request_id, keys)

    def hold_raw(self, request_id: str, group_id: int, block_hashes: Sequence[bytes]) -> int:
        self._asked["hold"] += 1
        return super().hold_raw(request_id, group_id, block_hashes)


class WatchedRuntime(PassingRuntime):
    """A runtime whose handles a test can look into: who is pinned, and whether the accounts are even."""

    def __init__(self, inner: IUMBPRuntime) -> None:
        super().__init__(inner)
        self.handles: list[Any] = []

    def _around_scheduler(self, inner: UMBPSchedulerHandle, topology: RankTopology) -> UMBPSchedulerHandle:
        self.handles.append(inner)
        return super()._around_scheduler(inner, topology)

    def _around_worker(self, inner: UMBPWorkerHandle, topology: RankTopology) -> UMBPWorkerHandle:
        self.handles.append(inner)
        return super()._around_worker(inner, topology)

    def audit(self) -> None:
        for audited in (self._inner, *self.handles):
            if hasattr(audited, "audit"):
                audited.audit()

    def check_unpinned(self, *, is_reserved: bool = False) -> None:
        """Nothing is held or pinned by anyone; nor reserved, unless publishing was made to fail."""
        self.audit()
        if isinstance(self._inner, ReferenceRuntime):
            shelf = self._inner.shelf
            assert not shelf.holds
            assert is_reserved or not shelf.written
            return
        for handle in self.handles:
            if isinstance(handle, PoolSchedulerHandle):
                assert not handle._held
                continue
            assert isinstance(handle, PoolWorkerHandle)
            found = handle._keeper.current()
            if found is not None and not is_reserved:
                # Of the whole process, so with the scheduler's pins and every rank's reservations.
                assert found[0].stats()["pinned_here"] == 0


class PromptRuntime(PassingRuntime):
    """A runtime whose jobs are over when one looks: for time that only a test's clock moves."""

    def _around_worker(self, inner: UMBPWorkerHandle, topology: RankTopology) -> UMBPWorkerHandle:
        return PromptWorkerHandle(inner)


class PromptWorkerHandle(PassingWorkerHandle):
    def poll(self, job: TransferJobState) -> TransferJobState | None:
        return self.wait(job)


class EagerRuntime(PassingRuntime):
    """A runtime whose jobs are over when they are returned: what threads do is the same in every run."""

    def _around_worker(self, inner: UMBPWorkerHandle, topology: RankTopology) -> UMBPWorkerHandle:
        return EagerWorkerHandle(inner)


class EagerWorkerHandle(PassingWorkerHandle):
    def load(self, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        return self.wait(super().load(plans))

    def store(self, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        return self.wait(super().store(plans))


def slowly(runtime: IUMBPRuntime, clock: TickClock, **delays_s: float) -> PassingRuntime:
    """The runtime on a device of its own, whose transfers last until the clock has moved."""
    pace = Pace(delays_s, clock=clock, sleep=clock.sleep)
    return plain(SlowRuntime(PromptRuntime(runtime), pace), local=False)


def plain(runtime: PassingRuntime, **changes: Any) -> PassingRuntime:
    """The same runtime, stating other capabilities than it has."""
    runtime.capabilities = replace(runtime.capabilities, **changes)
    return runtime


class DeadError(UMBPError):
    """Raised by a mortal runtime whose backend is dead."""


class MortalRuntime(PassingRuntime):
    """A runtime whose backend can be killed for everybody, for the scheduler or for one rank, and come back.

    While it is dead, questions and new transfers raise, and transfers under way fail once nothing touches
    their buffers any more; what was promised can still be given back.
    """

    def __init__(self, inner: IUMBPRuntime) -> None:
        super().__init__(inner)
        self._is_scheduler_dead = False
        self._dead_ranks: set[int] = set()
        self._ranks: set[int] = set()
        """In the order in which their handles were made."""

    @property
    def ranks(self) -> list[int]:
        return sorted(self._ranks)

    @property
    def is_dead(self) -> bool:
        return self._is_scheduler_dead or bool(self._dead_ranks)

    def kill(self) -> None:
        self._is_scheduler_dead = True
        self._dead_ranks |= self._ranks

    def kill_scheduler(self) -> None:
        self._is_scheduler_dead = True

    def kill_rank(self, rank: int) -> None:
        self._dead_ranks.add(rank)

    def revive(self) -> None:
        self._is_scheduler_dead = False
        self._dead_ranks.clear()

    def check_scheduler(self) -> None:
        if self._is_scheduler_dead:
            raise DeadError("the backend is dead, on purpose")

    def check_rank(self, rank: int) -> None:
        if rank in self._dead_ranks:
            raise DeadError(f"the backend of rank {rank} is dead, on purpose")

    def is_rank_dead(self, rank: int) -> bool:
        return rank in self._dead_ranks

    def _around_scheduler(self, inner: UMBPSchedulerHandle, topology: RankTopology) -> UMBPSchedulerHandle:
        return MortalSchedulerHandle(inner, self)

    def _around_worker(self, inner: UMBPWorkerHandle, topology: RankTopology) -> UMBPWorkerHandle:
        rank = len(self._ranks)
        self._ranks.add(rank)
        return MortalWorkerHandle(inner, self, rank)


class MortalSchedulerHandle(PassingSchedulerHandle):
    def __init__(self, inner: UMBPSchedulerHandle, runtime: MortalRuntime) -> None:
        super().__init__(inner)
        self._runtime = runtime

    def lookup(self, keys: Sequence[str]) -> Sequence[bool]:
        self._runtime.check_scheduler()
        return super().lookup(keys)

    def lookup_raw(self, group_id: int, block_hashes: Sequence[bytes]) -> int:
        self._runtime.check_scheduler()
        return super().lookup_raw(group_id, block_hashes)

    def present_raw(self, group_id: int, block_hashes: Sequence[bytes]) -> Sequence[bool]:
        self._runtime.check_scheduler()
        return super().present_raw(group_id, block_hashes)

    def lookup_states(self, keys: Sequence[str]) -> Sequence[LookupState]:
        self._runtime.check_scheduler()
        return super().lookup_states(keys)

    def hold(self, request_id: str, keys: Sequence[str]) -> int:
        self._runtime.check_scheduler()
        return super().hold(request_id, keys)

    def hold_raw(self, request_id: str, group_id: int, block_hashes: Sequence[bytes]) -> int:
        self._runtime.check_scheduler()
        return super().hold_raw(request_id, group_id, block_hashes)

    def clear(self) -> bool:
        self._runtime.check_scheduler()
        return super().clear()


class MortalWorkerHandle(PassingWorkerHandle):
    def __init__(self, inner: UMBPWorkerHandle, runtime: MortalRuntime, rank: int) -> None:
        super().__init__(inner)
        self._runtime = runtime
        self._rank = rank
        self._jobs: NotesByJob[TransferJobState] = NotesByJob()

    def load(self, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        return self._begin(plans, super().load)

    def store(self, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        return self._begin(plans, super().store)

    def wait(self, job: TransferJobState) -> TransferJobState:
        if (inner := self._jobs.get(job)) is None:
            return super().wait(job)
        return self._settled(job, super().wait(inner))

    def poll(self, job: TransferJobState) -> TransferJobState | None:
        if (inner := self._jobs.get(job)) is None:
            return super().poll(job)
        if (final := super().poll(inner)) is None:
            return None
        return self._settled(job, final)

    def publish(self, job: TransferJobState) -> None:
        self._runtime.check_rank(self._rank)
        super().publish(self._jobs.get(job) or job)

    def cancel(self, job: TransferJobState) -> None:
        super().cancel(self._jobs.get(job) or job)

    def _begin(
        self,
        plans: Sequence[BlockTransferPlan],
        begin: Callable[[Sequence[BlockTransferPlan]], TransferJobState],
    ) -> TransferJobState:
        self._runtime.check_rank(self._rank)
        job = TransferJobState(plans)
        job.start()
        self._jobs[job] = begin(plans)
        return job

    def _settled(self, job: TransferJobState, inner: TransferJobState) -> TransferJobState:
        if job.status.is_final:
            return job
        if self._runtime.is_rank_dead(self._rank):
            job.fail(job.keys, "the backend died meanwhile, on purpose")
        else:
            mirror(inner, job)
        return job
