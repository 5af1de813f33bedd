"""Each verb's outcomes, one rule a test."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import numpy as np
import pytest
from actors import OBJECT_BYTES, pattern, read_payload, store

from umbp.errors import ConfigError, SegmentError
from umbp.pool import KeyState, Outcome, Pool

MakePool = Callable[..., Pool]


def test_a_key_is_a_miss_until_it_is_published(make_pool: MakePool) -> None:
    pool = make_pool()
    ns = pool.namespace("a")
    tickets, outcomes = pool.reserve(ns, ["k"], OBJECT_BYTES)
    assert outcomes.tolist() == [Outcome.RESERVED]
    assert pool.lookup(["k"]).tolist() == [False]
    assert pool.acquire(["k"])[1].tolist() == [Outcome.MISS]
    assert pool.reserve(ns, ["k"], OBJECT_BYTES)[1].tolist() == [Outcome.BUSY]
    assert pool.publish(tickets).tolist() == [Outcome.PUBLISHED]
    assert pool.lookup(["k"]).tolist() == [True]
    assert pool.reserve(ns, ["k"], OBJECT_BYTES)[1].tolist() == [Outcome.EXISTS]
    pool.audit()


def test_a_key_that_is_being_written_is_told_from_one_that_is_not_there(make_pool: MakePool) -> None:
    pool = make_pool()
    ns = pool.namespace("a")
    tickets, _ = pool.reserve(ns, ["a", "b", "c"], OBJECT_BYTES)
    pool.publish(tickets[:1])
    keys = ["a", "b", "c", "d"]
    written, absent = KeyState.RESERVED, KeyState.ABSENT
    assert pool.states(keys).tolist() == [KeyState.PUBLISHED, written, written, absent]
    pool.abandon(tickets[2:])
    assert pool.states(keys).tolist() == [KeyState.PUBLISHED, written, absent, absent]
    pool.clear(ns)
    assert pool.states(keys).tolist() == [absent] * 4
    assert pool.publish(tickets[1:2]).tolist() == [Outcome.STALE]
    assert pool.states([]).tolist() == []
    pool.audit()


def test_a_ticket_is_good_for_one_ending(make_pool: MakePool) -> None:
    pool = make_pool()
    ns = pool.namespace("a")
    tickets, _ = pool.reserve(ns, ["a", "b"], OBJECT_BYTES)
    assert pool.release(tickets).tolist() == [Outcome.INVALID] * 2
    assert pool.publish(tickets[:1]).tolist() == [Outcome.PUBLISHED]
    assert pool.publish(tickets[:1]).tolist() == [Outcome.INVALID]
    assert pool.abandon(tickets).tolist() == [Outcome.INVALID, Outcome.ABANDONED]
    assert pool.abandon(tickets).tolist() == [Outcome.INVALID] * 2
    assert pool.lookup(["a", "b"]).tolist() == [True, False]
    pool.audit()


def test_a_double_release_is_reported_and_not_applied(make_pool: MakePool) -> None:
    pool = make_pool()
    store(pool, pool.namespace("a"), ["a"])
    first, _ = pool.acquire(["a"])
    pool.acquire(["a"])
    assert pool.release(first).tolist() == [Outcome.RELEASED]
    assert pool.release(first).tolist() == [
        Outcome.RELEASED
    ]  # the second acquire's: same slot, same generation
    assert pool.release(first).tolist() == [Outcome.INVALID]
    pool.audit()


def test_tickets_made_up_are_invalid(make_pool: MakePool) -> None:
    pool = make_pool()
    store(pool, pool.namespace("a"), ["a"])
    made_up = np.array([0, 1, 2**64 - 1, 1 << 63, 5 << 32 | 1], dtype=np.uint64)
    for verb in (pool.publish, pool.abandon, pool.release):
        assert set(verb(made_up).tolist()) == {Outcome.INVALID}
    assert pool.payload(made_up)[0].tolist() == [0] * 5
    pool.audit()


def test_a_pinned_object_survives_any_pressure(make_pool: MakePool) -> None:
    pool = make_pool(slots=8)
    ns = pool.namespace("a")
    store(pool, ns, ["keep"])
    ticket, _ = pool.acquire(["keep"])
    for i in range(50):
        store(pool, ns, [f"x{i}"])
    assert read_payload(pool, int(ticket[0])) == pattern("keep")
    assert store(pool, ns, [f"y{i}" for i in range(8)]) == [Outcome.RESERVED] * 7 + [Outcome.FULL]
    pool.release(ticket)
    pool.audit()
    assert store(pool, ns, [f"z{i}" for i in range(8)]) == [Outcome.RESERVED] * 8
    assert pool.lookup(["keep"]).tolist() == [False]


def test_a_batch_larger_than_the_pool_keeps_a_contiguous_head(make_pool: MakePool) -> None:
    pool = make_pool(slots=300)
    ns = pool.namespace("a")
    keys = [f"k{i}" for i in range(700)]
    tickets, outcomes = pool.reserve(ns, keys, OBJECT_BYTES, [None, *keys[:-1]])
    assert outcomes.tolist() == [Outcome.RESERVED] * 300 + [Outcome.FULL] * 400
    assert (tickets[300:] == 0).all()
    pool.publish(tickets[:300])
    pool.audit()
    assert pool.lookup(keys).tolist() == [True] * 300 + [False] * 400


def test_what_a_call_names_is_not_evicted_for_it(make_pool: MakePool) -> None:
    pool = make_pool(slots=8)
    ns = pool.namespace("a")
    old = ["p0", "p1", "p2"]
    store(pool, ns, old, [None, "p0", "p1"])
    store(pool, ns, ["q0", "q1", "q2", "q3", "q4"])  # younger than the p's
    new = [f"n{i}" for i in range(10)]
    outcomes = store(pool, ns, old + new, [None, "p0", "p1", "p2", *new[:-1]])
    assert outcomes == [Outcome.EXISTS] * 3 + [Outcome.RESERVED] * 5 + [Outcome.FULL] * 5
    assert pool.lookup(old).all()
    pool.audit()


def test_an_object_too_large_touches_nothing(make_pool: MakePool) -> None:
    pool = make_pool(slots=8)
    ns = pool.namespace("a")
    store(pool, ns, ["a", "b"])
    sizes = np.array([OBJECT_BYTES, 1 << 40, 0, OBJECT_BYTES], dtype=np.uint64)
    outcomes = pool.reserve(ns, ["w", "x", "y", "z"], sizes)[1]
    assert outcomes.tolist() == [Outcome.RESERVED, Outcome.TOO_LARGE, Outcome.TOO_LARGE, Outcome.RESERVED]
    assert pool.lookup(["a", "b"]).all()
    pool.audit()


def test_a_repeated_key_is_reserved_once(make_pool: MakePool) -> None:
    pool = make_pool(slots=8)
    outcomes = pool.reserve(pool.namespace("a"), ["a", "a", "b", "a"], OBJECT_BYTES)[1]
    assert outcomes.tolist() == [Outcome.RESERVED, Outcome.BUSY, Outcome.RESERVED, Outcome.BUSY]
    pool.audit()


def test_what_was_reserved_before_a_clear_cannot_be_published(make_pool: MakePool) -> None:
    pool = make_pool()
    ns, other = pool.namespace("a"), pool.namespace("b")
    store(pool, ns, ["a1", "a2"])
    store(pool, other, ["b1"])
    held, _ = pool.acquire(["a2"])
    tickets, _ = pool.reserve(ns, ["late"], OBJECT_BYTES)
    cursor = pool.removed_head()
    assert pool.clear(ns)
    pool.audit()
    assert pool.lookup(["a1", "a2", "b1"]).tolist() == [False, False, True]
    assert len(pool.removed_since(cursor)[0]) == 2
    assert store(pool, ns, ["late"]) == [
        Outcome.RESERVED
    ]  # in the new epoch, while the old one is still reserved
    assert pool.publish(tickets).tolist() == [Outcome.STALE]
    assert pool.lookup(["late"]).tolist() == [True]
    assert read_payload(pool, int(held[0])) == pattern("a2")  # a pin outlives the clear
    assert pool.release(held).tolist() == [Outcome.RELEASED]
    pool.audit()
    assert pool.stats()["objects"] == 2


def test_a_removed_object_is_gone_at_once_and_freed_with_its_last_pin(make_pool: MakePool) -> None:
    pool = make_pool()
    ns = pool.namespace("a")
    store(pool, ns, ["a", "b"])
    held, _ = pool.acquire(["a"])
    pool.reserve(ns, ["w"], OBJECT_BYTES)
    assert pool.remove(["a", "b", "c", "w"]).tolist() == [
        Outcome.REMOVED,
        Outcome.REMOVED,
        Outcome.MISS,
        Outcome.BUSY,
    ]
    assert not pool.lookup(["a", "b"]).any()
    used = pool.stats()["used_bytes"]
    assert read_payload(pool, int(held[0])) == pattern("a")
    assert store(pool, ns, ["a"]) == [Outcome.RESERVED]  # a new object under the same key meanwhile
    pool.audit()
    pool.release(held)
    pool.audit()
    assert pool.stats()["used_bytes"] == used
    assert pool.lookup(["a"]).all()


def test_removals_replayed_equal_what_can_be_found(make_pool: MakePool) -> None:
    pool = make_pool(slots=16)
    ns = pool.namespace("a")
    alive: set[tuple[int, int]] = set()
    cursor = pool.removed_head()
    for step in range(60):
        keys = [f"k{step}.{i}" for i in range(5)]
        store(pool, ns, keys)
        alive |= {tuple(d) for d in pool.digests(keys).tolist()}
        if step % 7 == 0:
            pool.remove(keys[:2])
        digests, cursor, is_lost = pool.removed_since(cursor)
        assert not is_lost
        alive -= {tuple(d) for d in digests.tolist()}
        assert len(alive) == pool.stats()["objects"]


def test_a_reader_of_removals_that_falls_behind_is_told(make_pool: MakePool) -> None:
    pool = make_pool(slots=512, slab_slots=512)
    ns = pool.namespace("a")
    cursor = pool.removed_head()
    keys = [f"k{i}" for i in range(512)]
    for _ in range(130):
        pool.publish(pool.reserve(ns, keys, OBJECT_BYTES)[0])
        pool.remove(keys)
    digests, head, is_lost = pool.removed_since(cursor)
    assert is_lost
    assert len(digests) == 0
    assert head == pool.removed_head() == 130 * 512
    assert len(pool.removed_since(head - 65535)[0]) == 65535
    assert pool.removed_since(head + 1)[2]  # a cursor from another pool


def test_raw_hashes_are_the_same_keys(make_pool: MakePool) -> None:
    pool = make_pool(slots=64)
    ns = pool.namespace("a")
    prefix = "umbp:vllm:v1:x:tp0:pcp0:dcp0:pp0:g0:"
    hashes = [bytes([i]) * 32 for i in range(20)]
    keys = [prefix + h.hex() for h in hashes]
    store(pool, ns, keys[:8])
    assert (pool.digests(keys) == pool.digests_raw(prefix, hashes)).all()
    assert (pool.lookup(keys) == pool.lookup_raw(prefix, hashes)).all()
    assert pool.match(prefix, hashes) == 8
    assert pool.match(prefix, hashes[8:]) == 0
    assert pool.match(prefix, []) == 0
    pool.remove([keys[3]])
    assert pool.match(prefix, hashes) == 3
    tickets, outcomes = pool.acquire_raw(prefix, hashes[:5])
    assert outcomes.tolist() == [Outcome.HIT] * 3 + [Outcome.MISS, Outcome.HIT]
    pool.release(tickets[outcomes == Outcome.HIT])
    tickets, outcomes = pool.reserve_raw(ns, prefix, hashes[8:10], 100, [hashes[7], hashes[8]])
    pool.publish(tickets)
    assert pool.lookup(keys[8:10]).all()
    assert pool.touch_raw(prefix, hashes[:2]).tolist() == [Outcome.TOUCHED] * 2
    pool.audit()


@pytest.mark.parametrize("gap", [0, 1, 31, 32, 33, 95, 96, 97, 991, 992, 1503, 1504, 1999, None])
def test_a_match_ends_at_the_first_gap_however_far(make_pool: MakePool, gap: int | None) -> None:
    pool = make_pool(slots=2000, slab_slots=2000)
    hashes = [i.to_bytes(4, "big") * 8 for i in range(2000)]
    pool.publish(pool.reserve_raw(pool.namespace("a"), "p:", hashes, 10)[0])
    if gap is not None:
        pool.remove(["p:" + hashes[gap].hex()])
    assert pool.match("p:", hashes) == (2000 if gap is None else gap)


def test_keys_may_be_any_text(make_pool: MakePool) -> None:
    pool = make_pool()
    keys = ["", "ü", "日本", "\0", "x" * 100_000]
    store(pool, pool.namespace("a"), keys)
    assert pool.lookup(keys).all()
    with pytest.raises(UnicodeEncodeError):
        pool.lookup(["\ud800"])
    with pytest.raises(TypeError):
        pool.lookup([b"bytes"])  # type: ignore[list-item]
    pool.audit()


def test_columns_of_unequal_length_are_refused(make_pool: MakePool) -> None:
    pool = make_pool()
    ns = pool.namespace("a")
    with pytest.raises(ConfigError):
        pool.reserve(ns, ["a", "b"], OBJECT_BYTES, [None])
    with pytest.raises(ConfigError):
        pool.reserve(ns, ["a", "b"], np.array([1], dtype=np.uint64))
    with pytest.raises(ConfigError):
        pool.reserve(ns + 1, ["a"], OBJECT_BYTES)
    with pytest.raises(ConfigError):
        pool.clear(ns + 1)
    pool.audit()


def test_empty_batches_are_fine(make_pool: MakePool) -> None:
    pool = make_pool()
    ns = pool.namespace("a")
    assert len(pool.lookup([])) == 0
    assert [len(c) for c in pool.reserve(ns, [], OBJECT_BYTES)] == [0, 0]
    assert len(pool.publish([])) == len(pool.release([])) == len(pool.abandon([])) == 0


def test_a_starving_size_takes_slabs_from_a_richer_one(make_pool: MakePool) -> None:
    pool = make_pool(slots=64, slab_slots=8)
    ns = pool.namespace("a")
    small = [f"s{i}" for i in range(64)]
    assert store(pool, ns, small) == [Outcome.RESERVED] * 64
    held, _ = pool.acquire(small[:2])
    outcomes = pool.reserve(ns, [f"big{i}" for i in range(3)], 20_000)[1]
    assert outcomes.tolist() == [Outcome.RESERVED] * 3
    pool.audit()
    assert pool.lookup(small[:2]).all()
    assert pool.stats()["slab_moves"] == 3
    pool.release(held)


def test_an_empty_slab_serves_any_size(make_pool: MakePool) -> None:
    pool = make_pool(slots=64, slab_slots=8)
    ns = pool.namespace("a")
    keys = [f"s{i}" for i in range(64)]
    store(pool, ns, keys)
    pool.remove(keys)
    assert pool.stats()["free_slabs"] == 8
    outcomes = pool.reserve(ns, [f"big{i}" for i in range(8)], 30_000)[1]
    assert outcomes.tolist() == [Outcome.RESERVED] * 8
    pool.audit()


def test_many_sizes_share_one_pool(make_pool: MakePool) -> None:
    pool = make_pool(slots=256, slab_slots=32)
    ns = pool.namespace("a")
    rng = np.random.default_rng(5)
    for step in range(80):
        keys = [f"k{step}.{i}" for i in range(6)]
        sizes = rng.integers(1, 120_000, 6).astype(np.uint64)
        tickets, outcomes = pool.reserve(ns, keys, sizes)
        addresses, lengths = pool.payload(tickets)
        mine = outcomes == Outcome.RESERVED
        assert (lengths[mine] == sizes[mine]).all()
        assert (addresses[mine] % 4096 == 0).all()
        pool.publish(tickets[mine])
        pool.audit()
    assert pool.stats()["published"] > 80


def test_watermarks_evict_from_high_to_low(make_pool: MakePool) -> None:
    pool = make_pool(slots=100, slab_slots=10, high_watermark=0.9, low_watermark=0.5)
    ns = pool.namespace("a")
    for i in range(90):
        store(pool, ns, [f"k{i}"])
    assert pool.stats()["objects"] == 90
    store(pool, ns, ["over"])
    assert pool.stats()["objects"] == 50
    pool.audit()


def test_with_the_default_watermarks_just_what_is_needed_is_evicted(make_pool: MakePool) -> None:
    pool = make_pool(slots=100, slab_slots=10)
    ns = pool.namespace("a")
    for i in range(130):
        store(pool, ns, [f"k{i}"])
        assert pool.stats()["objects"] == min(i + 1, 100)
    assert pool.lookup([f"k{i}" for i in range(130)]).tolist() == [False] * 30 + [True] * 100


def test_threads_share_a_pool(make_pool: MakePool) -> None:
    pool = make_pool(slots=64, lock_patience_s=5.0)
    ns = pool.namespace("a")
    failures: list[BaseException] = []

    def work(name: int) -> None:
        try:
            for i in range(150):
                keys = [f"{(name + i) % 5}.{j}" for j in range(8)]
                store(pool, ns, keys)
                tickets, outcomes = pool.acquire(keys)
                mine = tickets[outcomes == Outcome.HIT]
                for key, ticket, outcome in zip(keys, tickets.tolist(), outcomes.tolist(), strict=True):
                    if outcome == Outcome.HIT:
                        assert read_payload(pool, ticket) == pattern(key)
                assert set(pool.release(mine).tolist()) <= {Outcome.RELEASED}
        except BaseException as error:  # noqa: BLE001 - a thread's failure is the test's
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    pool.audit()
    assert pool.stats()["pinned_here"] == 0


def test_a_closed_pool_says_so(make_pool: MakePool) -> None:
    pool = make_pool()
    assert "0 objects" in repr(pool)
    pool.close()
    pool.close()
    assert repr(pool) == "<Pool closed>"
    with pytest.raises(SegmentError, match="closed"):
        pool.lookup(["a"])


def test_columns_outlive_the_pool(make_pool: MakePool) -> None:
    pool = make_pool()
    tickets, outcomes = pool.reserve(pool.namespace("a"), ["a"], OBJECT_BYTES)
    pool.close()
    del pool
    gc.collect()
    assert outcomes.tolist() == [Outcome.RESERVED]
    assert tickets[0] != 0
