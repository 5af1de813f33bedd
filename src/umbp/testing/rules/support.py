"""What the tests of the contract share: a backend's flags and fixture, and the words they are written in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import ClassVar

import pytest

from umbp.data import TransferJobState, TransferJobStatus
from umbp.errors import UMBPError
from umbp.runtime.base import IUMBPRuntime
from umbp.testing.rig import RankRig, Rig, Shape, hashes

_numbers = count()


class ContractSupport:
    """The flags that a backend sets, its fixture, and what the tests are made of."""

    stores_nothing: ClassVar[bool] = False
    """All stores are refused: nothing is ever there."""
    may_fail: ClassVar[bool] = False
    """Keys may fail, publishes may raise and hits may be told as misses, each for no reason."""
    capacity_objects: ClassVar[int | None] = None
    """How many objects of one rank fit at most, where that is few enough to fill; else pressure isn't tested.
    """
    tp_sizes: ClassVar[tuple[int, ...]] = (1, 2)
    kv_tp_replicas: ClassVar[int] = 1
    """2: both ranks hold the same KV where there are two. What one has stored the other may find."""
    kill: ClassVar[Callable[[IUMBPRuntime], None] | None] = None
    """Makes the backend answer nobody from now on, where that can be done."""

    @pytest.fixture
    def runtime(self) -> IUMBPRuntime:
        raise NotImplementedError("give a fixture `runtime`")

    @pytest.fixture
    def scheduler_runtime(self, runtime: IUMBPRuntime) -> IUMBPRuntime:
        """The scheduler process's own instance, where one can't serve both sides."""
        return runtime

    @pytest.fixture
    def make_rig(
        self, runtime: IUMBPRuntime, scheduler_runtime: IUMBPRuntime
    ) -> Iterator[Callable[..., Rig]]:
        rigs: list[Rig] = []

        def make(tp_size: int = 1, shape: Shape | None = None) -> Rig:
            name, replicas = f"contract-{next(_numbers)}", self.kv_tp_replicas if tp_size > 1 else 1
            rigs.append(Rig(runtime, name, tp_size, shape, scheduler_runtime, replicas))
            return rigs[-1]

        yield make
        for rig in rigs:
            rig.close()

    @pytest.fixture
    def rig(self, make_rig: Callable[..., Rig]) -> Rig:
        return make_rig()

    def finished(self, rank: RankRig, job: TransferJobState) -> TransferJobState:
        """The job after `wait`: final, each key with one outcome."""
        assert rank.worker.wait(job) is job
        assert job.status.is_final
        if job.status is not TransferJobStatus.CANCELLED:
            assert job.completed_keys | job.failed_keys == job.keys
            assert not job.completed_keys & job.failed_keys
            assert job.status == ("failed" if job.failed_keys else "completed")
        return job

    def published(self, rank: RankRig, job: TransferJobState) -> set[str]:
        """The keys that lookups may see now."""
        try:
            rank.worker.publish(job)
        except UMBPError:
            assert self.may_fail
            return set()
        return set(job.completed_keys)

    def put(
        self, rig: Rig, chain: Sequence[bytes], block_ids: Sequence[int] | None = None, kind: str = "batch"
    ) -> set[str]:
        """Store and publish on all ranks; the keys that are there now."""
        there: set[str] = set()
        for rank in rig.ranks:
            plans = rank.store_plans(kind, chain, range(len(chain)) if block_ids is None else block_ids)
            job = self.finished(rank, rank.worker.store(plans))
            self.expect(job, set() if self.stores_nothing else job.keys)
            there |= self.published(rank, job)
        return there

    def expect(self, job: TransferJobState, keys: set[str] | frozenset[str]) -> None:
        """These keys of the job have moved, all of them unless the runtime may fail."""
        assert job.completed_keys <= keys
        if not self.may_fail:
            assert job.completed_keys == keys

    def expect_hits(self, rig: Rig, keys: Sequence[str], there: set[str]) -> None:
        """A lookup of `keys` finds those that are there, no others but what other ranks have alike."""
        hits = list(rig.scheduler.lookup(keys))
        assert len(hits) == len(keys)
        found = {key for key, hit in zip(keys, hits, strict=True) if hit}
        assert found <= rig.alike(there)
        if not self.may_fail:
            assert found >= there & set(keys)

    def needs_objects(self) -> None:
        if self.stores_nothing:
            pytest.skip("the runtime stores nothing")

    def needs_certainty(self) -> None:
        self.needs_objects()
        if self.may_fail:
            pytest.skip("the runtime may fail for no reason, so this can't be told from a fault")

    def needs(self, rig: Rig, capability: str) -> None:
        if not getattr(rig.capabilities, capability):
            pytest.skip(f"the runtime doesn't state the capability {capability}")

    def rig_of(self, make_rig: Callable[..., Rig], tp_size: int) -> Rig:
        if tp_size not in self.tp_sizes:
            pytest.skip(f"the runtime doesn't serve {tp_size} ranks")
        return make_rig(tp_size)

    def needs_a_capacity(self) -> int:
        if self.capacity_objects is None:
            pytest.skip("the runtime's room isn't stated")
        return self.capacity_objects

    def press(self, rig: Rig, count: int, salt: str = "pressure") -> None:
        """Store so many other objects, one by one; each may be refused."""
        (rank,) = rig.ranks
        for block_hash in hashes(count, salt):
            plans = rank.store_plans("batch", [block_hash], [0])
            self.published(rank, self.finished(rank, rank.worker.store(plans)))
