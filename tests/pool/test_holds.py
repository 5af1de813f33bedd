"""No call holds the pool's lock for longer than others wait for it, however many objects there are."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from umbp.pool import Outcome, Pool
from umbp.pool.limits import memory_limits
from umbp.pool.pool import LOCK_PATIENCE_S

pytestmark = pytest.mark.alone  # what runs beside takes the cache, and the lock is held for longer

TINY = 100
SLOT = 4096
PREFIX = "p"
SLAB_SLOTS = 16384
"""As many small objects as the largest slab of an engine's pool may hold."""


@pytest.fixture(params=[40_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def objects(request: pytest.FixtureRequest) -> int:
    count = int(request.param)
    if min(limit.free_bytes for limit in memory_limits()) < 1.5 * count * SLOT:
        pytest.skip(f"a pool of {count} objects doesn't fit this host's free memory")
    return count


@pytest.fixture(params=["lru", "hazard"])
def pool(request: pytest.FixtureRequest, objects: int) -> Iterator[Pool]:
    with Pool.create_memfd(
        objects * SLOT,
        slab_bytes=min(SLAB_SLOTS, objects // 4) * SLOT,
        min_object_bytes=TINY,
        eviction_policy=request.param,
        lock_patience_s=1.0,
    ) as made:
        yield made


def chain_of(number: int, length: int) -> list[bytes]:
    return [number.to_bytes(5, "little") + place.to_bytes(3, "little") for place in range(length)]


def store(pool: Pool, ns: int, chain: list[bytes], size: int = TINY) -> int:
    """The number of blocks that found room."""
    pool.note_raw(PREFIX, chain, "admit")
    tickets, outcomes = pool.reserve_raw(ns, PREFIX, chain, size, [None, *chain[:-1]])
    mine = outcomes == Outcome.RESERVED
    pool.publish(tickets[mine])
    pool.note_raw(PREFIX, chain, "end", 100)
    return int(mine.sum())


def fill(pool: Pool, ns: int, objects: int) -> int:
    """Chains of several lengths, until all is full; how many there are."""
    lengths = random.Random(1)
    stored = number = 0
    while stored < objects:
        pool.set_time(0.5 * number)
        stored += store(pool, ns, chain_of(number, lengths.choice([16, 256, 1000])))
        number += 1
    return number


def assert_nobody_waited_long(pool: Pool) -> None:
    assert pool.longest_hold_s() < LOCK_PATIENCE_S


def test_churn_in_a_full_pool(pool: Pool, objects: int) -> None:
    ns = pool.namespace("a")
    pool.longest_hold_s()
    number = fill(pool, ns, objects)
    choice = random.Random(2)
    for step in range(300):
        pool.set_time(0.5 * (number + step))
        again = step % 3 == 0
        chain = chain_of(choice.randrange(number) if again else number + step, 400)
        pins, _ = pool.acquire_raw(PREFIX, chain)
        pool.release(pins)
        store(pool, ns, chain)
    assert_nobody_waited_long(pool)


def test_an_old_end_that_pins_keep_from_going(pool: Pool, objects: int) -> None:
    """Scenario: the oldest half are parents whose one child is being read."""
    ns = pool.namespace("a")
    pairs = objects // 4
    for number in range(pairs):
        store(pool, ns, chain_of(number, 2))
    for begin in range(0, pairs, 1000):
        pool.acquire_raw(
            PREFIX, [chain_of(number, 2)[1] for number in range(begin, min(begin + 1000, pairs))]
        )
    room = objects - 2 * pairs
    for number in range(room // 500):
        store(pool, ns, chain_of(pairs + number, 500))
    pool.longest_hold_s()
    for number in range(20):
        store(pool, ns, chain_of(2 * objects + number, 256))
    assert_nobody_waited_long(pool)


def test_a_trunk_with_more_children_than_may_be_looked_at(pool: Pool, objects: int) -> None:
    """Scenario: everything hangs on one block that nobody has touched since."""
    ns = pool.namespace("a")
    (root,) = chain_of(0, 1)
    tickets, _ = pool.reserve_raw(ns, PREFIX, [root], TINY)
    pool.publish(tickets)
    for number in range(objects // 1000):
        children = chain_of(1 + number, 1000)
        tickets, outcomes = pool.reserve_raw(ns, PREFIX, children, TINY, [root] * len(children))
        pool.publish(tickets[outcomes == Outcome.RESERVED])
    pool.longest_hold_s()
    for number in range(20):
        assert store(pool, ns, chain_of(objects + number, 256)) == 256
    assert_nobody_waited_long(pool)


def test_large_objects_that_take_slabs_of_small_ones(pool: Pool, objects: int) -> None:
    ns = pool.namespace("a")
    fill(pool, ns, objects)
    pool.longest_hold_s()
    assert store(pool, ns, chain_of(objects, 4), 1024 * SLOT) == 4
    assert_nobody_waited_long(pool)
