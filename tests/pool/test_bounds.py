"""What eviction may and may not do, under either policy: watermarks, pins, objects and batches that are too
large."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from umbp.errors import ConfigError
from umbp.pool import Outcome, Pool

MakePool = Callable[..., Pool]
TINY = 100
SLOT = 4096

policies = pytest.mark.parametrize("policy", ["lru", "hazard"])


def store(pool: Pool, ns: int, keys: list[str], size: int = TINY) -> list[int]:
    """As an engine does: the request is noted, stored and noted again."""
    pool.note(keys, "admit")
    tickets, outcomes = pool.reserve(ns, keys, size, [None, *keys[:-1]])
    pool.publish(tickets[outcomes == Outcome.RESERVED])
    pool.note(keys, "end", 100)
    pool.audit()
    return list(outcomes.tolist())


@policies
@pytest.mark.parametrize("batch", [1, 7, 40])
def test_use_stays_under_the_high_watermark_and_falls_to_the_low_one_each_time(
    make_pool: MakePool, policy: str, batch: int
) -> None:
    pool = make_pool(
        slots=400, object_bytes=TINY, high_watermark=0.8, low_watermark=0.5, eviction_policy=policy
    )
    ns = pool.namespace("a")
    used = []
    for n in range(1600 // batch):
        store(pool, ns, [f"k{n}.{i}" for i in range(batch)])
        used.append(pool.stats()["used_bytes"] // SLOT)
    assert max(used) <= 320
    assert max(used) > 320 - 2 * batch, "eviction starts at the high watermark, not before"
    lows = [b for a, b, c in zip(used, used[1:], used[2:], strict=False) if a > b < c]
    assert lows
    assert all(200 - 2 * batch <= low <= 200 for low in lows), "and goes on to the low one"


@policies
def test_a_way_down_longer_than_a_batch_is_gone_call_by_call(make_pool: MakePool, policy: str) -> None:
    """Scenario: from 2,700 objects down to 300; one call evicts no more than its bound, the next go on."""
    pool = make_pool(
        slots=3000,
        slab_slots=100,
        object_bytes=TINY,
        high_watermark=0.9,
        low_watermark=0.1,
        eviction_policy=policy,
    )
    ns = pool.namespace("a")
    for n in range(27):
        store(pool, ns, [f"k{n}.{i}" for i in range(100)])
    assert pool.stats()["evicted"] == 0
    used = []
    for n in range(12):
        store(pool, ns, [f"m{n}"])
        used.append(pool.stats()["used_bytes"] // SLOT)
    assert 2700 - used[0] <= 300
    assert used[:9] == sorted(used[:9], reverse=True)
    assert min(used) <= 300


@policies
def test_the_watermark_counts_objects_of_all_sizes(make_pool: MakePool, policy: str) -> None:
    """Scenario: the pool is full of small objects when large ones come, which have none to give up."""
    pool = make_pool(
        slots=64,
        slab_slots=8,
        object_bytes=TINY,
        high_watermark=0.75,
        low_watermark=0.5,
        eviction_policy=policy,
    )
    ns = pool.namespace("a")
    for n in range(6):
        store(pool, ns, [f"s{n}.{i}" for i in range(8)])
    for n in range(20):
        assert store(pool, ns, [f"l{n}"], 3 * SLOT) == [Outcome.RESERVED]
        assert pool.stats()["used_bytes"] <= 48 * SLOT


@policies
def test_what_is_pinned_is_no_victim_however_full_the_pool_is(make_pool: MakePool, policy: str) -> None:
    pool = make_pool(
        slots=16, object_bytes=TINY, high_watermark=0.5, low_watermark=0.25, eviction_policy=policy
    )
    ns = pool.namespace("a")
    kept = [f"p{i}" for i in range(8)]
    store(pool, ns, kept)
    pins, _ = pool.acquire(kept)
    for n in range(30):
        store(pool, ns, [f"k{n}.{i}" for i in range(3)])
        assert pool.lookup(kept).all()
    pool.release(pins)
    for n in range(30):
        store(pool, ns, [f"m{n}.{i}" for i in range(3)])
    assert not pool.lookup(kept).any()


@policies
def test_an_object_larger_than_the_pool_is_refused_and_touches_nothing(
    make_pool: MakePool, policy: str
) -> None:
    pool = make_pool(slots=16, object_bytes=TINY, eviction_policy=policy)
    ns = pool.namespace("a")
    stored = [f"k{i}" for i in range(16)]
    store(pool, ns, stored)
    assert pool.reserve(ns, ["huge"], 17 * SLOT)[1].tolist() == [Outcome.TOO_LARGE]
    assert pool.lookup(stored).all()
    assert pool.stats()["evicted"] == 0


@policies
@pytest.mark.parametrize("length", [17, 40, 600])
def test_of_a_batch_larger_than_the_pool_a_contiguous_head_is_stored(
    make_pool: MakePool, policy: str, length: int
) -> None:
    pool = make_pool(slots=16, object_bytes=TINY, eviction_policy=policy)
    ns = pool.namespace("a")
    store(pool, ns, [f"k{i}" for i in range(16)])
    chain = [f"c{i}" for i in range(length)]
    outcomes = store(pool, ns, chain)
    assert outcomes == [Outcome.RESERVED] * 16 + [Outcome.FULL] * (length - 16)
    assert pool.lookup(chain).tolist() == [True] * 16 + [False] * (length - 16)


@policies
def test_large_objects_take_a_slab_of_many_small_ones_over_several_holds(
    make_pool: MakePool, policy: str
) -> None:
    """Scenario: a slab holds 2,000 small objects, more than one hold of the lock may evict."""
    pool = make_pool(slots=8000, slab_slots=2000, object_bytes=TINY, eviction_policy=policy)
    ns = pool.namespace("a")
    for n in range(80):
        store(pool, ns, [f"s{n}.{i}" for i in range(100)])
    assert pool.stats()["free_slabs"] == 0
    assert store(pool, ns, ["large"], 1500 * SLOT) == [Outcome.RESERVED]
    stats = pool.stats()
    assert stats["slab_moves"] == 1
    assert stats["evicted"] == 2000
    assert stats["evicted_bytes"] == 2000 * SLOT


@policies
def test_evicted_tokens_are_what_each_object_was_stored_for(make_pool: MakePool, policy: str) -> None:
    pool = make_pool(slots=8, object_bytes=TINY, eviction_policy=policy)
    ns = pool.namespace("a")
    for n in range(8):
        tickets, _ = pool.reserve(ns, [f"k{n}"], TINY, tokens=16 if n % 2 else 0)
        pool.publish(tickets)
    store(pool, ns, [f"later{n}" for n in range(6)])
    gone = [n for n, hit in enumerate(pool.lookup([f"k{n}" for n in range(8)])) if not hit]
    assert pool.stats()["evicted"] == len(gone) == 6
    assert pool.stats()["evicted_tokens"] == 16 * sum(n % 2 for n in gone)
    pool.audit()


def test_an_object_counts_for_a_bounded_number_of_tokens(make_pool: MakePool) -> None:
    pool = make_pool(object_bytes=TINY)
    most = 1 << 23
    for _ in range(2):
        tickets, _ = pool.reserve(pool.namespace("a"), ["k"], TINY, tokens=most)
        pool.publish(tickets)
        assert pool.set_quota(pool.namespace("a"), 0)
        assert pool.set_quota(pool.namespace("a"), None)
    assert pool.stats()["evicted_tokens"] == 2 * most
    with pytest.raises(ConfigError, match=str(most + 1)):
        pool.reserve(pool.namespace("a"), ["x"], TINY, tokens=most + 1)
