"""Ranks that hold the same KV, each with a pool of its own before one store: what one of them loses, lacks or
can't fetch, and what of it all are told.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from umbp.options import Options, parse_options
from umbp.pool import Pool
from umbp.runtime.base import Wanted
from umbp.runtime.distributed import DistributedRuntime
from umbp.store.base import ClusterStore
from umbp.testing.rig import Rig, hashes
from umbp.testing.stores.memory import MemoryCluster

LONG_S = 30.0
"""More than any of these tests takes."""


class Alike:
    """An engine of two ranks that hold the same."""

    def __init__(self, cluster: MemoryCluster) -> None:
        def connect(options: Options, *, serves_memory: bool) -> ClusterStore:
            return cluster.connect()

        options = {"mode": "distributed", "store": "memory", "capacity_bytes": "1MiB"}
        self.rig = Rig(DistributedRuntime(parse_options(options), connect), "alike", 2, kv_tp_replicas=2)
        self.workers: list[Any] = [rank.worker for rank in self.rig.ranks]
        self.scheduler: Any = self.rig.scheduler

    @property
    def pools(self) -> list[Pool]:
        return [worker._keeper.current()[0] for worker in self.workers]

    def names(self, chain: Sequence[bytes]) -> list[str]:
        """Of their objects, everywhere."""
        return self.rig.ranks[0].keys(chain)

    def put(self, chain: Sequence[bytes]) -> None:
        for rank in self.rig.ranks:
            job = rank.worker.wait(rank.worker.store(rank.store_plans("batch", chain, range(len(chain)))))
            rank.worker.publish(job)

    def flush(self) -> None:
        for worker in self.workers:
            assert worker.far.flush(LONG_S)

    def prepare(self, request_id: str, chain: Sequence[bytes]) -> None:
        deadline_s = time.monotonic() + LONG_S
        while not self.scheduler.prepare(request_id, [Wanted(0, chain, is_chain=True)]):
            assert time.monotonic() < deadline_s

    def load(self, number: int, chain: Sequence[bytes]) -> set[str]:
        rank = self.rig.ranks[number]
        rank.scrub(range(8, 8 + len(chain)))
        job = rank.worker.wait(rank.worker.load(rank.load_plans("batch", chain, range(8, 8 + len(chain)))))
        for place in range(len(chain)):
            assert job.failed_keys or rank.read(8 + place) == rank.read(place)
        return set(job.completed_keys)


@pytest.fixture
def cluster() -> Iterator[MemoryCluster]:
    made = MemoryCluster()
    yield made
    assert not made.misuses


@pytest.fixture
def alike(cluster: MemoryCluster) -> Iterator[Alike]:
    made = Alike(cluster)
    yield made
    cluster.go_on()
    made.rig.close()


def test_each_pool_has_the_first_rank_s_keys_and_the_store_one_object(
    alike: Alike, cluster: MemoryCluster
) -> None:
    chain = hashes(4)
    alike.put(chain)
    alike.flush()
    assert all(pool.lookup(alike.names(chain)).all() for pool in alike.pools)
    assert list(cluster.objects) == alike.names(chain)
    assert list(alike.scheduler.lookup(alike.rig.keys(chain))) == [True] * 8


def test_the_first_rank_to_lose_a_block_loses_it_for_all(alike: Alike) -> None:
    chain = hashes(3)
    alike.put(chain)
    assert list(alike.scheduler.watch(0, chain)) == [True] * 3
    alike.pools[1].remove(alike.names(chain[1:2]))
    assert alike.scheduler.take_lost() == [(0, chain[1])]
    for pool in alike.pools:
        pool.remove(alike.names(chain[1:]))
    assert alike.scheduler.take_lost() == [(0, chain[2])]
    assert alike.scheduler.take_lost() == []


def test_what_goes_is_told_under_the_key_of_the_rank_that_lost_it(alike: Alike) -> None:
    chain = hashes(2)
    alike.put(chain)
    assert alike.scheduler.take_evicted_keys() == []
    alike.scheduler.note("r", "admit", chain)
    alike.pools[1].remove(alike.names(chain[:1]))
    assert alike.scheduler.take_evicted_keys() == alike.rig.ranks[1].keys(chain[:1])
    alike.pools[0].remove(alike.names(chain[:1]))
    assert alike.scheduler.take_evicted_keys() == alike.rig.ranks[0].keys(chain[:1])


@pytest.mark.parametrize("losers", [[0], [1], [0, 1]], ids=["the first", "the second", "both"])
def test_what_pools_lack_is_asked_for_once_and_fetched_into_each_that_lacks_it(
    alike: Alike, losers: list[int]
) -> None:
    chain = hashes(5)
    alike.put(chain)
    alike.flush()
    for number in losers:
        alike.pools[number].remove(alike.names(chain[1:4]))
    alike.prepare("r", chain)
    assert alike.scheduler.take_counts()["store_lookup_objects", "memory"] == 3
    assert alike.scheduler.hold_raw("r", 0, chain) == 5
    assert alike.scheduler.to_fetch("r") == {0: 3}
    for number, rank in enumerate(alike.rig.ranks):
        assert alike.load(number, chain) == set(rank.keys(chain))
        fetched = alike.workers[number].take_counts().get(("fetched_objects", "memory"), 0)
        assert fetched == (3 if number in losers else 0)
    alike.scheduler.unhold("r")
    assert not any(pool.stats()["pinned"] for pool in alike.pools)


def test_what_one_rank_could_not_fetch_is_believed_of_none(alike: Alike, cluster: MemoryCluster) -> None:
    chain = hashes(3)
    alike.put(chain)
    alike.flush()
    for pool in alike.pools:
        pool.remove(alike.names(chain))
    alike.prepare("r", chain)
    assert alike.scheduler.lookup_raw(0, chain) == 3
    assert alike.load(0, chain) == set(alike.rig.ranks[0].keys(chain))
    cluster.objects.pop(alike.names(chain)[1])
    assert alike.load(1, chain) == set(alike.rig.ranks[1].keys([chain[0], chain[2]]))
    alike.scheduler.disbelieve([(0, chain[1])])
    alike.scheduler.unprepare("r")
    assert alike.scheduler.lookup_raw(0, chain) == 1
    alike.prepare("s", chain)
    assert alike.scheduler.lookup_raw(0, chain) == 1


def test_what_the_sending_rank_lost_before_its_turn_is_sent_when_it_has_it_again(
    alike: Alike, cluster: MemoryCluster
) -> None:
    first, chain = hashes(2, "first"), hashes(2)
    cluster.hang("put")
    alike.put(first[:1])
    cluster.wait_hanging(1)
    alike.put(first[1:])
    deadline_s = time.monotonic() + LONG_S
    while alike.pools[0].stats()["pinned"] < len(first):
        assert time.monotonic() < deadline_s, "the next one is held and sealed meanwhile"
    alike.put(chain)
    alike.pools[0].remove(alike.names(chain))
    cluster.go_on()
    alike.flush()
    assert list(cluster.objects) == alike.names(first)
    assert alike.scheduler.lookup_raw(0, chain) == 0, "then it is computed anew, and stored"
    alike.put(chain)
    alike.flush()
    assert set(cluster.objects) == set(alike.names([*first, *chain]))


def test_a_clear_removes_the_one_object_of_all(alike: Alike, cluster: MemoryCluster) -> None:
    chain = hashes(3)
    alike.put(chain)
    alike.flush()
    assert alike.scheduler.clear()
    assert not cluster.objects
    assert list(alike.scheduler.lookup(alike.rig.keys(chain))) == [False] * 6


def test_no_rank_is_given_what_the_first_was_sending_when_all_was_cleared(
    alike: Alike, cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A put of the first rank's hangs; all is cleared, as new weights came, and the same blocks are computed
    and stored anew; the second rank loses them; then the put goes on, with the old bytes, which the first
    rank can't remove now."""
    chain = hashes(3)
    cluster.hang("put", "remove")
    alike.put(chain)
    cluster.wait_hanging(1)
    monkeypatch.setattr("umbp.runtime.far.scheduler.HELD_PATIENCE_S", 0.01)
    assert alike.scheduler.clear()
    for rank in alike.rig.ranks:
        for block in range(3):
            rank.fill(block, f"new {block}")
    alike.put(chain)
    alike.pools[1].remove(alike.names(chain))
    alike.prepare("r", chain)
    assert alike.scheduler.hold_raw("r", 0, chain) == 0
    cluster.go_on("put")
    alike.flush()
    alike.scheduler.unprepare("r")
    alike.scheduler.gate.open(LONG_S)
    alike.prepare("s", chain)
    held = alike.scheduler.hold_raw("s", 0, chain)
    for number, rank in enumerate(alike.rig.ranks):
        assert alike.load(number, chain[:held]) == set(rank.keys(chain[:held]))
    alike.scheduler.unhold("s")
