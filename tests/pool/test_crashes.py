"""Whoever dies, at whatever instruction, leaves nothing behind; whoever is stopped costs "not now", not a
hang."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from actors import OBJECT_BYTES, pattern, read_payload, store
from zygote import CAN_UNSHARE, Zygote, only_child

from umbp.pool import Outcome, Pool


def assert_nothing_is_left(pool: Pool, slots: int) -> None:
    """Every slot can be had again, every object that is found has its own key's bytes, all counts agree."""
    pool.reap()
    pool.audit()
    stats = pool.stats()
    assert stats["processes"] == 1
    ns = pool.namespace("check")
    keys = [f"check{i}" for i in range(slots)]
    tickets, outcomes = pool.reserve(ns, keys, OBJECT_BYTES)
    assert set(outcomes.tolist()) == {Outcome.RESERVED}, pool
    pool.abandon(tickets)
    pool.audit()
    assert pool.stats()["used_bytes"] == 0


def assert_payloads_are_right(pool: Pool, keys: list[str]) -> int:
    tickets, outcomes = pool.acquire(keys)
    found = 0
    for key, ticket, outcome in zip(keys, tickets.tolist(), outcomes.tolist(), strict=True):
        if outcome == Outcome.HIT:
            found += 1
            payload = read_payload(pool, ticket)
            assert payload == pattern(key, len(payload))
    pool.release(tickets[outcomes == Outcome.HIT])
    return found


def test_a_death_at_each_point_of_every_verb_is_repaired(
    make_pool: Callable[..., Pool], zygote: Zygote
) -> None:
    countdown, is_done = 0, False
    keys = (
        [f"s{i}" for i in range(12)] + [f"more{i}" for i in range(40)] + ["a1", "a2", "a3", "late", "again"]
    )
    while not is_done:
        countdown += 1
        pool = make_pool(slots=48)
        with zygote.episode():
            actor = zygote.spawn("script", pool.handle.path, countdown)
            try:
                assert actor.receive() == "done"
                is_done = True
            except EOFError:
                actor.wait_until_dead()
            pool.audit()
            for key in ("a2", "a3"):  # published by the walk without content
                pool.remove([key])
            assert_payloads_are_right(pool, keys)
            assert_nothing_is_left(pool, 48)
            pool.close()
    assert countdown > 200


def test_a_death_at_each_point_of_the_repair_is_repaired(
    make_pool: Callable[..., Pool], zygote: Zygote
) -> None:
    """Scenario: the lock's holder dies, the next to take it dies while it repairs, and so on."""
    repaired = 0
    for countdown in range(1, 60):
        pool = make_pool(slots=48)
        ns = pool.namespace("script")
        keys = [f"x{i}" for i in range(30)]
        store(pool, ns, keys, [None, *keys[:-1]])
        pins, _ = pool.acquire(keys[3:6])
        with zygote.episode():
            holder = zygote.spawn("serve", pool.handle.path)
            holder.call("arm", 30)
            with pytest.raises(EOFError):
                holder.call("store", ns, [f"y{i}" for i in range(30)])
            holder.wait_until_dead()
            for _ in range(2):
                successor = zygote.spawn("script", pool.handle.path, countdown)
                with pytest.raises(EOFError):
                    successor.receive()
                successor.wait_until_dead()
            assert pool.release(pins).tolist() == [Outcome.RELEASED] * 3
            repaired += pool.stats()["takeovers"] >= 3
            pool.audit()
            assert_payloads_are_right(pool, keys)
            assert_nothing_is_left(pool, 48)
        pool.close()
    assert repaired > 20


def test_a_reaped_process_gives_back_pins_and_reservations(
    make_pool: Callable[..., Pool], zygote: Zygote
) -> None:
    pool = make_pool(slots=8)
    ns = pool.namespace("a")
    store(pool, ns, ["x", "y"])
    actor = zygote.spawn("serve", pool.handle.path)
    actor.call("acquire", ["x", "y", "x"])
    actor.call("reserve", ns, ["new"], OBJECT_BYTES)
    assert pool.reserve(ns, ["new"], OBJECT_BYTES)[1].tolist() == [Outcome.BUSY]
    pool.remove(["y"])
    pool.audit()
    actor.kill()
    assert pool.reap() == 1
    pool.audit()
    assert pool.lookup(["x", "y", "new"]).tolist() == [True, False, False]
    assert_nothing_is_left(pool, 8)


def test_a_zombie_is_dead(make_pool: Callable[..., Pool], zygote: Zygote) -> None:
    """Scenario: the holder of the lock has died and its parent never waits for it."""
    pool = make_pool()
    actor = zygote.spawn("serve", pool.handle.path)
    ns = actor.call("namespace", "a")
    actor.call("arm", 4)
    with pytest.raises(EOFError):
        actor.call("store", ns, ["k1", "k2"])
    actor.wait_until_dead()
    assert actor.state() == "Z"
    assert store(pool, ns, ["k1"]) == [Outcome.RESERVED]
    assert pool.stats()["takeovers"] == 1
    pool.audit()


def test_a_writer_waits_for_no_dead_writer(make_pool: Callable[..., Pool], zygote: Zygote) -> None:
    """Scenario: killed between reserve and publish; no janitor has run; the key must become storable
    again."""
    pool = make_pool()
    actor = zygote.spawn("serve", pool.handle.path)
    ns = actor.call("namespace", "a")
    actor.call("reserve", ns, ["k"], OBJECT_BYTES)
    actor.kill()
    assert store(pool, ns, ["k"]) == [Outcome.BUSY]  # and this call has seen that its writer is dead
    assert store(pool, ns, ["k"]) == [Outcome.RESERVED]


def test_a_full_pool_takes_back_what_the_dead_hold(make_pool: Callable[..., Pool], zygote: Zygote) -> None:
    pool = make_pool(slots=8)
    actor = zygote.spawn("serve", pool.handle.path)
    ns = actor.call("namespace", "a")
    actor.call("reserve", ns, [f"k{i}" for i in range(8)], OBJECT_BYTES)
    assert store(pool, ns, ["n"]) == [Outcome.FULL]
    actor.kill()
    assert store(pool, ns, ["n"]) == [Outcome.RESERVED]


def test_a_stopped_lock_holder_costs_not_now_and_recovers(
    make_pool: Callable[..., Pool], zygote: Zygote
) -> None:
    pool = make_pool()
    ns = pool.namespace("a")
    store(pool, ns, ["x", "y"])
    held, _ = pool.acquire(["x"])
    mine, _ = pool.reserve(ns, ["mine"], OBJECT_BYTES)
    actor = zygote.spawn("serve", pool.handle.path)
    actor.call("arm", 5, True)
    actor.send("store", ns, ["k1", "k2", "k3"])
    actor.wait_until_stopped()

    started = time.monotonic()
    assert pool.acquire(["x", "y"])[1].tolist() == [Outcome.NOT_NOW] * 2
    assert pool.reserve(ns, ["n"], OBJECT_BYTES)[1].tolist() == [Outcome.NOT_NOW]
    assert pool.touch(["x"]).tolist() == [Outcome.NOT_NOW]
    assert pool.remove(["x"]).tolist() == [Outcome.NOT_NOW]
    assert time.monotonic() - started < 0.5
    assert pool.lookup(["x", "y", "k1"]).tolist() == [True, True, False]
    assert pool.publish(mine).tolist() == [Outcome.NOT_NOW]
    assert pool.release(held).tolist() == [Outcome.DEFERRED]
    assert pool.abandon(mine).tolist() == [Outcome.DEFERRED]
    assert pool.stats()["deferred_here"] == 2
    assert time.monotonic() - started < 2
    assert pool.stats()["not_now"] >= 6
    assert pool.stats()["takeovers"] == 0

    os.kill(actor.pid, signal.SIGCONT)
    assert actor.receive() == [Outcome.RESERVED] * 3
    pool.acquire(["nothing"])  # any verb that gets the lock does what was deferred
    assert pool.stats()["deferred_here"] == 0
    assert pool.stats()["pinned_here"] == 0
    pool.audit()
    assert pool.lookup(["k1", "k2", "k3", "mine"]).tolist() == [True, True, True, False]


def test_a_stopped_holder_that_is_killed_is_taken_over(
    make_pool: Callable[..., Pool], zygote: Zygote
) -> None:
    pool = make_pool()
    ns = pool.namespace("a")
    actor = zygote.spawn("serve", pool.handle.path)
    actor.call("arm", 9, True)
    actor.send("store", ns, ["k1", "k2", "k3"])
    actor.wait_until_stopped()
    assert pool.acquire(["k1"])[1].tolist() == [Outcome.NOT_NOW]
    actor.kill()
    assert pool.acquire(["k1"])[1].tolist() == [Outcome.MISS]
    assert_nothing_is_left(pool, 32)


def test_the_successor_in_a_process_slot_inherits_nothing(
    make_pool: Callable[..., Pool], zygote: Zygote
) -> None:
    """Scenario: killed and restarted at once; the new process gets the same slot before anybody has
    reaped."""
    pool = make_pool(slots=8)
    ns = pool.namespace("a")
    store(pool, ns, ["x"])
    first = zygote.spawn("serve", pool.handle.path)
    tickets, _ = first.call("acquire", ["x"])
    reserved, _ = first.call("reserve", ns, ["r"], OBJECT_BYTES)
    first.kill()
    second = zygote.spawn("serve", pool.handle.path)
    assert second.call("release", tickets) == [Outcome.INVALID]
    assert second.call("publish", reserved) == [Outcome.INVALID]
    assert pool.stats()["processes"] == 2
    pool.audit()
    second.kill()
    assert_nothing_is_left(pool, 8)


def test_a_process_that_lost_its_byte_lock_is_told_and_harms_nobody(
    make_pool: Callable[..., Pool], zygote: Zygote
) -> None:
    """Scenario: something in a living process opens and closes the pool's file; the kernel drops its lock."""
    pool = make_pool()
    ns = pool.namespace("a")
    store(pool, ns, ["x"])
    careless = zygote.spawn("serve", pool.handle.path)
    tickets, _ = careless.call("acquire", ["x"])
    careless.call("close_a_duplicate")
    assert pool.reap() == 1
    pool.audit()
    with pytest.raises(RuntimeError, match="SegmentError: this process was taken for dead"):
        careless.call("release", tickets)
    with pytest.raises(RuntimeError, match="SegmentError: this process was taken for dead"):
        careless.call("store", ns, ["y"])
    assert_nothing_is_left(pool, 32)


def test_readers_of_the_removed_ring_are_told_that_a_repair_may_have_lost_some(
    make_pool: Callable[..., Pool], zygote: Zygote
) -> None:
    pool = make_pool()
    cursor = pool.removed_head()
    actor = zygote.spawn("serve", pool.handle.path)
    ns = actor.call("namespace", "a")
    actor.call("store", ns, ["x"])
    actor.call("arm", 3)
    with pytest.raises(EOFError):
        actor.call("remove", ["x"])
    actor.wait_until_dead()
    assert pool.touch(["x"]).tolist() in ([Outcome.MISS], [Outcome.TOUCHED])
    digests, cursor, is_lost = pool.removed_since(cursor)
    assert is_lost
    assert len(digests) == 0
    assert not pool.removed_since(cursor)[2]


@pytest.mark.skipif(not CAN_UNSHARE, reason="this user may not make pid namespaces")
def test_a_holder_in_another_pid_namespace_is_waited_for_alive_and_taken_over_dead(
    make_pool: Callable[..., Pool],
) -> None:
    """Scenario: two containers share a pool; the pids that one knows mean nothing to the other."""
    pool = make_pool()
    ns = pool.namespace("a")
    code = f"""
import os, sys
from umbp import _native
from umbp.pool import Pool
if os.fork():  # pid 1 of a namespace can't be stopped by its own
    os.wait()
    os._exit(0)
pool = Pool.attach({pool.handle.path!r})
print(os.getpid(), flush=True)
sys.stdin.readline()
_native.arm_crash_point(5, True)
pool.reserve({ns}, ["theirs"], 3000)
"""
    command = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as outer:
        assert outer.stdin is not None
        assert outer.stdout is not None
        assert 1 < int(outer.stdout.readline()) < 20  # a pid of its own namespace
        inner = only_child(only_child(outer.pid))
        assert pool.reap() == 0
        outer.stdin.write("go\n")
        outer.stdin.flush()
        while Path(f"/proc/{inner}/stat").read_text().rpartition(") ")[2][0] != "T":
            os.sched_yield()
        assert pool.reserve(ns, ["ours"], OBJECT_BYTES)[1].tolist() == [Outcome.NOT_NOW]
        assert pool.stats()["takeovers"] == 0
        os.kill(inner, signal.SIGKILL)
        outer.wait()
    assert store(pool, ns, ["ours", "theirs"]) == [Outcome.RESERVED] * 2
    assert pool.stats()["takeovers"] == 1
    assert_nothing_is_left(pool, 32)


def test_a_crash_point_is_armed_by_the_environment(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool()
    code = f"""
from umbp.pool import Pool
pool = Pool.attach({pool.handle.path!r})
while True:
    pool.namespace("a")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "UMBP_CRASH_POINT": "40"}, check=False
    )
    assert done.returncode == -signal.SIGKILL
    assert_nothing_is_left(pool, 32)


def test_a_copy_engine_made_before_a_fork_is_left_alone_by_the_child() -> None:
    """Scenario: the child's interpreter ends in order and destroys an engine whose threads it doesn't
    have."""
    code = """
import os
from umbp.errors import SegmentError
from umbp.pool import Pool
from umbp.transfer import BlockRuns, CopyEngine
engine = CopyEngine(4)
pool = Pool.create_memfd(1 << 20, slab_bytes=1 << 16, min_object_bytes=3000)
if os.fork() == 0:
    try:
        engine.store(BlockRuns.from_columns([64], [8], [8], [0], 4), [], pool, [])
    except SegmentError:
        engine.close()
        del engine, pool
        raise SystemExit(0)
    raise SystemExit("not refused")
_, status = os.wait()
raise SystemExit(os.waitstatus_to_exitcode(status))
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
