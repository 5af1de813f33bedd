"""Runtimes that each break one sentence of the contract, for `test_contract_catches`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest

from umbp.data import BlockTransferPlan, TensorLike, TransferJobState
from umbp.runtime.base import Capabilities, LookupState
from umbp.testing.contract import RuntimeContract
from umbp.testing.reference import (
    ReferenceRuntime,
    ReferenceSchedulerHandle,
    ReferenceWorkerHandle,
)

Plans = Sequence[BlockTransferPlan]


class Broken(RuntimeContract):
    """The reference runtime with other handles."""

    __test__ = False
    Scheduler: ClassVar[type[ReferenceSchedulerHandle]] = ReferenceSchedulerHandle
    Worker: ClassVar[type[ReferenceWorkerHandle]] = ReferenceWorkerHandle
    capabilities: ClassVar[Capabilities] = ReferenceRuntime.capabilities
    capacity_objects = 12

    def __init_subclass__(cls) -> None:
        cls.__test__ = True

    @pytest.fixture
    def runtime(self) -> ReferenceRuntime:
        test = type(self)

        class Runtime(ReferenceRuntime):
            capabilities = test.capabilities

            def create_scheduler_handle(self, namespace: Any, topology: Any, layout: Any) -> Any:
                return test.Scheduler(self.shelf, namespace, topology)

            def create_worker_handle(self, namespace: Any, topology: Any, layout: Any) -> Any:
                return test.Worker(self.shelf, namespace, topology, layout)

        return Runtime(capacity=12)


class TestAnswersInReverse(Broken):
    class Scheduler(ReferenceSchedulerHandle):
        def lookup(self, keys: Sequence[str]) -> list[bool]:
            return super().lookup(keys)[::-1]


class TestAnswersOnlyHits(Broken):
    class Scheduler(ReferenceSchedulerHandle):
        def lookup(self, keys: Sequence[str]) -> list[bool]:
            return [hit for hit in super().lookup(keys) if hit]


class TestSeesWhatIsNotPublished(Broken):
    class Scheduler(ReferenceSchedulerHandle):
        def lookup(self, keys: Sequence[str]) -> list[bool]:
            return [state is not LookupState.MISS for state in self.lookup_states(keys)]


class TestPublishesAnything(Broken):
    class Worker(ReferenceWorkerHandle):
        def publish(self, job: TransferJobState) -> None:
            if job in self._stores:
                super().publish(job)


class TestOneMissingKeyFailsAll(Broken):
    class Worker(ReferenceWorkerHandle):
        def load(self, plans: Plans) -> TransferJobState:
            job = super().load(plans)
            if job.failed_keys:
                job.completed_keys.clear()
                job.fail(job.keys, "one was missing")
            return job


class TestMissingKeysPass(Broken):
    class Worker(ReferenceWorkerHandle):
        def load(self, plans: Plans) -> TransferJobState:
            job = super().load(plans)
            if job.completed_keys:
                job.failed_keys.clear()
                job.complete()
            return job


class TestForgetsToEndAnEmptyJob(Broken):
    class Worker(ReferenceWorkerHandle):
        def load(self, plans: Plans) -> TransferJobState:
            return super().load(plans) if len(plans) else TransferJobState(plans)


class TestStoresABatchByItsFirstBlock(Broken):
    class Worker(ReferenceWorkerHandle):
        def store(self, plans: Plans) -> TransferJobState:
            first = plans[0].block_id if len(plans) else 0
            job = super().store([replace(plan, block_id=first) for plan in plans])
            job.plans = plans
            return job


class TestStoresThroughThePlansOfTheMoment(Broken):
    """A store that reads its blocks when it is published."""

    class Worker(ReferenceWorkerHandle):
        def publish(self, job: TransferJobState) -> None:
            for key in self._stores.get(job, ()):
                self._shelf.written.pop(key, None)
            if self._stores.get(job):
                self._stores[job] = self._stores.pop(super().store(job.plans))
            super().publish(job)


class TestMixesRanks(Broken):
    class Worker(ReferenceWorkerHandle):
        def load(self, plans: Plans) -> TransferJobState:
            job = super().load([replace(plan, key=plan.key.replace(":tp1:", ":tp0:")) for plan in plans])
            job.completed_keys = {k.replace(":tp0:", self._own) for k in job.completed_keys}
            job.failed_keys = {k.replace(":tp0:", self._own) for k in job.failed_keys}
            job.plans = plans
            job.__dict__.pop("keys", None)
            return job

        @property
        def _own(self) -> str:
            return f":tp{self._topology.tp_rank}:"


class TestClearsEveryNamespace(Broken):
    class Scheduler(ReferenceSchedulerHandle):
        def clear(self) -> bool:
            self._shelf.objects.clear()
            self._shelf.written.clear()
            return True


class TestClearsNothing(Broken):
    class Scheduler(ReferenceSchedulerHandle):
        def clear(self) -> bool:
            return True


class TestPublishesWhatAClearHasTaken(Broken):
    class Scheduler(ReferenceSchedulerHandle):
        def clear(self) -> bool:
            kept = dict(self._shelf.written)
            cleared = super().clear()
            self._shelf.written.update(kept)
            return cleared


class TestTakesHalfARegistration(Broken):
    class Worker(ReferenceWorkerHandle):
        def register_buffers(self, kv_caches: Mapping[str, TensorLike]) -> None:
            missing = {region.layer_name for region in self._planner.regions} - kv_caches.keys()
            old = {name: self._buffers[name] for name in missing if name in self._buffers}
            super().register_buffers({**kv_caches, **old})
            if missing:
                raise ValueError("incomplete")


class TestKeepsTheFirstBuffers(Broken):
    class Worker(ReferenceWorkerHandle):
        def register_buffers(self, kv_caches: Mapping[str, TensorLike]) -> None:
            if not self._buffers:
                super().register_buffers(kv_caches)


class TestWorksOnWhenClosed(Broken):
    class Worker(ReferenceWorkerHandle):
        def close(self) -> None:
            pass


class TestAnswersWhenClosed(Broken):
    class Scheduler(ReferenceSchedulerHandle):
        def close(self) -> None:
            pass


class TestStopsAtTheFirstAbsence(Broken):
    class Scheduler(ReferenceSchedulerHandle):
        def present_raw(self, group_id: int, block_hashes: Sequence[bytes]) -> list[bool]:
            leading = self.lookup_raw(group_id, block_hashes)
            return [block < leading for block in range(len(block_hashes))]

        def lookup_raw(self, group_id: int, block_hashes: Sequence[bytes]) -> int:
            hits = super().present_raw(group_id, block_hashes)
            return hits.index(False) if False in hits else len(hits)


class TestHoldsNothing(Broken):
    class Scheduler(ReferenceSchedulerHandle):
        def hold(self, request_id: str, keys: Sequence[str]) -> int:
            count = super().hold(request_id, keys)
            super().unhold(request_id)
            return count


class TestHoldsPastAHole(Broken):
    class Scheduler(ReferenceSchedulerHandle):
        def hold(self, request_id: str, keys: Sequence[str]) -> int:
            return super().hold(request_id, [key for key in keys if key in self._shelf.objects])


class TestGivesBackForEverybody(Broken):
    class Scheduler(ReferenceSchedulerHandle):
        def unhold(self, request_id: str) -> None:
            self._shelf.holds.clear()


class TestNeverGivesBack(Broken):
    class Scheduler(ReferenceSchedulerHandle):
        def unhold(self, request_id: str) -> None:
            pass


class TestAsksOneRankOnly(Broken):
    class Scheduler(ReferenceSchedulerHandle):
        def _keys(self, group_id: int, block_hash: bytes) -> list[str]:
            return super()._keys(group_id, block_hash)[:1]


class TestIsBoundFromBirth(Broken):
    class Scheduler(ReferenceSchedulerHandle):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self._is_bound = True


class TestTellsEvictionsTwice(Broken):
    class Scheduler(ReferenceSchedulerHandle):
        def take_evicted_keys(self) -> list[str]:
            gone = super().take_evicted_keys()
            return gone + gone


class TestTellsLossesTwice(Broken):
    class Scheduler(ReferenceSchedulerHandle):
        def take_lost(self) -> list[tuple[int, bytes]]:
            lost = super().take_lost()
            return lost + lost


class TestWatchesWhatIsNotThere(Broken):
    class Scheduler(ReferenceSchedulerHandle):
        def watch(self, group_id: int, block_hashes: Sequence[bytes]) -> list[bool]:
            super().watch(group_id, block_hashes)
            return [True] * len(block_hashes)


class TestGoesOnWatchingWhatIsLost(Broken):
    class Scheduler(ReferenceSchedulerHandle):
        def take_lost(self) -> list[tuple[int, bytes]]:
            lost = super().take_lost()
            self._watched.update(dict.fromkeys(self.seen))
            self.seen = [*self.seen, *lost]
            return lost

        seen: Sequence[tuple[int, bytes]] = ()


class TestTakesWhatIsWrittenForMissing(Broken):
    class Scheduler(ReferenceSchedulerHandle):
        def lookup_states(self, keys: Sequence[str]) -> list[LookupState]:
            states = super().lookup_states(keys)
            return [LookupState.MISS if s is LookupState.PENDING else s for s in states]


class TestReportsMoreThanItKeeps(Broken):
    class Worker(ReferenceWorkerHandle):
        def store(self, plans: Plans) -> TransferJobState:
            job = super().store(plans)
            if job.completed_keys:
                job.failed_keys.clear()
                job.complete()
            return job


class TestBoastsOfWhatItHasNot(Broken):
    class Worker(ReferenceWorkerHandle):
        usage = None  # type: ignore[assignment]
