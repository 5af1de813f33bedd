"""What becomes of bytes: round trips, ranks, namespaces, buffers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from umbp.testing.rig import KINDS, Rig, Shape, hashes
from umbp.testing.rules.support import ContractSupport

SHAPES = {
    "plain": Shape(),
    "with gaps": Shape(gap_bytes=192),
    "split blocks": Shape(block_bytes=1024, pieces=4),
    "odd sizes": Shape(layers=5, block_bytes=72),
}


class ContentContract(ContractSupport):
    """Bytes come back as they were, to whom they belong."""

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

    def test_each_rank_loads_its_own_bytes(self, make_rig: Callable[..., Rig]) -> None:
        self.needs_objects()
        rig = self.rig_of(make_rig, 2)
        chain = hashes(4)
        contents = [[rank.read(block) for block in range(4)] for rank in rig.ranks]
        assert (contents[0] == contents[1]) == (self.kv_tp_replicas == 2)
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
