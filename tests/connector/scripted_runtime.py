"""The plug-in of mode "scripted": a runtime that a test made and both halves of one engine share.

A test puts its runtime on the table under a name and gives that name in `plugin_options`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from umbp.data import BlockTransferPlan, RankTopology, TransferJobState
from umbp.options import Options
from umbp.runtime.base import IUMBPRuntime, UMBPSchedulerHandle, UMBPWorkerHandle
from umbp.runtime.wrap.passing import (
    NotesByJob,
    PassingRuntime,
    PassingSchedulerHandle,
    PassingWorkerHandle,
    mirror,
    without,
)

MODE = "scripted"
TABLE: dict[str, IUMBPRuntime] = {}


def make(options: Options) -> IUMBPRuntime:
    return TABLE[str(options.plugin_options["runtime"])]


class PickyRuntime(PassingRuntime):
    """A runtime whose loads lose chosen keys: `loses(rank, index, key)` says which, by place in the load."""

    def __init__(self, inner: IUMBPRuntime, loses: Callable[[int, int, str], bool]) -> None:
        super().__init__(inner)
        self.loses = loses
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
        job = TransferJobState(plans)
        job.start()
        if self._rank == 0:
            self._runtime.loads.append(len(plans))
        lost = {key for index, key in enumerate(job.key_column) if self._runtime.loses(self._rank, index, key)}
        if lost:
            job.fail(lost, "lost on purpose")
        self._jobs[job] = super().load(without(plans, lost))
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

    def _around_scheduler(self, inner: UMBPSchedulerHandle, topology: RankTopology) -> UMBPSchedulerHandle:
        return CountingSchedulerHandle(inner, self.asked)


class CountingSchedulerHandle(PassingSchedulerHandle):
    def __init__(self, inner: UMBPSchedulerHandle, asked: Counter[str]) -> None:
        super().__init__(inner)
        self._asked = asked

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


def plain(runtime: PassingRuntime, **changes: bool) -> PassingRuntime:
    """The same runtime, stating other capabilities than it has."""
    runtime.capabilities = replace(runtime.capabilities, **changes)
    return runtime
