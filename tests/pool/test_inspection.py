"""What can be told of a pool from outside, and that telling it disturbs nobody."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from actors import OBJECT_BYTES, store
from zygote import Zygote

from umbp import _native
from umbp.errors import ConfigError, SegmentError
from umbp.pool import Outcome, Pool, inspect_pool, list_pools, pool_path, shared_geometry
from umbp.pool.geometry import tail_share

SLAB = 8 * 4096
MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    pool = Pool.create(
        pool_path(tmp_path, "one"),
        4 * SLAB,
        max_bytes=16 * SLAB,
        slab_bytes=SLAB,
        min_object_bytes=OBJECT_BYTES,
        group=os.getegid(),
    )
    with pool:
        yield pool


def test_a_pool_tells_of_itself(pool: Pool, zygote: Zygote) -> None:
    ns = pool.namespace("a")
    pool.set_quota(ns, 3 * SLAB)
    store(pool, ns, ["x", "y"])
    _, outcomes = pool.reserve(ns, ["big"], 2 * OBJECT_BYTES)
    assert outcomes[0] == Outcome.RESERVED
    actor = zygote.spawn("serve", str(pool.path))
    actor.call("acquire", ["x", "y", "z"])
    assert pool.path is not None
    found = inspect_pool(pool.path)
    assert (found.name, found.state, found.problem) == ("one", "ready", "")
    assert (found.owner_uid, found.group_gid, found.mode) == (os.geteuid(), os.getegid(), 0o660)
    assert (found.capacity_bytes, found.max_bytes, found.slab_bytes) == (4 * SLAB, 16 * SLAB, SLAB)
    assert (found.used_bytes, found.objects, found.free_slabs) == (4 * 4096, 2, 2)
    assert found.namespaces == tuple(pool.namespaces())
    assert [(each.slot_bytes, each.slabs, each.free_slots) for each in found.classes] == [
        (4096, 1, 6),
        (8192, 1, 3),
    ]
    assert found.bound_bytes == 6 * 4096 + 3 * 8192
    assert found.counters["hits"] == 2
    assert found.counters["misses"] == 1
    assert [(each.pid, each.is_alive, each.pinned_slots) for each in found.processes] == [
        (os.getpid(), True, 1),
        (actor.pid, True, 2),
    ]
    actor.kill()
    assert [each.is_alive for each in inspect_pool(pool.path).processes] == [True, False]
    pool.reap()
    assert len(inspect_pool(pool.path).processes) == 1


def test_looking_from_a_process_that_is_attached_does_not_cost_its_place(pool: Pool, zygote: Zygote) -> None:
    """Scenario: closing any descriptor of a file drops the process's byte locks on it."""
    store(pool, pool.namespace("a"), ["x"])
    pins, _ = pool.acquire(["x"])
    assert pool.path is not None
    inspect_pool(pool.path)
    list_pools(Path(pool.path).parent)
    actor = zygote.spawn("serve", pool.path)
    assert actor.call("reap") == 0
    assert pool.release(pins).tolist() == [Outcome.RELEASED]


def test_a_file_that_changes_while_it_is_looked_at_does_not_cost_the_place_either(
    pool: Pool, zygote: Zygote, tmp_path: Path
) -> None:
    assert pool.path is not None
    other = tmp_path / "other"
    Pool.create(other, SLAB, slab_bytes=SLAB, min_object_bytes=OBJECT_BYTES).close()
    name, is_over = tmp_path / "name", threading.Event()
    name.symlink_to(other)

    def keep_swapping() -> None:
        for target in itertools.cycle((pool.path, other)):
            if is_over.is_set():
                return
            os.symlink(str(target), tmp_path / "next")
            os.replace(tmp_path / "next", name)

    swapping = threading.Thread(target=keep_swapping)
    swapping.start()
    try:
        for _ in range(3000):
            _native.inspect(os.fspath(name), False)
            with contextlib.suppress(SegmentError):
                Pool.attach(name).close()
    finally:
        is_over.set()
        swapping.join()
    assert zygote.spawn("serve", pool.path).call("reap") == 0
    assert not pool.native.is_expelled


def test_looking_works_while_a_stopped_process_holds_the_lock(pool: Pool, zygote: Zygote) -> None:
    actor = zygote.spawn("serve", str(pool.path))
    ns = actor.call("namespace", "a")
    actor.call("arm", 5, True)
    actor.send("store", ns, ["k1", "k2"])
    actor.wait_until_stopped()
    assert inspect_pool(str(pool.path)).alive == 2
    os.kill(actor.pid, signal.SIGCONT)
    actor.receive()


def test_a_new_pool_that_nobody_has_used_has_its_size(tmp_path: Path) -> None:
    path = tmp_path / "fresh"
    Pool.create(path, 3 * SLAB, max_bytes=9 * SLAB, slab_bytes=SLAB, min_object_bytes=OBJECT_BYTES).close()
    found = inspect_pool(path)
    assert (found.capacity_bytes, found.free_slabs, found.name) == (3 * SLAB, 3, str(path))


def test_a_folder_lists_its_pools_and_what_is_named_like_one(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "umbp-broken").write_bytes(b"no pool at all")
    (tmp_path / "other").write_bytes(b"something of somebody")
    (tmp_path / "umbp-folder").mkdir()
    (tmp_path / "umbp-link").symlink_to(tmp_path / "umbp-one")
    (tmp_path / "umbp-half").write_bytes(Path(str(pool.path)).read_bytes()[:4096])
    found = {each.name: each for each in list_pools(tmp_path)}
    assert sorted(found) == ["broken", "half", "one"]
    assert found["one"].problem == ""
    assert found["broken"].state == "unusable"
    assert "shorter than a pool's header" in found["broken"].problem
    assert "4096 bytes where its header says" in found["half"].problem
    with pytest.raises(SegmentError, match="can't be read"):
        list_pools(tmp_path / "absent")
    with pytest.raises(SegmentError, match="isn't a UMBP pool"):
        inspect_pool(tmp_path / "other")


@pytest.mark.parametrize("region", ["processes_at", "namespaces_at", "classes_at", "slabs_at"])
def test_garbage_in_the_tables_is_shown_and_harms_nobody(tmp_path: Path, region: str) -> None:
    path = tmp_path / "umbp-bad"
    Pool.create(path, 4 * SLAB, slab_bytes=SLAB, min_object_bytes=OBJECT_BYTES).close()
    geometry = _native.geometry(4 * SLAB, SLAB, OBJECT_BYTES)
    with path.open("r+b") as file:
        file.seek(geometry[region])
        file.write(bytes((i * 37) % 256 for i in range(4096)))
    assert inspect_pool(path).path == str(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="root reads everything, and only root can become another user")
def test_a_pool_that_may_not_be_read_says_so(pool: Pool, zygote: Zygote) -> None:
    path = Path(str(pool.path))
    path.chmod(0o600)
    for folder in list(path.parents)[:-2]:
        folder.chmod(folder.stat().st_mode | 0o055)
    actor = zygote.spawn("as_user", 4009, 4009, [], str(path), "inspect")
    assert "can't be read: Permission denied" in actor.receive()


@pytest.mark.parametrize("capacity", [MIB, 200 * MIB, 10**9, 16 * GIB, 10**11, 1024 * GIB])
@pytest.mark.parametrize("growth", [1, 4, 64])
def test_a_shared_pool_loses_little_to_slabs_and_tables(capacity: int, growth: int) -> None:
    slab, smallest = shared_geometry(capacity, capacity * growth)
    usable = capacity // slab * slab
    assert slab % 4096 == 0
    assert usable >= 0.95 * capacity
    assert usable // slab >= 8
    geometry = _native.geometry(capacity * growth, slab, smallest)
    index_and_ring = geometry["records_at"] - 2 * MIB
    assert index_and_ring <= 0.03 * capacity
    if capacity >= 512 * MIB:
        sizes = [int((64 << 10) * (320 ** (i / 100))) for i in range(101)]  # 64 KiB to 20 MiB
        assert max(_native.slot_bytes(size) for size in sizes) <= slab
        assert sum(tail_share(slab, size) for size in sizes) / len(sizes) < 0.04


def test_tables_take_two_percent_at_256_kib_objects() -> None:
    capacity = 16 * GIB
    slab, smallest = shared_geometry(capacity)
    geometry = _native.geometry(capacity, slab, smallest)
    records = capacity // slab * (slab // _native.slot_bytes(256 << 10)) * 128
    assert geometry["records_at"] + records + 8 * geometry["pin_row_bytes"] <= 0.02 * capacity


def test_a_shared_pool_too_small_to_share_is_refused() -> None:
    with pytest.raises(ConfigError, match="must have at least 160 KiB"):
        shared_geometry(100_000)
