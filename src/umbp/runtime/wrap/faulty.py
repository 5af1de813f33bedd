"""A runtime that goes wrong on purpose: the faults a real backend has, by seeded chance.

Faults are only those a user is promised to survive: keys and whole jobs that fail, hits that are told as
misses, a publish that raises. Bytes are never wrong: what completes is right.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from random import Random
from typing import Any
from weakref import WeakSet

from umbp.data import BlockTransferPlan, RankTopology, TransferJobState
from umbp.errors import ConfigError, UMBPError
from umbp.kinds import nearest, shown
from umbp.runtime.base import IUMBPRuntime, LookupState, UMBPSchedulerHandle, UMBPWorkerHandle
from umbp.runtime.wrap.passing import (
    NotesByJob,
    PassingRuntime,
    PassingSchedulerHandle,
    PassingWorkerHandle,
    mirror,
    without,
)

FAULTS_VARIABLE = "UMBP_INJECT_FAULTS"
"""The environment variable by which an engine's processes are told of a fault plan, as JSON."""


class InjectedError(UMBPError):
    """Raised by a faulty runtime where a backend might raise."""


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What share of things goes wrong, each from 0 to 1; one seed gives one sequence of faults a handle."""

    seed: int = 0
    load_keys: float = 0.0
    """of a load's keys fail, each by itself"""
    load_jobs: float = 0.0
    """of loads fail as a whole"""
    store_keys: float = 0.0
    """of a store's keys fail, each by itself"""
    store_jobs: float = 0.0
    """of stores fail as a whole"""
    lookups: float = 0.0
    """of the keys that are there are told as misses"""
    publishes: float = 0.0
    """of publishes raise, and publish nothing"""

    def __post_init__(self) -> None:
        if type(self.seed) is not int:
            raise ConfigError(f"fault plan: seed must be a whole number, not {shown(self.seed)}")
        for field in fields(self)[1:]:
            share = getattr(self, field.name)
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
                raise ConfigError(f"fault plan: {field.name} must be a share from 0 to 1, not {shown(share)}")

    @classmethod
    def parse(cls, plan: str | Mapping[str, object]) -> FaultPlan:
        """A plan from a mapping or its JSON text; `ConfigError` names what is wrong."""
        if isinstance(plan, str):
            try:
                plan = json.loads(plan)
            except json.JSONDecodeError as error:
                raise ConfigError(f"fault plan: not JSON: {error}") from None
        if not isinstance(plan, Mapping):
            raise ConfigError(f"fault plan: must be a JSON object, not {shown(plan)}")
        names = [field.name for field in fields(cls)]
        for name in plan:
            if name not in names:
                raise ConfigError(f"fault plan: unknown name {shown(name)}{nearest(name, names)}")
        values: dict[str, Any] = dict(plan)
        return cls(**values)

    def to_json(self) -> str:
        return json.dumps({field.name: getattr(self, field.name) for field in fields(self)})


class FaultyRuntime(PassingRuntime):
    """A runtime with the plan's faults; each handle draws from a sequence of its own."""

    def __init__(self, inner: IUMBPRuntime, plan: FaultPlan) -> None:
        super().__init__(inner)
        self.plan = plan

    def _around_scheduler(self, inner: UMBPSchedulerHandle, topology: RankTopology) -> UMBPSchedulerHandle:
        return FaultySchedulerHandle(inner, self.plan, Random(f"{self.plan.seed} scheduler"))

    def _around_worker(self, inner: UMBPWorkerHandle, topology: RankTopology) -> UMBPWorkerHandle:
        place = topology.local_namespace
        return FaultyWorkerHandle(inner, self.plan, Random(f"{self.plan.seed} worker {place}"))


class FaultySchedulerHandle(PassingSchedulerHandle):
    """Some hits are told as misses, in every way of asking."""

    def __init__(self, inner: UMBPSchedulerHandle, plan: FaultPlan, random: Random) -> None:
        super().__init__(inner)
        self._plan = plan
        self._random = random

    def lookup(self, keys: Sequence[str]) -> Sequence[bool]:
        return [hit and not self._lies() for hit in self._inner.lookup(keys)]

    def lookup_raw(self, group_id: int, block_hashes: Sequence[bytes]) -> int:
        return self._inner.lookup_raw(group_id, block_hashes[: self._told(len(block_hashes))])

    def present_raw(self, group_id: int, block_hashes: Sequence[bytes]) -> Sequence[bool]:
        return [hit and not self._lies() for hit in self._inner.present_raw(group_id, block_hashes)]

    def lookup_states(self, keys: Sequence[str]) -> Sequence[LookupState]:
        states = self._inner.lookup_states(keys)
        return [LookupState.MISS if s is LookupState.HIT and self._lies() else s for s in states]

    def hold(self, request_id: str, keys: Sequence[str]) -> int:
        return self._inner.hold(request_id, keys[: self._told(len(keys))])

    def hold_raw(self, request_id: str, group_id: int, block_hashes: Sequence[bytes]) -> int:
        return self._inner.hold_raw(request_id, group_id, block_hashes[: self._told(len(block_hashes))])

    def _told(self, count: int) -> int:
        """How many come before the first lie."""
        return next((index for index in range(count) if self._lies()), count)

    def _lies(self) -> bool:
        return self._random.random() < self._plan.lookups


class FaultyWorkerHandle(PassingWorkerHandle):
    """Some keys are left out of the wrapped job and have failed; some publishes raise."""

    def __init__(self, inner: UMBPWorkerHandle, plan: FaultPlan, random: Random) -> None:
        super().__init__(inner)
        self._plan = plan
        self._random = random
        self._inner_jobs: NotesByJob[TransferJobState] = NotesByJob()
        self._stores: WeakSet[TransferJobState] = WeakSet()

    def load(self, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        job, rest = self._begin(plans, self._plan.load_jobs, self._plan.load_keys)
        self._inner_jobs[job] = self._inner.load(rest)
        return job

    def store(self, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        job, rest = self._begin(plans, self._plan.store_jobs, self._plan.store_keys)
        self._inner_jobs[job] = self._inner.store(rest)
        self._stores.add(job)
        return job

    def wait(self, job: TransferJobState) -> TransferJobState:
        inner = self._inner_jobs.get(job)
        return self._settled(job, self._inner.wait(inner) if inner else None)

    def poll(self, job: TransferJobState) -> TransferJobState | None:
        inner = self._inner_jobs.get(job)
        if inner is not None and (inner := self._inner.poll(inner)) is None:
            return None
        return self._settled(job, inner)

    def publish(self, job: TransferJobState) -> None:
        inner = self._inner_jobs.get(job)
        if job in self._stores and job.status.is_final and self._random.random() < self._plan.publishes:
            raise InjectedError("the store was not published, on purpose")
        self._inner.publish(job if inner is None else inner)
        self._settled(job, inner)

    def cancel(self, job: TransferJobState) -> None:
        inner = self._inner_jobs.get(job)
        if inner is not None:
            self._inner.cancel(inner)

    def _begin(
        self, plans: Sequence[BlockTransferPlan], job_share: float, key_share: float
    ) -> tuple[TransferJobState, Sequence[BlockTransferPlan]]:
        job = TransferJobState(plans)
        job.start()
        share = 1.0 if self._random.random() < job_share else key_share
        lost = {key for key in dict.fromkeys(job.key_column) if self._random.random() < share}
        if lost:
            job.fail(lost, "failed on purpose")
        return job, without(plans, lost)

    def _settled(self, job: TransferJobState, inner: TransferJobState | None) -> TransferJobState:
        if inner is not None:
            mirror(inner, job)
        return job
