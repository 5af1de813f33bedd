"""Making, finding, sharing and refusing segments."""

from __future__ import annotations

import os
import pickle
import signal
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from actors import OBJECT_BYTES, pattern, read_payload, store
from refusals import assert_refused
from zygote import Zygote

from umbp import _native
from umbp.errors import CapacityError, ConfigError, SegmentError
from umbp.pool import Outcome, Pool, PoolHandle

MakePool = Callable[..., Pool]

GEOMETRY = list(_native.geometry(1 << 20, 1 << 16, 3000))
FIELDS = {
    "magic": (0, "Q"),
    "version": (8, "I"),
    "header_bytes": (12, "I"),
    **{name: (16 + 8 * i, "Q") for i, name in enumerate(GEOMETRY)},
    "hash_seed": (16 + 8 * len(GEOMETRY), "Q"),
    "owner_uid": (16 + 8 * len(GEOMETRY) + 24, "I"),
    "process_limit": (16 + 8 * len(GEOMETRY) + 28, "I"),
    "high_ppm": (16 + 8 * len(GEOMETRY) + 32, "I"),
    "low_ppm": (16 + 8 * len(GEOMETRY) + 36, "I"),
    "checksum": (16 + 8 * len(GEOMETRY) + 40, "Q"),
}


def test_two_processes_work_on_one_memfd(make_pool: MakePool) -> None:
    """A stranger in a fresh interpreter: attaches by handle, reads what is there, stores what we then
    read."""
    pool = make_pool()
    ns = pool.namespace("a")
    store(pool, ns, ["ours"])
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from actors import *
from umbp.pool import PoolHandle
handle = PoolHandle({pool.handle.pid}, {pool.handle.fd}, {pool.handle.boot_id!r})
pool = Pool.attach(handle)
tickets, outcomes = pool.acquire(["ours"])
assert outcomes.tolist() == [Outcome.HIT]
assert read_payload(pool, int(tickets[0])) == pattern("ours")
pool.release(tickets)
assert store(pool, pool.namespace("a"), ["theirs"]) == [Outcome.RESERVED]
pool.audit()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    tickets, outcomes = pool.acquire(["theirs"])
    assert outcomes.tolist() == [Outcome.HIT]
    assert read_payload(pool, int(tickets[0])) == pattern("theirs")
    assert pool.stats()["processes"] == 1
    pool.audit()


def test_what_a_process_stores_others_see_while_all_work(make_pool: MakePool, zygote: Zygote) -> None:
    pool = make_pool(slots=64)
    writers = [zygote.spawn("serve", pool.handle.path) for _ in range(3)]
    ns = writers[0].call("namespace", "a")
    for step in range(20):
        for i, writer in enumerate(writers):
            keys = [f"{i}.{step}.{j}" for j in range(4)]
            assert writer.call("store", ns, keys) == [Outcome.RESERVED] * 4
            assert pool.lookup(keys).all()
            reader = writers[(i + 1) % 3]
            tickets, outcomes = reader.call("acquire", keys)
            assert outcomes == [Outcome.HIT] * 4
            assert reader.call("read", tickets[2]) == pattern(keys[2]).decode()
            assert reader.call("release", tickets) == [Outcome.RELEASED] * 4
    pool.audit()


def test_a_file_pool_keeps_what_was_stored(pool_file: Path) -> None:
    with Pool.attach(pool_file) as pool:
        assert pool.lookup(["x", "y", "z"]).tolist() == [True, True, False]
        tickets, _ = pool.acquire(["y"])
        assert read_payload(pool, int(tickets[0])) == pattern("y")
        pool.audit()
    assert pool_file.stat().st_mode & 0o777 == 0o600


def test_of_two_creators_one_wins(pool_file: Path) -> None:
    with pytest.raises(SegmentError, match="exists"):
        Pool.create(pool_file, 1 << 20, slab_bytes=1 << 16, min_object_bytes=3000)
    with Pool.attach(pool_file) as pool:
        assert pool.lookup(["x"]).all()
    assert os.listdir(pool_file.parent) == ["pool"]


def test_one_process_has_one_attachment_however_often_it_attaches(
    make_pool: MakePool, zygote: Zygote
) -> None:
    """Scenario: closing any descriptor of a file drops the process's byte locks on it, and others would
    reap it."""
    pool = make_pool()
    store(pool, pool.namespace("a"), ["x"])
    again = Pool.attach(pool.handle)
    third = Pool.attach(f"/proc/self/fd/{pool.handle.fd}")
    assert pool.native.process_slot == again.native.process_slot == third.native.process_slot
    tickets, _ = again.acquire(["x"])
    again.close()
    third.close()
    other = zygote.spawn("serve", pool.handle.path)
    assert other.call("reap") == 0
    assert pool.release(tickets).tolist() == [Outcome.RELEASED]
    pool.audit()


def test_leaving_returns_everything(make_pool: MakePool, zygote: Zygote) -> None:
    pool = make_pool()
    ns = pool.namespace("a")
    store(pool, ns, ["x"])
    actor = zygote.spawn("serve", pool.handle.path)
    actor.call("acquire", ["x"])
    actor.call("reserve", ns, ["r"], OBJECT_BYTES)
    actor.call("close")
    assert pool.stats()["processes"] == 1
    pool.audit()
    assert store(pool, ns, ["r"]) == [Outcome.RESERVED]


def test_a_child_of_a_fork_is_refused_and_may_attach_again(make_pool: MakePool) -> None:
    pool = make_pool()
    store(pool, pool.namespace("a"), ["x"])
    handle = pool.handle
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        answer = "no answer"
        try:
            try:
                pool.lookup(["x"])
            except SegmentError as error:
                answer = f"{error}|"
                fresh = Pool.attach(handle)
                answer += f"{fresh.lookup(['x']).all()}|{fresh.stats()['processes']}"
                fresh.close()
                pool.close()
        finally:
            os.write(write, answer.encode())
            os._exit(0)
    os.waitpid(child, 0)
    message, seen, processes = os.read(read, 1000).decode().split("|")
    os.close(read)
    os.close(write)
    assert "fork" in message
    assert (seen, processes) == ("True", "2")
    assert pool.lookup(["x"]).all()
    pool.audit()


def test_no_more_than_the_table_holds_may_attach(make_pool: MakePool, zygote: Zygote) -> None:
    pool = make_pool(slots=4)
    crowd = [zygote.spawn("serve", pool.handle.path) for _ in range(63)]
    for actor in crowd:
        actor.call("removed_head")
    late = zygote.spawn("serve", pool.handle.path)
    with pytest.raises(EOFError):
        late.call("removed_head")
    crowd[0].kill()
    after = zygote.spawn("serve", pool.handle.path)
    assert after.call("removed_head") == 0
    pool.audit()


def test_attaching_waits_for_a_short_stop_only(make_pool: MakePool, zygote: Zygote) -> None:
    pool = make_pool()
    ns = pool.namespace("a")
    actor = zygote.spawn("serve", pool.handle.path)
    actor.call("arm", 4, True)
    actor.send("store", ns, ["k"])
    actor.wait_until_stopped()
    late = zygote.spawn("serve", pool.handle.path)
    assert not late.has_answer(0.05)
    os.kill(actor.pid, signal.SIGCONT)
    assert late.call("lookup", ["k"]) is not None
    actor.receive()
    pool.audit()


def test_a_handle_is_plain_data(make_pool: MakePool) -> None:
    handle = make_pool().handle
    assert pickle.loads(pickle.dumps(handle)) == handle
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(handle), type=PoolHandle) == handle
    assert handle.path == f"/proc/{os.getpid()}/fd/{handle.fd}"


def test_a_handle_of_another_host_is_refused(make_pool: MakePool) -> None:
    handle = make_pool().handle
    with pytest.raises(SegmentError, match="another host"):
        Pool.attach(PoolHandle(handle.pid, handle.fd, "some-other-boot"))


def test_a_handle_whose_process_is_gone_is_refused(make_pool: MakePool, zygote: Zygote) -> None:
    handle = make_pool().handle
    with pytest.raises(SegmentError, match="gone"):
        Pool.attach(PoolHandle(2**22 + 1, 3, handle.boot_id))
    with pytest.raises(SegmentError, match="gone"):
        Pool.attach(PoolHandle(handle.pid, 9999, handle.boot_id))


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("damage", ["flip", "zero", "ones"])
def test_a_damaged_header_field_is_refused(pool_file: Path, field: str, damage: str) -> None:
    offset, kind = FIELDS[field]
    data = bytearray(pool_file.read_bytes()[:4096])
    (value,) = struct.unpack_from("<" + kind, data, offset)
    ones = 2 ** (8 * struct.calcsize(kind)) - 1
    damaged = {"flip": value ^ (1 << 5), "zero": 0, "ones": ones}[damage]
    if damaged == value:
        damaged += 1
    struct.pack_into("<" + kind, data, offset, damaged)
    with pool_file.open("r+b") as file:
        file.write(data)
    assert_refused(pool_file)


@pytest.mark.parametrize(("state", "match"), [(0, "hasn't finished"), (2, "destroyed"), (77, "damaged")])
def test_a_segment_that_is_not_ready_is_refused(pool_file: Path, state: int, match: str) -> None:
    data = pool_file.read_bytes()[:4096]
    at = (FIELDS["checksum"][0] + 8 + 63) // 64 * 64
    assert struct.unpack_from("<I", data, at) == (1,)
    with pool_file.open("r+b") as file:
        file.seek(at)
        file.write(struct.pack("<I", state))
    assert_refused(pool_file, match)


def test_a_foreign_file_is_refused(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.write_bytes(os.urandom(1 << 16))
    assert_refused(foreign, "isn't a UMBP pool")
    foreign.write_text("hello")
    assert_refused(foreign, "isn't a UMBP pool")
    assert_refused(tmp_path, "isn't a file")
    assert_refused(tmp_path / "absent", "No such file")
    os.mkfifo(tmp_path / "fifo")
    assert_refused(tmp_path / "fifo", "isn't a file")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_another_users_pool_is_refused(pool_file: Path) -> None:
    os.chown(pool_file, 4321, -1)
    assert_refused(pool_file, "belongs to user 4321")


@pytest.mark.parametrize(
    "region", ["slabs_at", "index_at", "records_at", "classes_at", "pins_at", "namespaces_at"]
)
def test_garbage_behind_a_sound_header_is_an_error_and_never_a_crash(
    pool_file: Path, zygote: Zygote, region: str
) -> None:
    """Every verb then answers or raises SegmentError; run elsewhere, so that a crash would be seen."""
    geometry = _native.geometry(1 << 20, 1 << 16, 3000)
    for seed in range(6):
        with pool_file.open("r+b") as file:
            file.seek(geometry[region])
            file.write(bytes((seed * 37 + i * i) % 256 for i in range(8192)) if seed else b"\xff" * 8192)
        actor = zygote.spawn("serve", os.fspath(pool_file))
        for verb, *args in [
            ("lookup", ["x", "y"]),
            ("acquire", ["x", "y"]),
            ("store", 0, [f"n{i}" for i in range(40)]),
            ("touch", ["x", "n1"]),
            ("remove", ["x", "n1"]),
            ("reap",),
            ("clear", 0),
            ("audit",),
        ]:
            try:
                actor.call(verb, *args)
            except RuntimeError as error:
                assert str(error).startswith(("SegmentError", "InvariantError", "ConfigError")), error
            except EOFError:
                break  # it ended at once: attaching was refused; a crash shows below
        assert os.waitstatus_to_exitcode(actor.bury()) == 0


def test_a_pool_over_the_free_memory_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    with pytest.raises(CapacityError, match=r"doesn't fit: .* leaves .* choose a smaller capacity"):
        Pool.create_memfd(1 << 46, slab_bytes=1 << 30, min_object_bytes=1 << 20)
    with pytest.raises(CapacityError, match="doesn't fit"):
        Pool.create(tmp_path / "big", 1 << 46, slab_bytes=1 << 30, min_object_bytes=1 << 20)
    assert os.listdir(tmp_path) == []


def test_an_allocation_that_fails_keeps_nothing(tmp_path: Path, zygote: Zygote) -> None:
    actor = zygote.spawn("create_with_file_limit", os.fspath(tmp_path / "pool"))
    assert "CapacityError" in actor.receive()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("capacity", "slab", "smallest"),
    [
        (0, 4096, 1),
        (4096, 4097, 1),
        (4096, 0, 1),
        (4095, 4096, 1),
        (1 << 60, 4096, 1),
        (8192, 4096, 0),
        (8192, 4096, 4096),
        (1 << 49, 1 << 30, 1),
    ],
)
def test_a_geometry_that_cannot_be_is_refused(capacity: int, slab: int, smallest: int) -> None:
    with pytest.raises(ConfigError):
        Pool.create_memfd(capacity, slab_bytes=slab, min_object_bytes=smallest)


@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_metadata_takes_at_most_two_percent_at_256_kib_objects(policy: str) -> None:
    object_bytes = 256 << 10
    slot = _native.slot_bytes(object_bytes)
    capacity = 4096 * slot
    wanted = _native.reserved_bytes(capacity, capacity, 64 * slot, object_bytes, 8, policy)
    assert wanted <= 1.02 * capacity


def test_prefaulting_maps_the_whole_arena() -> None:
    pool = Pool.create_memfd(64 << 20, slab_bytes=1 << 20, min_object_bytes=4096)
    before = mapped_bytes()
    assert pool.prefault() == ""
    assert mapped_bytes() - before >= 64 << 20
    pool.close()


def mapped_bytes() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel doesn't tell")
