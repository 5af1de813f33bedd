"""The life of a pool in a file: made, shared, grown, shrunk, destroyed and made again, while it is used."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from actors import OBJECT_BYTES, pattern, read_payload, store
from zygote import Zygote

from umbp import _native
from umbp.errors import CapacityError, ConfigError, SegmentError
from umbp.pool import MemoryPolicy, Outcome, Pool
from umbp.pool.limits import MemoryLimit

SLOT = 4096
SLAB = 8 * SLOT
MIB = 1 << 20
SMALL_PAGES = MemoryPolicy(hugepages=False)

MakeFilePool = Callable[..., Pool]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "umbp-test"


@pytest.fixture
def make(path: Path) -> Iterator[MakeFilePool]:
    """File pools of slabs of 8 slots."""
    pools: list[Pool] = []

    def make_one(slabs: int = 8, max_slabs: int | None = None, **options: object) -> Pool:
        pool = Pool.create(
            path,
            slabs * SLAB,
            max_bytes=(max_slabs or slabs) * SLAB,
            slab_bytes=SLAB,
            min_object_bytes=OBJECT_BYTES,
            **options,  # type: ignore[arg-type]
        )
        pools.append(pool)
        return pool

    yield make_one
    for pool in pools:
        pool.close()


def memory_of(path: Path) -> int:
    return path.stat().st_blocks * 512


def keys_of(count: int) -> list[str]:
    return [f"k{i}" for i in range(count)]


def assert_payloads(pool: Pool, keys: list[str]) -> int:
    """Every stored key has its own bytes; how many are stored."""
    tickets, outcomes = pool.acquire(keys)
    for key, ticket, outcome in zip(keys, tickets.tolist(), outcomes.tolist(), strict=True):
        if outcome == Outcome.HIT:
            assert read_payload(pool, ticket) == pattern(key)
    hits = outcomes == Outcome.HIT
    pool.release(tickets[hits])
    return int(hits.sum())


# Size


def test_a_pool_grows_and_shrinks_within_what_it_was_made_for(make: MakeFilePool, path: Path) -> None:
    pool = make(slabs=4, max_slabs=32)
    ns = pool.namespace("a")
    store(pool, ns, keys_of(32))
    before = memory_of(path)
    assert (pool.capacity_bytes, pool.max_bytes) == (4 * SLAB, 32 * SLAB)
    assert pool.resize(32 * SLAB) == 32 * SLAB
    pool.audit()
    assert 0 <= memory_of(path) - before - 28 * SLAB <= 8 * SLOT  # ext4 counts its own blocks as well
    assert store(pool, ns, [f"m{i}" for i in range(224)]) == [Outcome.RESERVED] * 224
    assert assert_payloads(pool, keys_of(32)) == 32
    assert pool.resize(5 * SLAB + 17) == 5 * SLAB
    pool.audit()
    assert pool.stats()["objects"] == 40
    assert assert_payloads(pool, keys_of(32) + [f"m{i}" for i in range(224)]) == 40
    assert memory_of(path) < before + 28 * SLAB


@pytest.mark.parametrize("size", [0, SLAB - 1, 9 * SLAB, 1 << 60])
def test_a_size_that_cannot_be_is_refused_and_changes_nothing(make: MakeFilePool, size: int) -> None:
    pool = make(slabs=4, max_slabs=8)
    store(pool, pool.namespace("a"), keys_of(32))
    with pytest.raises((ConfigError, SegmentError), match="size must be"):
        pool.resize(size)
    assert pool.capacity_bytes == 4 * SLAB
    assert assert_payloads(pool, keys_of(32)) == 32
    pool.audit()


def test_shrinking_takes_free_slabs_first_and_then_the_coldest(make: MakeFilePool) -> None:
    pool = make(slabs=8)
    ns = pool.namespace("a")
    for i in range(0, 48, 8):
        store(pool, ns, keys_of(48)[i : i + 8])
    assert pool.resize(6 * SLAB) == 6 * SLAB
    assert pool.stats()["evicted"] == 0
    pool.touch(keys_of(8))
    pool.resize(4 * SLAB)
    assert pool.lookup(keys_of(48)).tolist() == [True] * 8 + [False] * 16 + [True] * 24
    pool.audit()


def test_what_is_held_stays_where_it_is_and_other_slabs_go(make: MakeFilePool) -> None:
    pool = make(slabs=8)
    ns = pool.namespace("a")
    for i in range(0, 64, 8):
        store(pool, ns, keys_of(64)[i : i + 8])
    held, _ = pool.acquire(["k0", "k9"])
    mine, _ = pool.reserve(ns, ["new"], OBJECT_BYTES)
    pool.resize(3 * SLAB)
    pool.audit()
    assert pool.lookup(["k0", "k9"]).all()
    assert read_payload(pool, int(held[1])) == pattern("k9")
    assert pool.publish(mine).tolist() == [Outcome.PUBLISHED]
    pool.release(held)
    pool.audit()


def test_a_pool_does_not_shrink_below_what_is_held(make: MakeFilePool) -> None:
    pool = make(slabs=4)
    ns = pool.namespace("a")
    for i in range(0, 32, 8):
        store(pool, ns, keys_of(32)[i : i + 8])
    held, _ = pool.acquire(["k0", "k8", "k16"])
    with pytest.raises(SegmentError, match=rf"can't shrink to {2 * SLAB} bytes now.* it has {4 * SLAB}"):
        pool.resize(2 * SLAB)
    assert pool.lookup(keys_of(32)).all()
    pool.audit()
    pool.release(held[:1])
    assert pool.resize(2 * SLAB) == 2 * SLAB
    pool.audit()
    pool.release(held[1:])


def test_growing_is_refused_where_there_is_no_memory(
    make: MakeFilePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make(slabs=4, max_slabs=8)
    monkeypatch.setattr("umbp.pool.pool.memory_limits", lambda path: [MemoryLimit("the test", 2 * SLAB)])
    with pytest.raises(CapacityError, match=r"a growth of .* the test leaves"):
        pool.resize(8 * SLAB)
    assert pool.resize(6 * SLAB) == 6 * SLAB
    pool.audit()


@pytest.fixture
def small_ram(tmp_path: Path) -> Iterator[Path]:
    """A RAM file system of 4 MiB."""
    folder = tmp_path / "ram"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", os.fspath(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may not mount a RAM file system")
    yield folder
    subprocess.run(["umount", "-l", os.fspath(folder)], check=True)


def test_growing_into_a_full_file_system_stops_at_a_sound_size(
    small_ram: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scenario: somebody else fills it between the check and the taking."""
    path = small_ram / "umbp-tight"
    pool = Pool.create(
        path, MIB, max_bytes=16 * MIB, slab_bytes=SLAB, min_object_bytes=OBJECT_BYTES, memory=SMALL_PAGES
    )
    ns = pool.namespace("a")
    store(pool, ns, keys_of(50))
    monkeypatch.setattr("umbp.pool.pool.memory_limits", lambda path: [])
    with pytest.raises(CapacityError, match="can't grow: there is no memory for another slab"):
        pool.resize(16 * MIB, memory=SMALL_PAGES)
    pool.audit()
    assert pool.capacity_bytes >= MIB
    assert memory_of(path) <= 4 * MIB
    assert assert_payloads(pool, keys_of(50)) == 50
    assert store(pool, ns, [f"m{i}" for i in range(100)]) == [Outcome.RESERVED] * 100
    assert pool.resize(MIB // 2) == MIB // 2
    pool.audit()
    pool.destroy()
    pool.close()


def test_whoever_hears_of_the_progress_may_break_a_resize_off(make: MakeFilePool) -> None:
    pool = make(slabs=8)
    store(pool, pool.namespace("a"), keys_of(64))
    heard: list[tuple[int, int]] = []

    def enough(done: int, whole: int) -> None:
        heard.append((done, whole))
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.resize(2 * SLAB, progress=enough)
    assert heard == [(0, 6 * SLAB), (SLAB, 6 * SLAB)]
    assert pool.capacity_bytes == 7 * SLAB
    pool.audit()
    assert pool.resize(2 * SLAB) == 2 * SLAB


def test_all_processes_see_the_new_size_without_attaching_anew(
    make: MakeFilePool, path: Path, zygote: Zygote
) -> None:
    pool = make(slabs=2, max_slabs=16)
    ns = pool.namespace("a")
    actor = zygote.spawn("serve", os.fspath(path))
    actor.call("store", ns, keys_of(16))
    assert pool.resize(16 * SLAB) == 16 * SLAB
    assert actor.call("store", ns, [f"m{i}" for i in range(112)]) == [Outcome.RESERVED] * 112
    assert assert_payloads(pool, keys_of(16) + [f"m{i}" for i in range(112)]) == 128
    assert actor.call("resize", 3 * SLAB) == 3 * SLAB
    assert pool.capacity_bytes == 3 * SLAB
    pool.audit()


def test_two_do_not_resize_at_once(make: MakeFilePool, path: Path, zygote: Zygote) -> None:
    """Scenario: the first is stopped half way, not with the lock in hand. Dead, it stands in nobody's way."""
    pool = make(slabs=4, max_slabs=64)
    actor, countdown = zygote.spawn("serve", os.fspath(path)), 0
    while True:
        countdown += 1
        actor.call("arm", countdown, True)
        actor.send("resize", 64 * SLAB)
        actor.wait_until_stopped()
        if pool.acquire(["nothing"])[1].tolist() == [Outcome.MISS]:
            break
        os.kill(actor.pid, signal.SIGCONT)
        assert actor.receive() == 64 * SLAB
        pool.resize(4 * SLAB)
    with pytest.raises(SegmentError, match=rf"process {actor.pid} is resizing it"):
        pool.resize(8 * SLAB)
    with pytest.raises(SegmentError, match="while it is being resized"), pool.size_held():
        pass
    actor.kill()
    assert pool.resize(8 * SLAB) == 8 * SLAB
    pool.audit()


def test_whose_memory_a_device_knows_is_not_resized(make: MakeFilePool, path: Path, zygote: Zygote) -> None:
    pool = make(slabs=4, max_slabs=8)
    actor = zygote.spawn("hold_size", os.fspath(path))
    assert actor.receive() == "held"
    for size in (8 * SLAB, 2 * SLAB):
        with pytest.raises(SegmentError, match=f"process {actor.pid} has registered its memory"):
            pool.resize(size)
    actor.kill()
    assert pool.resize(8 * SLAB) == 8 * SLAB
    with pool.size_held(), pool.size_held():
        pass
    assert pool.resize(2 * SLAB) == 2 * SLAB


def test_prefaulting_takes_no_memory_for_slabs_that_are_absent(make: MakeFilePool, path: Path) -> None:
    pool = make(slabs=4, max_slabs=256)
    pool.resize(2 * SLAB)
    before = memory_of(path)
    assert pool.prefault() == ""
    assert memory_of(path) == before
    assert sum(size for _, size in pool.arena_ranges()) == 2 * SLAB


@pytest.mark.parametrize(("first", "second"), [(5, 3), (3, 5)])
def test_a_death_at_each_point_of_a_resize_leaves_a_sound_pool(
    path: Path, zygote: Zygote, first: int, second: int
) -> None:
    countdown, is_done, slot = 0, False, 65536
    slab = 2 * slot
    while not is_done:
        countdown += 1
        pool = Pool.create(
            path, first * slab, max_bytes=6 * slab, slab_bytes=slab, min_object_bytes=slot - 128
        )
        ns = pool.namespace("a")
        for i in range(0, 2 * first, 2):
            store(pool, ns, keys_of(2 * first)[i : i + 2])
        held, _ = pool.acquire(["k0"])
        metadata = memory_of(path) - first * slab
        with zygote.episode():
            actor = zygote.spawn("serve", os.fspath(path))
            actor.call("arm", countdown)
            try:
                actor.call("resize", second * slab)
                is_done = True
            except EOFError:
                actor.wait_until_dead()
            pool.audit()
            pool.reap()
            pool.audit()
            assert min(first, second) * slab <= pool.capacity_bytes <= max(first, second) * slab
            # No slab is lost, and none without a right to memory has any.
            assert memory_of(path) <= metadata + pool.capacity_bytes + slab // 2
            assert assert_payloads(pool, keys_of(2 * first)) > 0
            assert pool.resize(6 * slab) == 6 * slab
            assert pool.resize(2 * slab) == 2 * slab
            pool.audit()
            assert read_payload(pool, int(held[0])) == pattern("k0")
        pool.release(held)
        pool.destroy()
        pool.close()
    assert countdown > 20


@pytest.mark.parametrize("policy", ["lru", "hazard"])
@pytest.mark.parametrize("has_quota", [False, True])
def test_nobody_is_refused_for_a_slab_that_is_just_being_emptied(
    path: Path, zygote: Zygote, policy: str, has_quota: bool
) -> None:
    count, slot = 600, 4096
    pool = Pool.create(
        path, count * slot, slab_bytes=count // 2 * slot, min_object_bytes=3000, eviction_policy=policy
    )
    ns = pool.namespace("a")

    def stored(salt: str) -> set[int]:
        tickets, outcomes = pool.reserve(ns, [f"{salt}{i}" for i in range(20)], 3000)
        pool.publish(tickets[outcomes == Outcome.RESERVED])
        return set(outcomes.tolist())

    def while_stopped_at(point: int) -> tuple[int, set[int]]:
        """How much has been evicted at that crash point of a shrink, and how stores fare there."""
        pool.clear(ns)
        for first in range(0, count, 50):
            tickets, _ = pool.reserve(ns, [f"{first + i}" for i in range(50)], 3000)
            pool.publish(tickets)
        assert pool.stats()["objects"] == count
        before = pool.stats()["evicted"]
        with zygote.episode():
            actor = zygote.spawn("serve", os.fspath(path))
            actor.call("arm", point, True)
            actor.send("resize", pool.slab_bytes)
            while actor.state() != "T" and not actor.has_answer(0):
                os.sched_yield()
            evicted = pool.stats()["evicted"] - before
            outcomes = stored("new")
            if has_quota and outcomes == {Outcome.RESERVED}:
                pool.set_quota(ns, pool.stats()["used_bytes"])
                outcomes |= stored("newer")
                pool.set_quota(ns, None)
        pool.reap()
        pool.audit()
        pool.resize(pool.max_bytes)
        return evicted, outcomes

    # The end of the first hold of the lock, by bisection: then half of the closed slab's objects are left.
    first, last = 1, 1
    while while_stopped_at(last)[0] < 256:
        first, last = last, 2 * last
    while first < last:
        middle = (first + last) // 2
        first, last = (middle + 1, last) if while_stopped_at(middle)[0] < 256 else (first, middle)
    # The same point may lie a little earlier in another run, still within that hold.
    while (found := while_stopped_at(first))[1] == {Outcome.NOT_NOW} and found[0] <= 256:
        first += 1
    pool.close()
    assert found == (256, {Outcome.RESERVED})


# Owners


def test_a_group_pool_is_its_groups_and_no_one_elses(make: MakeFilePool, path: Path) -> None:
    make(group=os.getegid())
    assert path.stat().st_mode & 0o777 == 0o660
    with Pool.attach(path) as pool:
        store(pool, pool.namespace("a"), ["x"])


def test_a_group_that_is_not_there_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="no group 'nobody-has-this'"):
        Pool.create(path, SLAB, slab_bytes=SLAB, min_object_bytes=OBJECT_BYTES, group="nobody-has-this")
    assert os.listdir(path.parent) == []


def test_a_pool_whose_group_may_write_without_being_meant_to_is_refused(
    make: MakeFilePool, path: Path
) -> None:
    make().close()
    path.chmod(0o660)
    with pytest.raises(SegmentError, match="its group may write to it, and it wasn't made for a group"):
        Pool.attach(path)


ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")


@pytest.fixture
def public(tmp_path: Path) -> Path:
    """A folder like the RAM file system: everybody's, and names are their owners'."""
    for folder in [tmp_path, *tmp_path.parents]:
        if folder.stat().st_uid == 0 and folder != Path("/") and folder != Path("/tmp"):
            folder.chmod(folder.stat().st_mode | 0o011)
    public = tmp_path / "public"
    public.mkdir()
    public.chmod(0o1777)
    return public / "umbp-shared"


def as_user(
    zygote: Zygote, uid: int, gid: int, groups: list[int], path: Path, verb: str, *args: object
) -> str:
    actor = zygote.spawn("as_user", uid, gid, groups, os.fspath(path), verb, *args)
    return str(actor.receive())


@ROOT
def test_each_users_pool_is_his_own(public: Path, zygote: Zygote) -> None:
    assert as_user(zygote, 4001, 4001, [], public, "create") == "ok"
    assert as_user(zygote, 4001, 4001, [], public, "store") == "ok"
    answer = as_user(zygote, 4002, 4002, [], public, "store")
    assert "SegmentError" in answer
    assert "belongs to user 4001" in answer
    answer = as_user(zygote, 4002, 4002, [], public, "destroy")
    assert "SegmentError" in answer
    assert "4001" in answer
    assert public.exists()
    assert as_user(zygote, 4001, 4001, [], public, "destroy") == "ok"
    assert not public.exists()


@ROOT
def test_members_of_the_group_share_and_only_the_owner_destroys(public: Path, zygote: Zygote) -> None:
    assert as_user(zygote, 4001, 4001, [4100], public, "create", 4100) == "ok"
    assert as_user(zygote, 4002, 4002, [4100], public, "store") == "ok"
    assert as_user(zygote, 4003, 4100, [], public, "store") == "ok"
    assert "belongs to user 4001" in as_user(zygote, 4004, 4004, [], public, "store")
    assert "only its owner (user 4001) or root can" in as_user(zygote, 4002, 4002, [4100], public, "destroy")
    assert as_user(zygote, 4002, 4002, [4100], public, "store") == "ok"
    _native.destroy(os.fspath(public))
    assert not public.exists()


@ROOT
def test_no_one_gives_a_pool_to_a_group_he_is_not_in(public: Path, zygote: Zygote) -> None:
    answer = as_user(zygote, 4001, 4001, [], public, "create", 4100)
    assert "can't be given to group 4100" in answer
    assert os.listdir(public.parent) == []


# The end


def test_a_destroyed_pool_misses_and_refuses_and_gives_back(
    make: MakeFilePool, path: Path, zygote: Zygote
) -> None:
    pool = make()
    ns = pool.namespace("a")
    store(pool, ns, ["x", "y"])
    actor = zygote.spawn("serve", os.fspath(path))
    held, _ = actor.call("acquire", ["x"])
    mine, _ = actor.call("reserve", ns, ["new"], OBJECT_BYTES)
    pool.destroy()
    assert not path.exists()
    assert pool.is_destroyed
    assert pool.is_replaced()
    assert actor.call("lookup", ["x", "y"]) == [False, False]
    assert actor.call("acquire", ["y"]) == [[0], [Outcome.MISS]]
    assert actor.call("reserve", ns, ["z"], OBJECT_BYTES) == [[0], [Outcome.FULL]]
    assert actor.call("touch", ["y"]) == [Outcome.MISS]
    assert actor.call("remove", ["y"]) == [Outcome.MISS]
    assert actor.call("clear", ns) is True
    assert actor.call("read", held[0]) == pattern("x").decode()  # a copy under way ends well
    assert actor.call("publish", mine) == [Outcome.STALE]
    assert actor.call("release", held) == [Outcome.RELEASED]
    with pytest.raises(SegmentError, match="has been destroyed"):
        pool.namespace("b")
    with pytest.raises(SegmentError, match="has been destroyed"):
        pool.resize(2 * SLAB)
    pool.destroy()  # once more is fine
    pool.audit()


def test_a_new_pool_of_the_name_is_another_pool(make: MakeFilePool, path: Path) -> None:
    old = make()
    store(old, old.namespace("a"), ["x"])
    old.destroy()
    new = make()
    assert (old.is_replaced(), new.is_replaced()) == (True, False)
    old.destroy()
    assert path.exists()
    assert not new.lookup(["x"]).any()
    with Pool.attach(path) as again:
        assert again.native.process_slot == new.native.process_slot


def test_a_pool_whose_file_somebody_removed_or_replaced_is_noticed(make: MakeFilePool, path: Path) -> None:
    pool = make()
    assert not pool.is_replaced(interval_s=0)
    path.rename(path.with_name("elsewhere"))
    assert pool.is_replaced(interval_s=0)
    assert not pool.is_destroyed
    path.write_text("something else")
    assert pool.is_replaced(interval_s=0)
    with pytest.raises(SegmentError, match="another file has taken its place"):
        pool.destroy()
    path.with_name("elsewhere").rename(path)
    assert not pool.is_replaced(interval_s=0)


def test_the_file_system_is_not_asked_all_the_time(make: MakeFilePool, path: Path) -> None:
    pool = make()
    assert not pool.is_replaced(interval_s=3600)
    path.unlink()
    assert not pool.is_replaced(interval_s=3600)
    assert pool.is_replaced(interval_s=0)


def test_a_nameless_pool_has_nothing_to_destroy() -> None:
    with Pool.create_memfd(SLAB, slab_bytes=SLAB, min_object_bytes=OBJECT_BYTES) as pool:
        assert pool.path is None
        assert not pool.is_replaced(0)
        with pytest.raises(SegmentError, match="goes with its processes"):
            pool.destroy()


def test_the_memory_of_a_destroyed_pool_goes_with_its_last_process(
    make: MakeFilePool, path: Path, zygote: Zygote
) -> None:
    folder = path.parent
    before = os.statvfs(folder).f_bfree
    pool = Pool.create(path, 32 * MIB, slab_bytes=MIB, min_object_bytes=65536)
    actor = zygote.spawn("serve", os.fspath(path))
    actor.call("removed_head")
    pool.destroy()
    pool.close()
    statvfs = os.statvfs(folder)
    assert (before - statvfs.f_bfree) * statvfs.f_frsize > 24 * MIB
    actor.kill()
    actor.bury()
    statvfs = os.statvfs(folder)
    assert (before - statvfs.f_bfree) * statvfs.f_frsize < 24 * MIB


def test_a_death_at_each_point_of_destroying_leaves_no_file_or_a_whole_pool(
    make: MakeFilePool, path: Path, zygote: Zygote
) -> None:
    countdown, is_done = 0, False
    while not is_done:
        countdown += 1
        pool = make()
        store(pool, pool.namespace("a"), ["x"])
        with zygote.episode():
            actor = zygote.spawn("destroy_path", os.fspath(path), countdown)
            try:
                is_done = actor.receive() == "done"
            except EOFError:
                actor.wait_until_dead()
            if path.exists():
                assert not pool.is_replaced(interval_s=0)
                assert pool.lookup(["x"]).all()
                pool.destroy()
            assert pool.is_replaced(interval_s=0)
            assert not path.exists()
        pool.close()
    assert countdown == 4


def test_a_damaged_pool_can_be_destroyed_and_a_foreign_file_cannot(make: MakeFilePool, path: Path) -> None:
    pool = make()
    with path.open("r+b") as file:
        file.seek(64)
        file.write(b"\xff" * 64)
    pool.close()
    with pytest.raises(SegmentError, match="damaged"):
        Pool.attach(path)
    _native.destroy(os.fspath(path))
    assert not path.exists()
    path.write_bytes(b"not a pool")
    with pytest.raises(SegmentError, match="isn't a UMBP pool"):
        _native.destroy(os.fspath(path))
    assert path.exists()


def test_of_many_creators_one_wins_and_all_others_say_so(path: Path) -> None:
    answers: list[str] = []

    def create() -> None:
        try:
            pool = Pool.create(path, 4 * SLAB, slab_bytes=SLAB, min_object_bytes=OBJECT_BYTES)
            answers.append("made")
            pool.close()
        except SegmentError as error:
            answers.append(str(error))

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers.count("made") == 1
    assert all("exists" in answer for answer in answers if answer != "made")
    assert os.listdir(path.parent) == [path.name]


def test_a_pool_takes_what_was_asked_for_to_five_percent(make: MakeFilePool, path: Path) -> None:
    """Metadata counted, at sizes of objects that models have, and with much room to grow."""
    for asked, most in ((64 * MIB, 64 * MIB), (64 * MIB, 256 * MIB), (40 * MIB, 40 * MIB)):
        pool = Pool.create(path, asked, max_bytes=most, slab_bytes=8 * MIB, min_object_bytes=16384)
        ns = pool.namespace("a")
        tickets, outcomes = pool.reserve(ns, keys_of(400), 262144 - 128)
        pool.publish(tickets[outcomes == Outcome.RESERVED])
        assert asked * 0.95 <= memory_of(path) <= asked * 1.05
        pool.destroy()
        pool.close()
    with Pool.create_memfd(64 * MIB, slab_bytes=8 * MIB, min_object_bytes=16384) as nameless:
        taken = os.stat(f"/proc/self/fd/{nameless.handle.fd}").st_blocks * 512
        assert 64 * MIB * 0.95 <= taken <= 64 * MIB * 1.05
