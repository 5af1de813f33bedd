"""A namespace with a quota makes room among its own, and takes nothing from others beyond it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from actors import OBJECT_BYTES, store
from zygote import Zygote

from umbp.errors import ConfigError
from umbp.pool import NamespaceUse, Outcome, Pool

MakePool = Callable[..., Pool]
SLOT = 4096


def use_of(pool: Pool, name: str) -> NamespaceUse:
    return next(each for each in pool.namespaces() if each.name == name)


def stored(pool: Pool, keys: list[str]) -> list[str]:
    return [key for key, hit in zip(keys, pool.lookup(keys).tolist(), strict=True) if hit]


def test_namespaces_are_listed_with_what_they_use(make_pool: MakePool) -> None:
    pool = make_pool()
    assert pool.namespaces() == []
    one, two = pool.namespace("one"), pool.namespace("two")
    store(pool, one, ["a", "b"])
    pool.reserve(two, ["c"], OBJECT_BYTES)
    pool.set_quota(two, 3 * SLOT)
    pool.clear(two)
    assert pool.namespaces() == [
        NamespaceUse("one", one, 1, 2 * SLOT, None, 2),
        NamespaceUse("two", two, 2, SLOT, 3 * SLOT, 0),
    ]


def test_long_and_odd_names_are_told_apart_and_listed(make_pool: MakePool) -> None:
    pool = make_pool()
    long = "n" * 500
    names = ["x" * 190, "x" * 191, long + "1", long + "2", "ü" * 150, "a\tb"]
    numbers = [pool.namespace(name) for name in names]
    assert len(set(numbers)) == len(names)
    store(pool, numbers[2], ["k"])
    assert [each.objects for each in pool.namespaces()] == [0, 0, 1, 0, 0, 0]
    shown = [each.name for each in pool.namespaces()]
    assert shown[:4] == ["x" * 190, "x" * 191, "n" * 191, "n" * 191]
    assert shown[4].startswith("ü" * 95)
    pool.audit()


def test_at_its_quota_a_namespace_evicts_its_own_oldest(make_pool: MakePool) -> None:
    """Scenario: the other's objects are all colder, of the same size, and there is free room as well."""
    pool = make_pool(slots=64)
    other, bound = pool.namespace("other"), pool.namespace("bound")
    cold = [f"o{i}" for i in range(40)]
    store(pool, other, cold)
    assert pool.set_quota(bound, 8 * SLOT)
    for i in range(30):
        assert store(pool, bound, [f"b{i}"]) == [Outcome.RESERVED]
        pool.audit()
        assert use_of(pool, "bound").used_bytes <= 8 * SLOT
    assert stored(pool, [f"b{i}" for i in range(30)]) == [f"b{i}" for i in range(22, 30)]
    assert pool.lookup(cold).all()


def test_without_quotas_the_coldest_goes_whosever_it_is(make_pool: MakePool) -> None:
    pool = make_pool(slots=8)
    one, two = pool.namespace("one"), pool.namespace("two")
    store(pool, one, [f"o{i}" for i in range(8)])
    store(pool, two, ["t0", "t1", "t2"])
    assert stored(pool, [f"o{i}" for i in range(8)]) == [f"o{i}" for i in range(5)]


def test_who_can_evict_nothing_of_his_own_is_refused_and_others_are_spared(make_pool: MakePool) -> None:
    pool = make_pool(slots=16)
    other, bound = pool.namespace("other"), pool.namespace("bound")
    store(pool, other, [f"o{i}" for i in range(4)])
    pool.set_quota(bound, 4 * SLOT)
    mine = [f"b{i}" for i in range(4)]
    store(pool, bound, mine)
    pins, _ = pool.acquire(mine)
    assert store(pool, bound, ["new"]) == [Outcome.FULL]
    pool.audit()
    assert pool.lookup([f"o{i}" for i in range(4)]).all()
    assert pool.lookup(mine).all()
    pool.release(pins[:1])
    assert store(pool, bound, ["new", "newer"]) == [Outcome.RESERVED, Outcome.FULL]
    assert stored(pool, mine) == mine[1:]
    pool.audit()


def test_a_batch_beyond_the_quota_stores_a_head(make_pool: MakePool) -> None:
    pool = make_pool(slots=64)
    ns = pool.namespace("a")
    pool.set_quota(ns, 5 * SLOT + 100)
    outcomes = store(pool, ns, [f"k{i}" for i in range(9)])
    assert outcomes == [Outcome.RESERVED] * 5 + [Outcome.FULL] * 4
    outcomes = store(pool, ns, [f"k{i}" for i in range(3, 12)])
    assert outcomes == [Outcome.EXISTS] * 2 + [Outcome.RESERVED] * 3 + [Outcome.FULL] * 4
    assert stored(pool, [f"k{i}" for i in range(12)]) == [f"k{i}" for i in range(3, 8)]
    pool.audit()


def test_a_quota_of_nothing_stores_nothing(make_pool: MakePool) -> None:
    pool = make_pool()
    ns = pool.namespace("a")
    store(pool, ns, ["x", "y"])
    assert pool.set_quota(ns, 0)
    assert not pool.lookup(["x", "y"]).any()
    assert store(pool, ns, ["z"]) == [Outcome.FULL]
    pool.set_quota(ns, None)
    assert store(pool, ns, ["z"]) == [Outcome.RESERVED]
    pool.audit()


def test_a_lower_quota_is_reached_at_once_as_far_as_nobody_holds_objects(make_pool: MakePool) -> None:
    pool = make_pool(slots=600, slab_slots=100)
    ns = pool.namespace("a")
    keys = [f"k{i}" for i in range(600)]
    store(pool, ns, keys)
    pins, _ = pool.acquire(keys[:20])
    assert pool.set_quota(ns, 10 * SLOT)
    assert stored(pool, keys) == keys[:20]
    pool.audit()
    pool.release(pins)
    store(pool, ns, ["new"])
    assert use_of(pool, "a").used_bytes <= 10 * SLOT
    pool.audit()


def test_chains_stay_whole_when_a_namespace_evicts_its_own(make_pool: MakePool) -> None:
    """Whatever of a chain is stored has its parent stored, though blocks are touched in any order."""
    pool = make_pool(slots=200, slab_slots=20)
    ns, other = pool.namespace("a"), pool.namespace("b")
    store(pool, other, [f"o{i}" for i in range(50)])
    pool.set_quota(ns, 40 * SLOT)
    rng = random.Random(5)
    parents: dict[str, str] = {}
    for n in range(80):
        chain = [f"t{n % 5}"] + [f"c{n}.{i}" for i in range(rng.randrange(1, 6))]
        parents |= dict(zip(chain[1:], chain[:-1], strict=True))
        store(pool, ns, chain, [None, *chain[:-1]])
        pool.touch(rng.sample(sorted(parents), min(5, len(parents))))
        pool.audit()
        children = sorted(parents)
        here = pool.lookup(children)
        assert pool.lookup([parents[child] for child in children])[here].all(), n
    assert pool.lookup([f"o{i}" for i in range(50)]).all()


def test_objects_of_several_sizes_share_one_quota(make_pool: MakePool) -> None:
    pool = make_pool(slots=60, slab_slots=6)
    ns = pool.namespace("a")
    pool.set_quota(ns, 12 * SLOT)
    store(pool, ns, [f"s{i}" for i in range(12)])
    tickets, outcomes = pool.reserve(ns, ["big0", "big1"], 2 * OBJECT_BYTES)
    assert outcomes.tolist() == [Outcome.RESERVED] * 2
    pool.publish(tickets)
    assert use_of(pool, "a").used_bytes == 12 * SLOT
    assert stored(pool, [f"s{i}" for i in range(12)]) == [f"s{i}" for i in range(8)]  # the chain's root last
    pool.audit()


def test_a_quota_outlives_the_process_that_set_it(make_pool: MakePool, zygote: Zygote) -> None:
    pool = make_pool(slots=32)
    actor = zygote.spawn("serve", pool.handle.path)
    ns = actor.call("namespace", "a")
    actor.call("set_quota", ns, 4 * SLOT)
    actor.call("arm", 20)
    with pytest.raises(EOFError):
        actor.call("store", ns, [f"x{i}" for i in range(4)])  # dies with the lock: everything is rebuilt
    actor.wait_until_dead()
    store(pool, ns, [f"k{i}" for i in range(12)])
    pool.reap()
    assert use_of(pool, "a").quota_bytes == 4 * SLOT
    assert use_of(pool, "a").used_bytes <= 4 * SLOT
    pool.audit()


@pytest.mark.parametrize("wrong", [-1, 2**64 - 1, 2**70])
def test_what_is_no_quota_is_refused(make_pool: MakePool, wrong: int) -> None:
    pool = make_pool()
    with pytest.raises(ConfigError, match="quota must be"):
        pool.set_quota(pool.namespace("a"), wrong)
    with pytest.raises(ConfigError, match="no such namespace"):
        pool.set_quota(7, 100)


def test_clearing_all_leaves_nothing_and_lets_nothing_reserved_before_appear(make_pool: MakePool) -> None:
    pool = make_pool()
    one, two = pool.namespace("one"), pool.namespace("two")
    store(pool, one, ["a", "b"])
    store(pool, two, ["c"])
    held, _ = pool.acquire(["b"])
    late, _ = pool.reserve(two, ["late"], OBJECT_BYTES)
    assert pool.clear_all()
    pool.audit()
    assert not pool.lookup(["a", "b", "c", "late"]).any()
    assert pool.publish(late).tolist() == [Outcome.STALE]
    assert pool.release(held).tolist() == [Outcome.RELEASED]
    assert pool.stats()["used_bytes"] == 0
    assert store(pool, one, ["a"]) == [Outcome.RESERVED]
    pool.audit()


def test_what_was_removed_lingers_as_long_as_somebody_holds_it(make_pool: MakePool, zygote: Zygote) -> None:
    pool = make_pool()
    one, two = pool.namespace("one"), pool.namespace("two")
    store(pool, one, ["a", "b", "c", "d"])
    store(pool, two, ["e"])
    held, _ = pool.acquire(["a", "b", "e"])
    pool.acquire(["a"])
    actor = zygote.spawn("serve", pool.handle.path)
    actor.call("acquire", ["c"])
    assert pool.lingering(one) == 0
    pool.remove(["a"])
    assert pool.lingering(one) == 1
    assert pool.clear_all()
    assert (pool.lingering(one), pool.lingering(two)) == (3, 1)
    store(pool, one, ["a", "f"])
    pool.acquire(["a", "f"])
    actor.kill()
    pool.reap()
    assert (pool.lingering(one), pool.lingering(two)) == (2, 1)
    pool.release(held)
    assert (pool.lingering(one), pool.lingering(two)) == (1, 0)
    pool.audit()
    with pytest.raises(ConfigError, match="no such namespace"):
        pool.lingering(7)
