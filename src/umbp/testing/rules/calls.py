"""What the verbs answer: lookups, publishing, jobs, closed and dead handles."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import cast

import pytest

from umbp.data import TransferJobState
from umbp.runtime import base
from umbp.runtime.base import Capabilities, IUMBPRuntime, capabilities_of
from umbp.testing.rig import KINDS, Rig, hashes
from umbp.testing.rules.support import ContractSupport


class CallsContract(ContractSupport):
    """Verbs and their answers."""

    def test_handles_have_the_verbs_of_the_contract_and_of_every_stated_capability(self, rig: Rig) -> None:
        assert isinstance(rig.scheduler, base.UMBPSchedulerHandle)
        assert isinstance(rig.ranks[0].worker, base.UMBPWorkerHandle)
        stated: Capabilities = rig.capabilities
        scheduler_extras = [
            (stated.hold, base.SupportsHold),
            (stated.lookup_raw, base.SupportsRawLookup),
            (stated.hold and stated.lookup_raw, base.SupportsRawHold),
            (stated.presence, base.SupportsPresence),
            (stated.lookup_states, base.SupportsLookupStates),
            (stated.note, base.SupportsNote),
            (stated.evicted_keys, base.SupportsEvictedKeys),
            (stated.watch, base.SupportsWatch),
            (stated.prepare, base.SupportsPrepare),
            (stated.counts, base.SupportsCounts),
            (stated.attach, base.SupportsAttach),
        ]
        worker_extras = [
            (stated.attach, base.SupportsHandshakeExtra),
            (stated.cancel, base.SupportsCancel),
            (stated.usage, base.SupportsUsage),
            (stated.counts, base.SupportsCounts),
        ]
        for handle, extras in ((rig.scheduler, scheduler_extras), (rig.ranks[0].worker, worker_extras)):
            for is_stated, protocol in extras:
                assert not is_stated or isinstance(handle, protocol), protocol

    def test_capabilities_are_data(self, runtime: IUMBPRuntime) -> None:
        assert isinstance(capabilities_of(runtime), Capabilities)

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

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_job_about_nothing_is_complete(self, rig: Rig, kind: str) -> None:
        (rank,) = rig.ranks
        for job in (
            rank.worker.store(rank.store_plans(kind, [], [])),
            rank.worker.load(rank.load_plans(kind, [], [])),
        ):
            assert self.finished(rank, job).status == "completed"
        self.published(rank, self.finished(rank, rank.worker.store(rank.store_plans(kind, [], []))))

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
        if rig.capabilities.presence:
            assert list(cast(base.SupportsPresence, rig.scheduler).present_raw(0, chain)) == [False] * 3

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
