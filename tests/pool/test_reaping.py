"""What the dead held is taken back by whoever uses the pool next, whatever he does, and in the meantime it is
shown as theirs.
"""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from actors import OBJECT_BYTES, store
from zygote import Actor, Zygote

from umbp.errors import SegmentError
from umbp.pool import Outcome, Pool, inspect_pool

SLAB = 8 * 4096
PATIENCE_S = 20.0


def until_reaped(pool: Pool, number: int, deed: Callable[[], object]) -> None:
    """Does it again and again, as an engine does with each step."""
    deadline_s = time.monotonic() + PATIENCE_S
    while pool.stats()["reaped"] < number:
        assert time.monotonic() < deadline_s, pool
        deed()


@pytest.fixture
def shared(tmp_path: Path) -> Iterator[Pool]:
    """A pool in a file, with eight objects."""
    path = tmp_path / "umbp-shared"
    with Pool.create(path, 16 * SLAB, slab_bytes=SLAB, min_object_bytes=OBJECT_BYTES) as pool:
        store(pool, pool.namespace("a"), [f"k{i}" for i in range(8)])
        yield pool


def busy_engine(zygote: Zygote, path: str | None) -> Actor:
    """Reads some objects and writes others."""
    actor = zygote.spawn("serve", path)
    actor.call("acquire", ["k0", "k1", "k2"])
    actor.call("reserve", actor.call("namespace", "a"), ["new0", "new1"], OBJECT_BYTES)
    return actor


def shown(path: str | None) -> list[tuple[bool, int]]:
    assert path is not None
    return [(each.is_alive, each.pinned_slots) for each in inspect_pool(path).processes]


def test_what_a_whole_engine_held_is_shown_as_the_deads_until_the_next_comes(
    shared: Pool, zygote: Zygote
) -> None:
    """Scenario: all processes of a pool's only engine are killed; nobody is left to take anything back."""
    path = str(shared.path)
    engine = [busy_engine(zygote, path), busy_engine(zygote, path)]
    shared.close()
    for actor in engine:
        actor.kill()
    assert shown(path) == [(False, 5), (False, 3)]
    with Pool.attach(path) as pool:
        assert shown(path) == [(True, 0)]
        stats = pool.stats()
        assert (stats["processes"], stats["pinned"], stats["reaped"]) == (1, 0, 2)
        pool.audit()


DEEDS: dict[str, Callable[[Pool, int], Callable[[], object]]] = {
    "touch": lambda pool, ns: lambda: pool.touch(["k7"]),
    "acquire": lambda pool, ns: lambda: pool.acquire(["absent"]),
    "release": lambda pool, ns: lambda: pool.release([0]),
    "publish": lambda pool, ns: lambda: pool.publish([0]),
    "abandon": lambda pool, ns: lambda: pool.abandon([0]),
    "remove": lambda pool, ns: lambda: pool.remove(["absent"]),
    "reserve": lambda pool, ns: lambda: pool.reserve(ns, ["k7"], OBJECT_BYTES),
    "quota": lambda pool, ns: lambda: pool.set_quota(ns, None),
    "clear": lambda pool, ns: lambda: pool.clear(ns),
    "lingering": lambda pool, ns: lambda: pool.lingering(ns),
}


@pytest.mark.parametrize("deed", DEEDS.values(), ids=DEEDS.keys())
def test_any_verb_of_a_living_process_takes_back_what_the_dead_held(
    shared: Pool, zygote: Zygote, deed: Callable[[Pool, int], Callable[[], object]]
) -> None:
    """Scenario: one of two engines is killed; the other is idle, then does one thing only, and has room."""
    do = deed(shared, shared.namespace("a"))
    busy_engine(zygote, shared.path).kill()
    assert shown(shared.path) == [(True, 0), (False, 5)]  # nobody has come by
    until_reaped(shared, 1, do)
    assert shown(shared.path) == [(True, 0)]
    assert shared.stats()["pinned"] == 0
    shared.audit()


def test_what_the_dead_had_pinned_is_evicted_in_its_turn(shared: Pool, zygote: Zygote) -> None:
    """Scenario: the dead pinned most of a full pool; the rest turns over fast enough that nobody is ever
    refused, so nobody looks for more room.
    """
    ns = shared.namespace("a")
    slots = shared.stats()["slots"]
    olds = [f"k{i}" for i in range(slots - 16)]
    store(shared, ns, olds)
    actor = zygote.spawn("serve", shared.path)
    actor.call("acquire", olds)
    actor.kill()
    number = iter(range(1 << 30))

    def turn_over() -> None:
        assert store(shared, ns, [f"fresh{next(number)}" for _ in range(4)]) == [Outcome.RESERVED] * 4

    until_reaped(shared, 1, turn_over)
    for _ in range(slots // 4):
        turn_over()
    assert not shared.lookup(olds).any()
    assert shared.stats()["full"] == 0
    shared.audit()


def test_much_is_taken_back_in_parts_so_that_no_call_lasts_long(
    make_pool: Callable[..., Pool], zygote: Zygote
) -> None:
    pool = make_pool(slots=12288, slab_slots=1024)
    ns = pool.namespace("a")
    keys = [f"k{i}" for i in range(12000)]
    tickets, _ = pool.reserve(ns, keys, OBJECT_BYTES)
    pool.publish(tickets)
    actor = zygote.spawn("serve", pool.handle.path)
    actor.call("acquire", keys)
    actor.kill()
    left = [pool.stats()["pinned"]]

    def look() -> None:
        pool.touch(["k0"])
        now = pool.stats()["pinned"]
        if now != left[-1]:
            left.append(now)

    until_reaped(pool, 1, look)
    assert left == [12000, 12000 - 16 * 256, 12000 - 32 * 256, 0]
    pool.audit()


def test_who_is_taken_for_dead_is_shut_out_before_the_first_of_his_pins_is_returned(
    make_pool: Callable[..., Pool], zygote: Zygote
) -> None:
    """Scenario: a living process has lost its byte lock, and goes on while it is being reaped in parts."""
    pool = make_pool(slots=6144, slab_slots=1024)
    keys = [f"k{i}" for i in range(6000)]
    tickets, _ = pool.reserve(pool.namespace("a"), keys, OBJECT_BYTES)
    pool.publish(tickets)
    careless = zygote.spawn("serve", pool.handle.path)
    careless.call("acquire", keys)
    careless.call("close_a_duplicate")
    deadline_s = time.monotonic() + PATIENCE_S
    while pool.stats()["pinned"] == 6000:
        assert time.monotonic() < deadline_s
        pool.touch(["k0"])
    assert pool.stats()["reaped"] == 0  # begun, not done
    with pytest.raises(RuntimeError, match="SegmentError: this process was taken for dead"):
        careless.call("acquire", ["k0"])
    until_reaped(pool, 1, lambda: pool.touch(["k0"]))
    assert pool.stats()["pinned"] == 0
    pool.audit()


def test_a_reaper_that_dies_is_reaped_with_the_dead(make_pool: Callable[..., Pool], zygote: Zygote) -> None:
    for countdown in itertools.count(1):
        pool = make_pool(slots=32)
        with zygote.episode():
            store(pool, pool.namespace("a"), [f"k{i}" for i in range(8)])
            reaper = zygote.spawn("serve", pool.handle.path)
            reaper.call("stats")  # it is attached
            busy_engine(zygote, pool.handle.path).kill()
            reaper.call("arm", countdown)
            is_struck = False
            try:
                reaper.call("reap")
                reaper.kill()
            except EOFError:
                is_struck = True
                reaper.wait_until_dead()
            pool.audit()
            pool.reap()
            stats = pool.stats()
            assert (stats["processes"], stats["pinned"], stats["reaped"]) == (1, 0, 2)
            assert stats["objects"] == 8
            pool.audit()
        pool.close()
        if not is_struck:
            break
    assert countdown > 15


def test_a_child_that_outlives_its_parent_keeps_nothing_of_the_parents_alive(
    shared: Pool, zygote: Zygote
) -> None:
    """Scenario: a helper that an engine has forked lives on with the engine's descriptors."""
    actor = busy_engine(zygote, shared.path)
    child = actor.call("fork_a_child")
    try:
        actor.kill()
        os.kill(child, 0)
        until_reaped(shared, 1, lambda: shared.touch(["k7"]))
        assert shown(shared.path) == [(True, 0)]
    finally:
        os.kill(child, signal.SIGKILL)


def test_the_place_of_a_dead_process_that_another_takes_counts_as_reaped(
    shared: Pool, zygote: Zygote
) -> None:
    busy_engine(zygote, shared.path).kill()
    zygote.spawn("serve", shared.path).call("stats")
    assert shown(shared.path) == [(True, 0), (True, 0)]
    assert shared.stats()["reaped"] == 1


@pytest.mark.parametrize("deed", ["resize", "clear_all", "destroy"])
def test_the_dead_stand_in_nobodys_way(shared: Pool, zygote: Zygote, deed: str) -> None:
    """Scenario: an engine dies with a pin in each slab; one who is attached shrinks, clears or destroys."""
    ns = shared.namespace("a")
    keys = [f"f{i}" for i in range(shared.stats()["slots"] - 8)]
    store(shared, ns, keys)
    actor = zygote.spawn("serve", shared.path)
    actor.call("acquire", keys)
    actor.kill()
    path = str(shared.path)
    if deed == "resize":
        assert shared.resize(4 * SLAB) == 4 * SLAB
        shared.audit()
    elif deed == "clear_all":
        assert shared.clear_all()
        until_reaped(shared, 1, lambda: shared.touch(["absent"]))
        assert shared.stats()["used_bytes"] == 0
        shared.audit()
    else:
        shared.destroy()
        with pytest.raises(SegmentError):
            inspect_pool(path)


def test_one_who_dies_while_a_pool_shrinks_holds_it_up_for_a_moment_only(
    shared: Pool, zygote: Zygote
) -> None:
    """Scenario: what an engine promises to its requests, more than the pool is to keep, is in the way until
    the engine is killed.
    """
    ns = shared.namespace("a")
    keys = [f"f{i}" for i in range(shared.stats()["slots"] - 8)]
    store(shared, ns, keys)
    actor = zygote.spawn("serve", shared.path)
    actor.call("stats")

    def progress(done_bytes: int, _all_bytes: int) -> None:
        if done_bytes == 0:
            actor.call("acquire", keys[:32])
        elif actor.state() not in "ZX":
            actor.kill()

    assert shared.resize(SLAB, progress=progress) == SLAB
    assert shared.stats()["reaped"] == 1
    shared.audit()
