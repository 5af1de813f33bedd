"""The scheduler's holds on real pools that go away: what one pool has lost is kept in no other."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Collection, ItemsView, Iterator, Mapping
from pathlib import Path

import pytest

from umbp.data import BlockIdentityCodec, Rank, RankTopology
from umbp.data import UMBPNamespace as Namespace
from umbp.errors import SegmentError
from umbp.pool import Pool
from umbp.runtime.base import HandshakeExtra
from umbp.runtime.pool_scheduler import PoolSchedulerHandle
from umbp.runtime.to_fetch import ToFetch

SIZE = 4096
TOPOLOGY = RankTopology(tp_size=2)
HASHES = [bytes([number]) * 32 for number in range(4)]


class Pools(UserDict[Rank, Pool]):
    """Calls `between` when it has been looked through once, as between a lookup and a hold."""

    between: Callable[[], None] | None = None
    _looks = 0

    def items(self) -> ItemsView[Rank, Pool]:
        if self.between is not None:
            looks, self._looks = self._looks, self._looks + 1
            if looks == 1:
                self.between()
        return super().items()


class Binding:
    """To pools that are there."""

    def __init__(self, pools: Pools) -> None:
        self._pools = pools

    def bind(self, extras: Mapping[Rank, HandshakeExtra]) -> None:
        pass

    def pools(self) -> Mapping[Rank, Pool]:
        return self._pools

    def clear(self) -> bool:
        return True

    def namespaces(self) -> Collection[tuple[Pool, int]]:
        return [(pool, pool.namespace("n")) for pool in self._pools.values()]

    def close(self) -> None:
        pass


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[Pools]:
    """One for each rank, with the same blocks."""
    namespace = Namespace("n")
    codec = BlockIdentityCodec(namespace)
    made = Pools()
    for rank in TOPOLOGY.all_namespaces():
        path = tmp_path / f"p{len(made)}"
        pool = Pool.create(path, 1 << 20, slab_bytes=1 << 16, min_object_bytes=SIZE)
        tickets, _ = pool.reserve_raw(pool.namespace("n"), codec.key_prefix(0, rank), HASHES, SIZE)
        pool.publish(tickets)
        made[rank] = pool
    yield made
    for pool in made.values():
        pool.close()


@pytest.fixture
def handle(pools: Pools) -> PoolSchedulerHandle:
    return PoolSchedulerHandle(Namespace("n"), TOPOLOGY, Binding(pools))


def pinned(pool: Pool) -> int:
    return pool.stats()["pinned_here"]


def test_what_is_held_is_held_on_every_rank_until_it_is_given_back(
    pools: Pools, handle: PoolSchedulerHandle
) -> None:
    assert handle.hold_raw("r", 0, HASHES) == len(HASHES)
    assert [pinned(pool) for pool in pools.values()] == [4, 4]
    handle.unhold("r")
    assert [pinned(pool) for pool in pools.values()] == [0, 0]


def test_where_a_later_rank_s_pool_can_not_be_asked_the_others_hold_nothing(
    pools: Pools, handle: PoolSchedulerHandle
) -> None:
    first, second = pools.values()
    pools.between = second.close
    with pytest.raises(SegmentError):
        handle.hold_raw("r", 0, HASHES)
    assert pinned(first) == 0


def test_where_a_later_rank_s_pool_was_destroyed_nothing_is_held(
    pools: Pools, handle: PoolSchedulerHandle
) -> None:
    first, second = pools.values()
    pools.between = second.destroy
    assert handle.hold_raw("r", 0, HASHES) == 0
    assert pinned(first) == 0


def test_keys_that_were_held_before_a_pool_could_not_be_asked_are_given_back(
    pools: Pools, handle: PoolSchedulerHandle
) -> None:
    first, second = pools.values()
    codec = BlockIdentityCodec(Namespace("n"))
    keys = [codec.key_prefix(0, rank) + HASHES[0].hex() for rank in pools]
    assert handle.hold("before", keys[:1]) == 1
    second.close()
    with pytest.raises(SegmentError):
        handle.hold("r", keys)
    assert pinned(first) == 1
    handle.unhold("before")
    assert pinned(first) == 0


def test_a_pool_that_can_not_be_asked_keeps_none_of_the_others_pins(
    pools: Pools, handle: PoolSchedulerHandle
) -> None:
    first, second = pools.values()
    assert handle.hold_raw("r", 0, HASHES) == len(HASHES)
    first.close()
    handle.unhold("r")
    assert pinned(second) == 0


def test_a_block_that_several_requests_wait_for_counts_once_until_the_last_has_gone() -> None:
    to_fetch = ToFetch()
    to_fetch.add("a", 0, HASHES[:3])
    to_fetch.add("b", 0, HASHES[1:])
    to_fetch.add("b", 1, HASHES[:1])
    assert (to_fetch.of("a"), to_fetch.of("b")) == ({0: 3}, {0: 3, 1: 1})
    assert to_fetch.all() == {0: 4, 1: 1}
    assert to_fetch.new(1, HASHES) == [1, 2, 3]
    to_fetch.audit()
    to_fetch.forget("a")
    assert to_fetch.all() == {0: 3, 1: 1}
    to_fetch.forget("b")
    to_fetch.forget("b")
    assert not any(to_fetch.all().values())
    to_fetch.audit()
