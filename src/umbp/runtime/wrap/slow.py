"""A runtime that takes its time: the slowest device the contract allows, on an injected clock.

A delayed job doesn't touch a byte before its delay is over; then all of it moves at once. Whoever reuses a
block too early, or reads one, meets wrong bytes here and not only on a busy device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from umbp.data import BlockTransferPlan, RankTopology, TransferJobState
from umbp.errors import ConfigError
from umbp.kinds import nearest, shown
from umbp.runtime.base import IUMBPRuntime, LookupState, UMBPSchedulerHandle, UMBPWorkerHandle
from umbp.runtime.wrap.passing import (
    NotesByJob,
    PassingRuntime,
    PassingSchedulerHandle,
    PassingWorkerHandle,
    mirror,
)

LONGEST_DELAY_S = 60.0
VERBS = ("lookup", "hold", "load", "store", "publish")

Begin = Callable[[Sequence[BlockTransferPlan]], TransferJobState]


@dataclass(frozen=True, slots=True)
class Pace:
    """How long each verb takes, and whose time that is: tests give a clock of their own."""

    delays_s: Mapping[str, float]
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        for verb, delay in self.delays_s.items():
            if verb not in VERBS:
                raise ConfigError(f"delays: unknown verb {shown(verb)}{nearest(verb, VERBS)}")
            if not 0 <= delay <= LONGEST_DELAY_S:
                raise ConfigError(f"delays: {verb} must take from 0 to {LONGEST_DELAY_S:g} s, not {delay}")

    def take(self, verb: str) -> None:
        delay = self.delays_s.get(verb, 0.0)
        if delay:
            self.sleep(delay)

    def due(self, verb: str) -> float:
        return self.clock() + self.delays_s.get(verb, 0.0)


class SlowRuntime(PassingRuntime):
    """A runtime at the given pace: lookups and holds answer late, loads and stores begin late."""

    def __init__(self, inner: IUMBPRuntime, pace: Pace) -> None:
        super().__init__(inner)
        self.pace = pace

    def _around_scheduler(self, inner: UMBPSchedulerHandle, topology: RankTopology) -> UMBPSchedulerHandle:
        return SlowSchedulerHandle(inner, self.pace)

    def _around_worker(self, inner: UMBPWorkerHandle, topology: RankTopology) -> UMBPWorkerHandle:
        return SlowWorkerHandle(inner, self.pace)


class SlowSchedulerHandle(PassingSchedulerHandle):
    """Every way of asking takes the time of a lookup, every way of holding that of a hold."""

    def __init__(self, inner: UMBPSchedulerHandle, pace: Pace) -> None:
        super().__init__(inner)
        self._pace = pace

    def lookup(self, keys: Sequence[str]) -> Sequence[bool]:
        self._pace.take("lookup")
        return super().lookup(keys)

    def lookup_raw(self, group_id: int, block_hashes: Sequence[bytes]) -> int:
        self._pace.take("lookup")
        return super().lookup_raw(group_id, block_hashes)

    def present_raw(self, group_id: int, block_hashes: Sequence[bytes]) -> Sequence[bool]:
        self._pace.take("lookup")
        return super().present_raw(group_id, block_hashes)

    def lookup_states(self, keys: Sequence[str]) -> Sequence[LookupState]:
        self._pace.take("lookup")
        return super().lookup_states(keys)

    def hold(self, request_id: str, keys: Sequence[str]) -> int:
        self._pace.take("hold")
        return super().hold(request_id, keys)

    def hold_raw(self, request_id: str, group_id: int, block_hashes: Sequence[bytes]) -> int:
        self._pace.take("hold")
        return super().hold_raw(request_id, group_id, block_hashes)


@dataclass(slots=True)
class _Course:
    """A job on its way: not begun until it is due, then a job of the wrapped handle's."""

    begin: Begin
    due: float
    inner: TransferJobState | None = None


class SlowWorkerHandle(PassingWorkerHandle):
    """Jobs that begin when their delay is over, at the next `wait` or `poll`."""

    def __init__(self, inner: UMBPWorkerHandle, pace: Pace) -> None:
        super().__init__(inner)
        self._pace = pace
        self._courses: NotesByJob[_Course] = NotesByJob()

    def load(self, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        return self._later(plans, self._inner.load, "load")

    def store(self, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        return self._later(plans, self._inner.store, "store")

    def wait(self, job: TransferJobState) -> TransferJobState:
        course = self._courses.get(job)
        if course is not None:
            rest = course.due - self._pace.clock()
            if course.inner is None and rest > 0:
                self._pace.sleep(rest)
            mirror(self._inner.wait(self._begun(job, course)), job)
        return job

    def poll(self, job: TransferJobState) -> TransferJobState | None:
        course = self._courses.get(job)
        if course is None:
            return job
        if course.inner is None and self._pace.clock() < course.due:
            return None
        inner = self._inner.poll(self._begun(job, course))
        if inner is None:
            return None
        mirror(inner, job)
        return job

    def publish(self, job: TransferJobState) -> None:
        self._pace.take("publish")
        course = self._courses.get(job)
        if course is not None and course.inner is None:
            raise ValueError("the store is not over yet")
        inner = None if course is None else course.inner
        self._inner.publish(job if inner is None else inner)
        if inner is not None:
            mirror(inner, job)

    def cancel(self, job: TransferJobState) -> None:
        """Brings the job's end forward: the wrapped handle is told at once, and nothing is waited for."""
        course = self._courses.get(job)
        if course is not None:
            course.due = self._pace.clock()
            self._inner.cancel(self._begun(job, course))

    def _later(self, plans: Sequence[BlockTransferPlan], begin: Begin, verb: str) -> TransferJobState:
        job = TransferJobState(plans)
        job.start()
        self._courses[job] = _Course(begin, self._pace.due(verb))
        return job

    def _begun(self, job: TransferJobState, course: _Course) -> TransferJobState:
        if course.inner is None:
            course.inner = course.begin(job.plans)
        return course.inner
