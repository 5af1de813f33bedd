"""The runtime contract as tests. A backend's test is a class and a fixture:

    class TestMyRuntime(RuntimeContract):
        @pytest.fixture
        def runtime(self):
            yield MyRuntime(...)

The flags below say what a backend can't do by nature; a test that doesn't apply skips with a sentence.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import ClassVar, cast

import pytest

from umbp.data import TransferJobState, TransferJobStatus
from umbp.errors import UMBPError
from umbp.runtime import base
from umbp.runtime.base import Capabilities, IUMBPRuntime, LookupState, capabilities_of
from umbp.testing.rig import KINDS, RankRig, Rig, Shape, hashes

_numbers = count()

SHAPES = {
    "plain": Shape(),
    "with gaps": Shape(gap_bytes=192),
    "split blocks": Shape(block_bytes=1024, pieces=4),
    "odd sizes": Shape(layers=5, block_bytes=72),
}


class RuntimeContract:
    """Every sentence of `umbp.runtime.base`. The fixture `runtime` gives a fresh runtime for each test."""

    stores_nothing: ClassVar[bool] = False
    """All stores are refused: nothing is ever there."""
    may_fail: ClassVar[bool] = False
    """Keys may fail, publishes may raise and hits may be told as misses, each for no reason."""
    capacity_objects: ClassVar[int | None] = None
    """How many objects of one rank fit at most, where that is few enough to fill; else pressure isn't tested.
    """
    tp_sizes: ClassVar[tuple[int, ...]] = (1, 2)
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
            rigs.append(Rig(runtime, f"contract-{next(_numbers)}", tp_size, shape, scheduler_runtime))
            return rigs[-1]

        yield make
        for rig in rigs:
            rig.close()

    @pytest.fixture
    def rig(self, make_rig: Callable[..., Rig]) -> Rig:
        return make_rig()

    # --- what the tests below are made of

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
        """A lookup of `keys` finds those that are there, no others."""
        hits = list(rig.scheduler.lookup(keys))
        assert len(hits) == len(keys)
        found = {key for key, hit in zip(keys, hits, strict=True) if hit}
        assert found <= there
        if not self.may_fail:
            assert found == there & set(keys)

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

    # --- shape of the interface

    def test_handles_have_the_verbs_of_the_contract_and_of_every_stated_capability(self, rig: Rig) -> None:
        assert isinstance(rig.scheduler, base.UMBPSchedulerHandle)
        assert isinstance(rig.ranks[0].worker, base.UMBPWorkerHandle)
        stated: Capabilities = rig.capabilities
        scheduler_extras = [
            (stated.hold, base.SupportsHold),
            (stated.lookup_raw, base.SupportsRawLookup),
            (stated.hold and stated.lookup_raw, base.SupportsRawHold),
            (stated.lookup_states, base.SupportsLookupStates),
            (stated.note, base.SupportsNote),
            (stated.evicted_keys, base.SupportsEvictedKeys),
            (stated.attach, base.SupportsAttach),
        ]
        worker_extras = [
            (stated.attach, base.SupportsHandshakeExtra),
            (stated.cancel, base.SupportsCancel),
            (stated.usage, base.SupportsUsage),
        ]
        for handle, extras in ((rig.scheduler, scheduler_extras), (rig.ranks[0].worker, worker_extras)):
            for is_stated, protocol in extras:
                assert not is_stated or isinstance(handle, protocol), protocol

    def test_capabilities_are_data(self, runtime: IUMBPRuntime) -> None:
        assert isinstance(capabilities_of(runtime), Capabilities)

    # --- lookups

    @pytest.mark.parametrize("tp_size", [1, 2])
    def test_a_lookup_answers_in_order_and_as_long_as_the_keys(
        self, make_rig: Callable[..., Rig], tp_size: int
    ) -> None:
        rig = self.rig_of(make_rig, tp_size)
        chain, absent = hashes(6), hashes(6, "absent")
        there = self.put(rig, chain)
        mixed = [h for pair in zip(absent, chain, strict=True) for h in pair]
        self.expect_hits(rig, rig.keys(mixed), there)
        self.expect_hits(rig, rig.keys(mixed[::-1]), there)
        self.expect_hits(rig, rig.keys([chain[0], chain[0], absent[0], chain[0]]), there)

    def test_a_lookup_of_nothing_answers_nothing(self, rig: Rig) -> None:
        assert list(rig.scheduler.lookup([])) == []

    def test_nothing_is_there_at_first(self, rig: Rig) -> None:
        self.expect_hits(rig, rig.keys(hashes(8)), set())

    def test_a_lookup_of_keys_that_are_not_ours_misses(self, rig: Rig) -> None:
        self.put(rig, hashes(2))
        other = rig.keys(hashes(2))[0].replace(str(rig.namespace), "another")
        assert list(rig.scheduler.lookup(["", "k", other, "umbp:vllm:v1:::::"])) == [False] * 4

    def test_what_is_stored_is_invisible_until_it_is_published(self, rig: Rig) -> None:
        chain, (rank,) = hashes(4), rig.ranks
        job = rank.worker.store(rank.store_plans("batch", chain, range(4)))
        self.expect_hits(rig, rank.keys(chain), set())
        self.finished(rank, job)
        self.expect_hits(rig, rank.keys(chain), set())
        assert rank.worker.poll(job) is job
        self.expect_hits(rig, rank.keys(chain), set())
        self.expect_hits(rig, rank.keys(chain), self.published(rank, job))

    def test_every_scheduler_of_a_namespace_sees_the_same(self, rig: Rig) -> None:
        chain = hashes(3)
        there = self.put(rig, chain)
        rig.scheduler = rig.new_scheduler()
        self.expect_hits(rig, rig.keys(chain), there)

    # --- publishing

    def test_publish_refuses_a_load(self, rig: Rig) -> None:
        chain, (rank,) = hashes(2), rig.ranks
        self.put(rig, chain)
        job = self.finished(rank, rank.worker.load(rank.load_plans("batch", chain, [2, 3])))
        with pytest.raises(ValueError, match=r"\S"):
            rank.worker.publish(job)

    def test_publish_refuses_a_job_of_nobody(self, rig: Rig) -> None:
        (rank,) = rig.ranks
        stranger = TransferJobState(rank.store_plans("batch", hashes(2), range(2)))
        stranger.complete()
        with pytest.raises(ValueError, match=r"\S"):
            rank.worker.publish(stranger)
        self.expect_hits(rig, rank.keys(hashes(2)), set())

    def test_publishing_twice_is_publishing_once(self, rig: Rig) -> None:
        chain, (rank,) = hashes(3), rig.ranks
        job = self.finished(rank, rank.worker.store(rank.store_plans("batch", chain, range(3))))
        there = self.published(rank, job) | self.published(rank, job)
        self.expect_hits(rig, rank.keys(chain), there)

    # --- jobs

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_job_about_nothing_is_complete(self, rig: Rig, kind: str) -> None:
        (rank,) = rig.ranks
        for job in (
            rank.worker.store(rank.store_plans(kind, [], [])),
            rank.worker.load(rank.load_plans(kind, [], [])),
        ):
            assert self.finished(rank, job).status == "completed"

    def test_poll_tells_the_end_of_a_job_and_never_before(self, rig: Rig) -> None:
        chain, (rank,) = hashes(4), rig.ranks
        job = rank.worker.store(rank.store_plans("batch", chain, range(4)))
        deadline = time.monotonic() + 30
        while (told := rank.worker.poll(job)) is None:
            assert time.monotonic() < deadline, "poll never tells the end of the job"
        assert told is job
        assert job.status.is_final
        self.finished(rank, job)
        assert rank.worker.poll(job) is job

    def test_waiting_twice_is_waiting_once(self, rig: Rig) -> None:
        chain, (rank,) = hashes(4), rig.ranks
        job = self.finished(rank, rank.worker.store(rank.store_plans("batch", chain, range(4))))
        outcome = (set(job.completed_keys), set(job.failed_keys), job.error)
        self.finished(rank, job)
        assert (job.completed_keys, job.failed_keys, job.error) == outcome

    def test_jobs_may_be_waited_for_in_any_order(self, rig: Rig) -> None:
        chain, (rank,) = hashes(4), rig.ranks
        jobs = [rank.worker.store(rank.store_plans("batch", [h], [n])) for n, h in enumerate(chain)]
        there: set[str] = set()
        for job in reversed(jobs):
            there |= self.published(rank, self.finished(rank, job))
        self.expect_hits(rig, rank.keys(chain), there)

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_missing_key_fails_only_itself(self, rig: Rig, kind: str) -> None:
        self.needs_objects()
        chain, (rank,) = hashes(4), rig.ranks
        content = {key: rank.read(block) for block, key in enumerate(rank.keys(chain))}
        there = self.put(rig, chain)
        asked = [chain[2], hashes(1, "absent")[0], chain[0], chain[3]]
        targets = [8, 9, 10, 11]
        rank.scrub(targets)
        job = self.finished(rank, rank.worker.load(rank.load_plans(kind, asked, targets)))
        self.expect(job, there & set(rank.keys(asked)))
        assert rank.keys(asked)[1] in job.failed_keys
        assert 9 in job.failed_block_ids
        for key, target in zip(rank.keys(asked), targets, strict=True):
            if key in job.completed_keys:
                assert rank.read(target) == content[key]

    def test_a_load_of_nothing_but_missing_keys_fails_them_all(self, rig: Rig) -> None:
        (rank,) = rig.ranks
        job = self.finished(rank, rank.worker.load(rank.load_plans("batch", hashes(3), range(3))))
        assert job.failed_keys == job.keys
        assert job.failed_block_ids == {0, 1, 2}
        assert job.status == "failed"

    # --- bytes

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("shape", SHAPES)
    def test_bytes_come_back_as_they_were_and_no_others_are_touched(
        self, make_rig: Callable[..., Rig], kind: str, shape: str
    ) -> None:
        self.needs_objects()
        rig = make_rig(1, SHAPES[shape])
        chain, (rank,) = hashes(5), rig.ranks
        sources, targets = [0, 3, 7, 8, 15], [14, 1, 9, 2, 4]
        content = {key: rank.read(b) for key, b in zip(rank.keys(chain), sources, strict=True)}
        before = rank.image()
        there = self.put(rig, chain, sources, kind)
        assert rank.image() == before
        rank.scrub(targets)
        around = rank.image(without_blocks=targets)
        job = self.finished(rank, rank.worker.load(rank.load_plans(kind, chain, targets)))
        self.expect(job, there)
        for key, target in zip(rank.keys(chain), targets, strict=True):
            if key in job.completed_keys:
                assert rank.read(target) == content[key]
        assert rank.image(without_blocks=targets) == around

    @pytest.mark.parametrize("store_kind", KINDS)
    def test_every_form_of_store_can_be_loaded_in_every_form(self, rig: Rig, store_kind: str) -> None:
        self.needs_objects()
        chain, (rank,) = hashes(3), rig.ranks
        content = [rank.read(block) for block in range(3)]
        there = self.put(rig, chain, kind=store_kind)
        for load_kind in KINDS:
            rank.scrub([8, 9, 10])
            job = self.finished(rank, rank.worker.load(rank.load_plans(load_kind, chain, [8, 9, 10])))
            self.expect(job, there)
            for key, target, expected in zip(rank.keys(chain), [8, 9, 10], content, strict=True):
                assert key not in job.completed_keys or rank.read(target) == expected

    def test_a_large_batch_moves_whole(self, make_rig: Callable[..., Rig]) -> None:
        self.needs_objects()
        shape = Shape(layers=2, blocks=1200, block_bytes=64)
        rig = make_rig(1, shape)
        chain, (rank,) = hashes(600), rig.ranks
        content = {key: rank.read(block) for block, key in enumerate(rank.keys(chain))}
        if self.capacity_objects is not None and self.capacity_objects < 600:
            pytest.skip("the runtime is too small for 600 objects")
        there = self.put(rig, chain)
        rank.scrub(range(600, 1200))
        job = self.finished(rank, rank.worker.load(rank.load_plans("batch", chain, range(600, 1200))))
        self.expect(job, there)
        for target, key in enumerate(rank.keys(chain), 600):
            if key in job.completed_keys:
                assert rank.read(target) == content[key]

    def test_a_stored_object_keeps_its_bytes_when_the_block_is_reused(self, rig: Rig) -> None:
        self.needs_objects()
        chain, (rank,) = hashes(2), rig.ranks
        content = [rank.read(0), rank.read(1)]
        self.put(rig, chain)
        rank.scrub([0, 1])
        job = self.finished(rank, rank.worker.load(rank.load_plans("batch", chain, [0, 1])))
        for block, key in enumerate(rank.keys(chain)):
            assert key not in job.completed_keys or rank.read(block) == content[block]

    def test_a_key_twice_in_a_batch_is_one_object(self, rig: Rig) -> None:
        self.needs_objects()
        (one, two), (rank,) = hashes(2), rig.ranks
        content = rank.read(0)
        # Equal hashes promise equal content, so both source blocks hold the same.
        there = self.put(rig, [one, two, one], [0, 1, 0])
        self.expect_hits(rig, rank.keys([one, two]), there)
        rank.scrub([8, 9, 10])
        job = self.finished(rank, rank.worker.load(rank.load_plans("batch", [one, two, one], [8, 9, 10])))
        if rank.keys([one])[0] in job.completed_keys:
            assert rank.read(8) == rank.read(10) == content

    def test_storing_again_what_is_there_changes_nothing(self, rig: Rig) -> None:
        self.needs_objects()
        chain, (rank,) = hashes(3), rig.ranks
        content = [rank.read(block) for block in range(3)]
        there = self.put(rig, chain)
        there |= self.put(rig, chain)
        self.expect_hits(rig, rank.keys(chain), there)
        rank.scrub([8, 9, 10])
        job = self.finished(rank, rank.worker.load(rank.load_plans("batch", chain, [8, 9, 10])))
        for number, key in enumerate(rank.keys(chain)):
            assert key not in job.completed_keys or rank.read(8 + number) == content[number]

    # --- ranks and namespaces

    def rig_of(self, make_rig: Callable[..., Rig], tp_size: int) -> Rig:
        if tp_size not in self.tp_sizes:
            pytest.skip(f"the runtime doesn't serve {tp_size} ranks")
        return make_rig(tp_size)

    def test_each_rank_loads_its_own_bytes(self, make_rig: Callable[..., Rig]) -> None:
        self.needs_objects()
        rig = self.rig_of(make_rig, 2)
        chain = hashes(4)
        contents = [[rank.read(block) for block in range(4)] for rank in rig.ranks]
        assert contents[0] != contents[1]
        there = self.put(rig, chain)
        self.expect_hits(rig, rig.keys(chain), there)
        for rank, content in zip(rig.ranks, contents, strict=True):
            rank.scrub(range(8, 12))
            job = self.finished(rank, rank.worker.load(rank.load_plans("batch", chain, range(8, 12))))
            self.expect(job, there & set(rank.keys(chain)))
            for number, key in enumerate(rank.keys(chain)):
                assert key not in job.completed_keys or rank.read(8 + number) == content[number]

    def test_what_one_rank_stored_is_not_there_for_the_other(self, make_rig: Callable[..., Rig]) -> None:
        rig = self.rig_of(make_rig, 2)
        chain, first = hashes(3), rig.ranks[0]
        job = self.finished(first, first.worker.store(first.store_plans("batch", chain, range(3))))
        self.expect_hits(rig, rig.keys(chain), self.published(first, job))

    def test_namespaces_never_meet(self, make_rig: Callable[..., Rig]) -> None:
        one, other, chain = make_rig(), make_rig(), hashes(3)
        there = self.put(one, chain)
        self.expect_hits(other, other.keys(chain), set())
        (rank,) = other.ranks
        job = self.finished(rank, rank.worker.load(rank.load_plans("batch", chain, range(3))))
        assert job.failed_keys == job.keys
        self.expect_hits(one, one.keys(chain), there)

    def test_clear_removes_its_own_namespace_on_all_ranks_and_no_other(
        self, make_rig: Callable[..., Rig]
    ) -> None:
        tp_size = max(self.tp_sizes)
        one, other = make_rig(tp_size), make_rig(tp_size)
        chain = hashes(3)
        self.put(one, chain)
        there = self.put(other, chain)
        assert one.scheduler.clear() is True
        self.expect_hits(one, one.keys(chain), set())
        self.expect_hits(other, other.keys(chain), there)
        for rank in one.ranks:
            job = self.finished(rank, rank.worker.load(rank.load_plans("batch", chain, range(3))))
            assert job.failed_keys == job.keys
        self.expect_hits(one, one.keys(chain), self.put(one, chain))

    def test_what_was_stored_before_a_clear_is_not_there_after_it(self, rig: Rig) -> None:
        chain, (rank,) = hashes(3), rig.ranks
        job = self.finished(rank, rank.worker.store(rank.store_plans("batch", chain, range(3))))
        assert rig.scheduler.clear() is True
        self.published(rank, job)
        self.expect_hits(rig, rank.keys(chain), set())
        self.expect_hits(rig, rank.keys(chain), self.put(rig, chain))

    # --- buffers

    def test_buffers_that_are_registered_anew_are_the_ones_used(self, rig: Rig) -> None:
        self.needs_objects()
        chain, (rank,) = hashes(2), rig.ranks
        content = [rank.read(0), rank.read(1)]
        there = self.put(rig, chain)
        old = rank.caches
        before = {name: cache.array.copy() for name, cache in old.items()}
        rank.use_memory(rig.shape.memory(seed=99))
        job = self.finished(rank, rank.worker.load(rank.load_plans("batch", chain, [4, 5])))
        self.expect(job, there)
        for number, key in enumerate(rank.keys(chain)):
            assert key not in job.completed_keys or rank.read(4 + number) == content[number]
        for name, cache in old.items():
            assert (cache.array == before[name]).all()

    def test_registering_the_same_buffers_twice_changes_nothing(self, rig: Rig) -> None:
        chain, (rank,) = hashes(2), rig.ranks
        there = self.put(rig, chain)
        rank.use_memory(rank.caches)
        job = self.finished(rank, rank.worker.load(rank.load_plans("batch", chain, [4, 5])))
        self.expect(job, there)

    def test_a_registration_that_fails_leaves_the_last_one(self, rig: Rig) -> None:
        self.needs_objects()
        chain, (rank,) = hashes(2), rig.ranks
        content = [rank.read(0), rank.read(1)]
        incomplete = dict(rig.shape.memory(seed=99))
        incomplete.popitem()
        with pytest.raises(ValueError, match=r"\S"):
            rank.worker.register_buffers(incomplete)
        there = self.put(rig, chain)
        job = self.finished(rank, rank.worker.load(rank.load_plans("batch", chain, [4, 5])))
        self.expect(job, there)
        for number, key in enumerate(rank.keys(chain)):
            assert key not in job.completed_keys or rank.read(4 + number) == content[number]

    # --- ends

    def test_a_closed_worker_fails_every_key(self, rig: Rig) -> None:
        chain, (rank,) = hashes(3), rig.ranks
        self.put(rig, chain)
        rank.worker.close()
        rank.worker.close()
        before = rank.image()
        for job in (
            rank.worker.load(rank.load_plans("batch", chain, range(3))),
            rank.worker.store(rank.store_plans("batch", hashes(3, "new"), range(3))),
        ):
            assert self.finished(rank, job).failed_keys == job.keys
        assert rank.image() == before

    def test_closing_a_worker_abandons_what_it_has_not_published(self, rig: Rig) -> None:
        chain, (rank,) = hashes(3), rig.ranks
        self.finished(rank, rank.worker.store(rank.store_plans("batch", chain, range(3))))
        rank.worker.close()
        self.expect_hits(rig, rank.keys(chain), set())

    def test_a_closed_scheduler_misses_and_refuses(self, rig: Rig) -> None:
        chain = hashes(3)
        self.put(rig, chain)
        rig.scheduler.close()
        rig.scheduler.close()
        assert list(rig.scheduler.lookup(rig.keys(chain))) == [False] * 3
        rig.scheduler.clear()
        if rig.capabilities.hold:
            holder = cast(base.SupportsHold, rig.scheduler)
            assert holder.hold("r", rig.keys(chain)) == 0
            holder.unhold("r")
        if rig.capabilities.lookup_raw:
            assert cast(base.SupportsRawLookup, rig.scheduler).lookup_raw(0, chain) == 0

    def test_a_dead_backend_is_a_miss_and_a_failed_key(self, rig: Rig, runtime: IUMBPRuntime) -> None:
        kill = type(self).kill
        if kill is None:
            pytest.skip("the runtime has no backend that could die alone")
        chain, (rank,) = hashes(3), rig.ranks
        self.put(rig, chain)
        kill(runtime)
        assert list(rig.scheduler.lookup(rig.keys(chain))) == [False] * 3
        for job in (
            rank.worker.load(rank.load_plans("batch", chain, range(3))),
            rank.worker.store(rank.store_plans("batch", hashes(3, "new"), range(3))),
        ):
            assert self.finished(rank, job).failed_keys == job.keys
        assert rig.scheduler.clear() is False
        if rig.capabilities.hold:
            assert cast(base.SupportsHold, rig.scheduler).hold("r", rig.keys(chain)) == 0

    # --- room

    def test_a_full_pool_makes_room_or_refuses_and_never_lies(self, make_rig: Callable[..., Rig]) -> None:
        self.needs_certainty()
        capacity = self.needs_a_capacity()
        rig = make_rig(1, Shape(layers=1, blocks=capacity * 2, block_bytes=4096))
        chain, (rank,) = hashes(capacity * 2), rig.ranks
        content = {key: rank.read(block) for block, key in enumerate(rank.keys(chain))}
        there: set[str] = set()
        for number, block_hash in enumerate(chain):
            plans = rank.store_plans("batch", [block_hash], [number])
            there |= self.published(rank, self.finished(rank, rank.worker.store(plans)))
        hits = [key for key, hit in zip(content, rig.scheduler.lookup(list(content)), strict=True) if hit]
        assert set(hits) <= there
        assert 0 < len(hits) <= capacity
        for key, block_hash in zip(content, chain, strict=True):
            job = self.finished(rank, rank.worker.load(rank.load_plans("batch", [block_hash], [0])))
            assert job.completed_keys == ({key} if key in hits else set())
            assert key not in hits or rank.read(0) == content[key]

    def test_a_batch_larger_than_the_pool_reports_no_more_than_it_keeps(
        self, make_rig: Callable[..., Rig]
    ) -> None:
        self.needs_certainty()
        capacity = self.needs_a_capacity()
        rig = make_rig(1, Shape(layers=1, blocks=capacity * 2, block_bytes=4096))
        chain, (rank,) = hashes(capacity * 2), rig.ranks
        job = self.finished(rank, rank.worker.store(rank.store_plans("batch", chain, range(len(chain)))))
        there = self.published(rank, job)
        assert 0 < len(there) <= capacity
        self.expect_hits(rig, rank.keys(chain), there)

    def needs_a_capacity(self) -> int:
        if self.capacity_objects is None:
            pytest.skip("the runtime's room isn't stated")
        return self.capacity_objects

    # --- hold

    def test_a_hold_is_the_present_run_at_the_start(self, rig: Rig) -> None:
        self.needs(rig, "hold")
        holder = cast(base.SupportsHold, rig.scheduler)
        chain = hashes(5)
        there = self.put(rig, [*chain[:2], *chain[3:]], [0, 1, 3, 4])
        held = holder.hold("r", rig.keys(chain))
        assert held <= (2 if there else 0)
        assert self.may_fail or self.stores_nothing or held == 2
        assert holder.hold("r", rig.keys(chain[2:])) == 0
        assert holder.hold("other", []) == 0
        holder.unhold("r")

    def test_giving_back_what_was_never_held_is_no_error(self, rig: Rig) -> None:
        self.needs(rig, "hold")
        holder = cast(base.SupportsHold, rig.scheduler)
        holder.unhold("nobody")
        self.put(rig, hashes(1))
        holder.hold("r", rig.keys(hashes(1)))
        holder.unhold("r")
        holder.unhold("r")

    def test_held_objects_survive_any_pressure_and_go_when_given_back(
        self, make_rig: Callable[..., Rig]
    ) -> None:
        self.needs_certainty()
        capacity = self.needs_a_capacity()
        rig = make_rig(1, Shape(layers=1, blocks=capacity * 4, block_bytes=4096))
        self.needs(rig, "hold")
        holder = cast(base.SupportsHold, rig.scheduler)
        (rank,) = rig.ranks
        kept = hashes(max(capacity // 2, 1), "kept")
        content = {key: rank.read(block) for block, key in enumerate(rank.keys(kept))}
        self.put(rig, kept)
        assert holder.hold("one", rig.keys(kept)) == len(kept)
        assert holder.hold("two", rig.keys(kept)) == len(kept)
        self.press(rig, capacity * 2)
        assert all(rig.scheduler.lookup(rig.keys(kept)))
        holder.unhold("one")
        self.press(rig, capacity * 2, "again")
        assert all(rig.scheduler.lookup(rig.keys(kept))), "one of two holders gave back, and the objects went"
        job = self.finished(rank, rank.worker.load(rank.load_plans("batch", kept, range(len(kept)))))
        assert job.status == "completed"
        assert [rank.read(block) for block in range(len(kept))] == list(content.values())
        holder.unhold("two")
        self.press(rig, capacity * 2, "a third time")
        assert not all(rig.scheduler.lookup(rig.keys(kept)))

    def press(self, rig: Rig, count: int, salt: str = "pressure") -> None:
        """Store so many other objects, one by one; each may be refused."""
        (rank,) = rig.ranks
        for block_hash in hashes(count, salt):
            plans = rank.store_plans("batch", [block_hash], [0])
            self.published(rank, self.finished(rank, rank.worker.store(plans)))

    # --- the other extras

    @pytest.mark.parametrize("tp_size", [1, 2])
    def test_a_raw_lookup_counts_the_blocks_that_all_ranks_have(
        self, make_rig: Callable[..., Rig], tp_size: int
    ) -> None:
        rig = self.rig_of(make_rig, tp_size)
        self.needs(rig, "lookup_raw")
        by_hash = cast(base.SupportsRawLookup, rig.scheduler)
        chain = hashes(6)
        assert by_hash.lookup_raw(0, chain) == 0
        assert by_hash.lookup_raw(0, []) == 0
        self.put(rig, [*chain[:3], *chain[4:]], [0, 1, 2, 4, 5])
        assert by_hash.lookup_raw(7, chain) == 0
        self.needs_certainty()
        assert by_hash.lookup_raw(0, chain) == 3
        assert by_hash.lookup_raw(0, chain[4:]) == 2
        last = rig.ranks[-1]
        job = self.finished(last, last.worker.store(last.store_plans("batch", [chain[3]], [3])))
        self.published(last, job)
        assert by_hash.lookup_raw(0, chain) == (6 if tp_size == 1 else 3)

    @pytest.mark.parametrize("tp_size", [1, 2])
    def test_a_raw_hold_is_a_hold_on_all_ranks(self, make_rig: Callable[..., Rig], tp_size: int) -> None:
        rig = self.rig_of(make_rig, tp_size)
        self.needs(rig, "hold")
        self.needs(rig, "lookup_raw")
        holder = cast(base.SupportsRawHold, rig.scheduler)
        chain = hashes(4)
        self.put(rig, chain[:3])
        held = holder.hold_raw("r", 0, chain)
        assert held <= 3
        assert self.may_fail or held == (0 if self.stores_nothing else 3)
        cast(base.SupportsHold, rig.scheduler).unhold("r")

    def test_lookup_states_hit_where_lookups_hit(self, rig: Rig) -> None:
        self.needs(rig, "lookup_states")
        asker = cast(base.SupportsLookupStates, rig.scheduler)
        chain, (rank,) = hashes(4), rig.ranks
        there = self.put(rig, chain[:2])
        job = self.finished(rank, rank.worker.store(rank.store_plans("batch", chain[2:3], [2])))
        keys = rank.keys(chain)
        states = list(asker.lookup_states(keys))
        assert len(states) == 4
        assert {key for key, s in zip(keys, states, strict=True) if s is LookupState.HIT} <= there
        assert states[2] is (LookupState.PENDING if job.completed_keys else LookupState.MISS)
        assert states[3] is LookupState.MISS
        if not self.may_fail and not self.stores_nothing:
            assert states[:2] == [LookupState.HIT] * 2

    def test_a_note_changes_nothing_that_can_be_seen(self, rig: Rig) -> None:
        self.needs(rig, "note")
        advised = cast(base.SupportsNote, rig.scheduler)
        chain = hashes(4)
        there = self.put(rig, chain[:2])
        advised.note("r", "admit", chain)
        advised.note("r", "end", chain, output_tokens=17, finish="stop")
        advised.note("never admitted", "end", [], 0, "abort")
        self.expect_hits(rig, rig.keys(chain), there)

    def test_evicted_keys_are_told_once(self, rig: Rig) -> None:
        self.needs(rig, "evicted_keys")
        teller = cast(base.SupportsEvictedKeys, rig.scheduler)
        there = self.put(rig, hashes(3))
        assert list(teller.take_evicted_keys()) == []
        assert rig.scheduler.clear()
        assert sorted(teller.take_evicted_keys()) == sorted(there)
        assert list(teller.take_evicted_keys()) == []

    def test_an_unbound_scheduler_misses_everything(self, rig: Rig) -> None:
        self.needs(rig, "attach")
        chain = hashes(2)
        there = self.put(rig, chain)
        rig.scheduler = rig.new_scheduler(bind=False)
        self.expect_hits(rig, rig.keys(chain), set())
        rig.bind(rig.scheduler)
        self.expect_hits(rig, rig.keys(chain), there)
        rig.bind(rig.scheduler)
        self.expect_hits(rig, rig.keys(chain), there)

    def test_a_cancelled_job_ends_and_publishes_no_more_than_it_completed(self, rig: Rig) -> None:
        self.needs(rig, "cancel")
        chain, (rank,) = hashes(4), rig.ranks
        worker = cast(base.SupportsCancel, rank.worker)
        job = rank.worker.store(rank.store_plans("batch", chain, range(4)))
        worker.cancel(job)
        self.finished(rank, job)
        worker.cancel(job)
        self.expect_hits(rig, rank.keys(chain), self.published(rank, job))
        load = rank.worker.load(rank.load_plans("batch", chain, range(8, 12)))
        worker.cancel(load)
        self.finished(rank, load)

    def test_usage_counts_what_is_stored(self, rig: Rig) -> None:
        self.needs(rig, "usage")
        meter = cast(base.SupportsUsage, rig.ranks[0].worker)
        there = self.put(rig, hashes(3))
        usage = meter.usage()
        assert {"pool_capacity_bytes", "pool_used_bytes", "pool_objects", "pool_pinned_objects"} <= set(usage)
        assert usage["pool_objects"] == len(there)
        assert usage["pool_pinned_objects"] == 0
        assert usage["pool_used_bytes"] <= usage["pool_capacity_bytes"]
