"""What a pool does when it is full, and what the stated capabilities promise."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

import pytest

from umbp.runtime import base
from umbp.runtime.base import LookupState
from umbp.testing.rig import Rig, Shape, hashes
from umbp.testing.rules.support import ContractSupport


class ExtrasContract(ContractSupport):
    """Room, holds and the other extras."""

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
        for rank in rig.ranks:
            alone = hashes(3, f"only on {rank.topology.tp_rank}")
            job = self.finished(rank, rank.worker.store(rank.store_plans("batch", alone, range(3))))
            self.published(rank, job)
            found = by_hash.lookup_raw(0, alone)
            assert found == (3 if tp_size == 1 else 0) or (found == 3 and self.kv_tp_replicas == 2)

    @pytest.mark.parametrize("tp_size", [1, 2])
    def test_presence_is_told_of_each_block_by_itself_for_all_ranks(
        self, make_rig: Callable[..., Rig], tp_size: int
    ) -> None:
        rig = self.rig_of(make_rig, tp_size)
        self.needs(rig, "presence")
        by_hash = cast(base.SupportsPresence, rig.scheduler)
        chain = hashes(6)
        assert list(by_hash.present_raw(0, [])) == []
        assert list(by_hash.present_raw(0, chain)) == [False] * 6
        self.put(rig, [chain[1], chain[4]], [1, 4])
        assert list(by_hash.present_raw(7, chain)) == [False] * 6
        self.needs_certainty()
        assert list(by_hash.present_raw(0, chain)) == [block in (1, 4) for block in range(6)]
        assert list(by_hash.present_raw(0, [chain[4], chain[0], chain[4]])) == [True, False, True]
        for rank in rig.ranks:
            alone = hashes(2, f"only on {rank.topology.tp_rank}")
            job = self.finished(rank, rank.worker.store(rank.store_plans("batch", alone, range(2))))
            self.published(rank, job)
            present = list(by_hash.present_raw(0, alone))
            assert present == [tp_size == 1] * 2 or (all(present) and self.kv_tp_replicas == 2)

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
        keys = [*rank.keys(chain), "another's", ""]
        states = list(asker.lookup_states(keys))
        assert len(states) == 6
        assert {key for key, s in zip(keys, states, strict=True) if s is LookupState.HIT} <= there
        assert states[2] is (LookupState.PENDING if job.completed_keys else LookupState.MISS)
        assert states[3:] == [LookupState.MISS] * 3
        assert list(asker.lookup_states([])) == []
        if not self.may_fail and not self.stores_nothing:
            assert states[:2] == [LookupState.HIT] * 2

    def test_what_is_written_is_pending_until_it_is_published_or_given_up(self, rig: Rig) -> None:
        self.needs_certainty()
        self.needs(rig, "lookup_states")
        asker = cast(base.SupportsLookupStates, rig.scheduler)
        chain, (rank,) = hashes(3), rig.ranks
        keys = rank.keys(chain)
        job = self.finished(rank, rank.worker.store(rank.store_plans("batch", chain[:2], [0, 1])))
        pending, miss = LookupState.PENDING, LookupState.MISS
        assert list(asker.lookup_states(keys)) == [pending, pending, miss]
        self.published(rank, job)
        assert list(asker.lookup_states(keys)) == [LookupState.HIT, LookupState.HIT, miss]
        late = self.finished(rank, rank.worker.store(rank.store_plans("batch", chain[2:], [2])))
        assert asker.lookup_states(keys)[2] is pending
        assert rig.scheduler.clear()
        assert list(asker.lookup_states(keys)) == [miss] * 3, "what a clear has taken can't be published"
        rank.worker.publish(late)
        given_up = self.finished(rank, rank.worker.store(rank.store_plans("batch", chain[:1], [0])))
        assert asker.lookup_states(keys)[0] is pending
        rank.worker.close()
        assert list(asker.lookup_states(keys)) == [miss] * 3
        assert not given_up.failed_keys

    def test_a_note_changes_nothing_that_can_be_seen(self, rig: Rig) -> None:
        self.needs(rig, "note")
        advised = cast(base.SupportsNote, rig.scheduler)
        chain = hashes(4)
        there = self.put(rig, chain[:2])
        advised.note("r", "admit", chain)
        advised.note("r", "end", chain, output_tokens=17, finish="stop")
        advised.note("never admitted", "end", [], 0, "abort")
        advised.note("r", "admit", chain, group_id=1)
        self.expect_hits(rig, rig.keys(chain), there)

    def test_evicted_keys_are_told_once(self, rig: Rig) -> None:
        self.needs(rig, "evicted_keys")
        teller = cast(base.SupportsEvictedKeys, rig.scheduler)
        assert list(teller.take_evicted_keys()) == []
        there = self.put(rig, hashes(3))
        if rig.capabilities.note:
            cast(base.SupportsNote, rig.scheduler).note("r", "admit", hashes(3))
        assert list(teller.take_evicted_keys()) == []
        assert rig.scheduler.clear()
        assert sorted(teller.take_evicted_keys()) == sorted(there)
        assert list(teller.take_evicted_keys()) == []

    def test_a_watched_block_is_told_as_lost_once(self, rig: Rig) -> None:
        self.needs(rig, "watch")
        teller = cast(base.SupportsWatch, rig.scheduler)
        assert list(teller.take_lost()) == []
        chain, absent = hashes(3), hashes(2, "absent")
        there = self.put(rig, chain)
        watched = list(teller.watch(0, [*chain, *absent]))
        assert watched[3:] == [False] * 2
        found = [block for block, is_there in zip(chain, watched, strict=False) if is_there]
        assert set(rig.keys(found)) <= there
        assert self.may_fail or rig.keys(found) == sorted(there, key=rig.keys(chain).index)
        assert list(teller.watch(0, [])) == []
        assert list(teller.take_lost()) == []
        assert rig.scheduler.clear()
        assert sorted(teller.take_lost()) == sorted((0, block) for block in found)
        assert list(teller.take_lost()) == []
        self.put(rig, chain)
        assert rig.scheduler.clear()
        assert list(teller.take_lost()) == [], "what has been told as lost is not watched any more"

    @pytest.mark.parametrize("tp_size", [1, 2])
    def test_a_block_is_watched_if_every_rank_has_it(
        self, make_rig: Callable[..., Rig], tp_size: int
    ) -> None:
        rig = self.rig_of(make_rig, tp_size)
        self.needs(rig, "watch")
        teller = cast(base.SupportsWatch, rig.scheduler)
        (block,) = hashes(1)
        there: set[str] = set()
        for rank in rig.ranks:
            is_watched = list(teller.watch(0, [block])) == [True]
            assert not is_watched or set(rig.keys([block])) <= rig.alike(there)
            plans = rank.store_plans("batch", [block], [0])
            there |= self.published(rank, self.finished(rank, rank.worker.store(plans)))
        is_watched = there == set(rig.keys([block]))
        assert list(teller.watch(0, [block])) == [is_watched]
        assert rig.scheduler.clear()
        assert list(teller.take_lost()) == ([(0, block)] if is_watched else [])

    @pytest.mark.parametrize("tp_size", [1, 2])
    def test_what_was_prepared_is_found_by_raw_hashes(
        self, make_rig: Callable[..., Rig], tp_size: int
    ) -> None:
        rig = self.rig_of(make_rig, tp_size)
        self.needs(rig, "prepare")
        asker = cast(base.SupportsPrepare, rig.scheduler)
        chain, absent = hashes(5), hashes(2, "absent")
        there = self.put(rig, chain)
        wanted = [base.Wanted(0, [*chain, *absent], is_chain=True), base.Wanted(0, [], is_chain=False)]
        deadline = time.monotonic() + 30
        while not asker.prepare("r", wanted):
            assert time.monotonic() < deadline, "what is to be prepared is never known"
        assert asker.prepare("r", wanted), "what is known was forgotten at once"
        assert asker.prepare("nothing", [])
        if rig.capabilities.presence:
            by_hash = cast(base.SupportsPresence, rig.scheduler)
            told = list(by_hash.present_raw(0, [*chain, *absent]))
            found = [block for block, is_there in zip(chain, told, strict=False) if is_there]
            assert set(rig.keys(found)) <= there
            assert told[len(chain) :] == [False, False]
            assert self.may_fail or self.stores_nothing or found == chain
        asker.unprepare("r")
        asker.unprepare("r")
        asker.unprepare("nobody")

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
