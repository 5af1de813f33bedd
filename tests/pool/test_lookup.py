"""Lookups beside writers: they take no lock, and what is stored is never a miss for them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from actors import OBJECT_BYTES, store
from zygote import Zygote

from umbp import _native
from umbp.pool import Pool

MakePool = Callable[..., Pool]
SLOTS = 64
STRESS_S = 1.5


def crowded(pool: Pool, count: int) -> list[str]:
    """Keys whose probes all begin at the same entry of a pool's index with SLOTS slots."""
    slot = _native.slot_bytes(OBJECT_BYTES)
    entries = _native.geometry(SLOTS * slot, SLOTS * slot, OBJECT_BYTES)["index_entries"]
    keys = [f"k{i}" for i in range(entries * count * 3)]
    homes = [(low * entries) >> 64 for low in pool.digests(keys)[:, 0].tolist()]
    chosen = [key for key, home in zip(keys, homes, strict=True) if home == entries // 2]
    assert len(chosen) >= count
    return chosen[:count]


def test_a_stored_key_is_never_missed_while_entries_move(
    make_pool: MakePool, zygote: Zygote, tmp_path: Path
) -> None:
    """Scenario: a lookup comes to an entry's old place when it is empty already, and had passed its new place
    when that was not yet written."""
    pool = make_pool(slots=SLOTS, slab_slots=SLOTS)
    crowd = crowded(pool, 26)
    keys, absent, blockers = crowd[:12], crowd[12:14], crowd[14:]
    board = tmp_path / "board"
    board.write_bytes(bytes(8))
    turn = np.memmap(board, dtype=np.uint64, mode="r")
    zygote.spawn("shift", pool.handle.path, os.fspath(board), blockers, keys)
    looks = 0
    until = time.monotonic() + STRESS_S
    while time.monotonic() < until or looks < 1000:
        before = int(turn[0])
        hits = pool.lookup(keys[-1:] + absent)
        assert not hits[1:].any()
        if before % 2 and int(turn[0]) == before:
            looks += 1
            assert hits[0], f"missed in look {looks}"
    assert turn[0] > 100


def test_every_stored_key_is_found_while_whoever_moves_entries_is_stopped(
    make_pool: MakePool, zygote: Zygote
) -> None:
    """At each of its steps: no lookup waits for it, none believes the gap that it has left."""
    pool = make_pool(slots=SLOTS, slab_slots=SLOTS)
    ns = pool.namespace("a")
    crowd = crowded(pool, 9)
    first, keys, absent = crowd[:1], crowd[1:8], crowd[8:]
    countdown = stops = 0
    is_done = False
    while not is_done:
        countdown += 1
        assert 5 not in store(pool, ns, first + keys)
        actor = zygote.spawn("serve", pool.handle.path)
        actor.call("arm", countdown, True)
        actor.send("remove", first)
        while actor.state() != "T" and not actor.has_answer(0):
            os.sched_yield()
        is_done = actor.has_answer(0)
        stops += not is_done
        assert pool.lookup(keys).all(), f"stopped at point {countdown}"
        assert not pool.lookup(absent).any()
        os.kill(actor.pid, signal.SIGCONT)
        actor.kill()
        pool.audit()
        pool.remove(first + keys)
    assert stops > 2 * len(keys)


def test_lookups_see_only_what_is_stored_while_a_writer_churns(make_pool: MakePool, zygote: Zygote) -> None:
    pool = make_pool(slots=600, slab_slots=100)
    present = [f"p{i}" for i in range(200)]
    absent = [f"q{i}" for i in range(200)]
    store(pool, pool.namespace("a"), present)
    pins, _ = pool.acquire(present)
    writer = zygote.spawn("churn", pool.handle.path, 1500)
    assert writer.receive() == "attached"
    rounds = 0
    while not writer.has_answer(0):
        rounds += 1
        assert pool.lookup(present).all()
        assert not pool.lookup(absent).any()
    assert writer.receive() == "done"
    assert rounds > 20
    pool.release(pins)
    pool.audit()
