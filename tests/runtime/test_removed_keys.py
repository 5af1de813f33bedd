"""What has left the pools is told by rank, cache group and hash: each once, whoever removed it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from umbp.data import BlockIdentityCodec, Rank
from umbp.pool import Pool
from umbp.runtime.removed_keys import RemovedKeys
from umbp.testing.rig import hashes

RANKS: tuple[Rank, ...] = ((0, 0, 0, 0), (1, 0, 0, 0))
CODEC = BlockIdentityCodec("model")


@pytest.fixture
def pools() -> Iterator[dict[Rank, Pool]]:
    made = {rank: new_pool() for rank in RANKS}
    yield made
    for pool in made.values():
        pool.close()


def new_pool() -> Pool:
    return Pool.create_memfd(1 << 20, slab_bytes=4096, min_object_bytes=512)


def put(pools: dict[Rank, Pool], group: int, blocks: Sequence[bytes]) -> None:
    for rank, pool in pools.items():
        tickets, _ = pool.reserve(pool.namespace("model"), CODEC.keys(blocks, group, rank), 512)
        pool.publish(tickets)


def remove(pool: Pool, rank: Rank, group: int, blocks: Sequence[bytes]) -> None:
    pool.remove(CODEC.keys(blocks, group, rank))


def test_of_every_cache_group_and_rank_that_which_was_learned_is_told_once(pools: dict[Rank, Pool]) -> None:
    removed = RemovedKeys(CODEC.key_prefix)
    chain = hashes(4)
    for group in (0, 2):
        put(pools, group, chain)
        removed.learn(pools, group, chain[:3])
    assert removed.take(pools) == []
    remove(pools[RANKS[0]], RANKS[0], 2, chain)
    remove(pools[RANKS[1]], RANKS[1], 0, chain[:1])
    expected = [(RANKS[0], 2, block) for block in chain[:3]] + [(RANKS[1], 0, chain[0])]
    assert removed.take(pools) == expected
    assert removed.take(pools) == []


def test_what_was_stored_again_before_anyone_looked_has_not_gone(pools: dict[Rank, Pool]) -> None:
    removed = RemovedKeys(CODEC.key_prefix)
    chain = hashes(2)
    put(pools, 0, chain)
    removed.learn(pools, 0, chain)
    for rank, pool in pools.items():
        remove(pool, rank, 0, chain)
    put(pools, 0, chain[:1])
    assert removed.take(pools) == [(rank, 0, chain[1]) for rank in RANKS]
    remove(pools[RANKS[0]], RANKS[0], 0, chain[:1])
    assert removed.take(pools) == [(RANKS[0], 0, chain[0])]


def test_what_is_forgotten_is_not_told(pools: dict[Rank, Pool]) -> None:
    removed = RemovedKeys(CODEC.key_prefix)
    chain = hashes(3)
    put(pools, 1, chain)
    removed.learn(pools, 1, chain)
    removed.forget(1, [*chain[:2], b"never learned"])
    removed.forget(7, chain)
    for pool in pools.values():
        pool.clear_all()
    assert removed.take(pools) == [(rank, 1, chain[2]) for rank in RANKS]


def test_a_ring_that_has_run_over_costs_a_look_at_everything_and_loses_nothing(
    pools: dict[Rank, Pool],
) -> None:
    removed = RemovedKeys(CODEC.key_prefix)
    rank, pool = RANKS[0], pools[RANKS[0]]
    one = {rank: pool}
    chain = hashes(3)
    put(one, 1, chain)
    removed.learn(one, 1, chain)
    remove(pool, rank, 1, chain[:1])
    head = pool.removed_head()
    others = hashes(200, "other")
    while not pool.removed_since(head)[2]:
        put(one, 0, others)
        remove(pool, rank, 0, others)
    assert removed.take(one) == [(rank, 1, chain[0])]
    assert removed.take(one) == []


def test_a_pool_that_is_replaced_has_lost_all_that_the_new_one_lacks(pools: dict[Rank, Pool]) -> None:
    removed = RemovedKeys(CODEC.key_prefix)
    chain = hashes(3)
    for group in (0, 1):
        put(pools, group, chain)
        removed.learn(pools, group, chain)
    with new_pool() as other:
        now = {**pools, RANKS[1]: other}
        put({RANKS[1]: other}, 1, chain[:1])
        gone = [(RANKS[1], 0, block) for block in chain] + [(RANKS[1], 1, block) for block in chain[1:]]
        assert removed.take(now) == gone
        remove(other, RANKS[1], 1, chain[:1])
        assert removed.take(now) == [(RANKS[1], 1, chain[0])]
        assert removed.take({}) == [(RANKS[0], group, block) for group in (0, 1) for block in chain]


def test_the_oldest_keys_are_forgotten_beyond_what_the_pool_can_hold_twice(pools: dict[Rank, Pool]) -> None:
    removed = RemovedKeys(CODEC.key_prefix)
    rank, pool = RANKS[0], pools[RANKS[0]]
    slots = pool.stats()["slots"]
    chain = hashes(2 * slots + 5)
    removed.learn({rank: pool}, 0, chain)
    entries = removed._known[rank].groups[0]
    assert list(entries.values()) == chain[5:]
