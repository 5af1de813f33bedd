"""One pool in a file for all engines of a node: who makes it, who finds it, and what happens when it goes."""

from __future__ import annotations

import json
import logging
import multiprocessing
import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from umbp.data import EngineTopology, KVLayoutDescriptor, RankTopology, UMBPNamespace
from umbp.errors import ConfigError, SegmentError, UMBPError
from umbp.options import parse_options
from umbp.pool import MemoryPolicy, Pool
from umbp.pool.sharing import pool_path
from umbp.runtime import named_pool
from umbp.runtime.base import (
    SupportsAttach,
    SupportsEvictedKeys,
    SupportsHold,
    SupportsNote,
    SupportsRawHold,
    SupportsUsage,
)
from umbp.runtime.standalone import StandaloneRuntime
from umbp.testing.clock import TickClock
from umbp.testing.rig import RankRig, Rig, Shape, hashes

SHAPE = Shape(layers=2, blocks=32, block_bytes=2048)
OBJECT_BYTES = SHAPE.layers * SHAPE.block_bytes


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="umbp-test-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> TickClock:
    """The clock by which files are looked for again."""
    ticks = TickClock()
    monkeypatch.setattr(named_pool.NamedPool, "CLOCK", staticmethod(lambda: ticks.now_s))
    return ticks


def standalone(folder: Path, **options: object) -> StandaloneRuntime:
    extra: dict[str, object] = {"mode": "standalone", "pool": "p", "pool_dir": str(folder)}
    return StandaloneRuntime(parse_options(extra | {"capacity_bytes": "8MiB"} | options))


def rig_on(folder: Path, namespace: str = "model", tp_size: int = 1, **options: object) -> Rig:
    return Rig(standalone(folder, **options), namespace, tp_size, SHAPE)


def put(rig: Rig, count: int, salt: str = "") -> list[str]:
    """Store so many blocks on all ranks; their keys."""
    chain = hashes(count, salt)
    for rank in rig.ranks:
        job = rank.worker.wait(rank.worker.store(rank.store_plans("batch", chain, range(count))))
        assert job.completed_keys == set(rank.keys(chain))
        rank.worker.publish(job)
    return rig.keys(chain)


def found(rig: Rig, keys: list[str]) -> int:
    return sum(rig.scheduler.lookup(keys))


def test_what_one_engine_stored_another_finds_and_loads_byte_for_byte(folder: Path) -> None:
    one = rig_on(folder)
    keys = put(one, 6)
    content = [one.ranks[0].read(block) for block in range(6)]
    other = rig_on(folder)
    assert found(other, keys) == 6
    (rank,) = other.ranks
    rank.scrub(range(6))
    job = rank.worker.wait(rank.worker.load(rank.load_plans("batch", hashes(6), range(6))))
    assert job.completed_keys == set(keys)
    assert [rank.read(block) for block in range(6)] == content
    one.close()
    assert found(other, keys) == 6, "what an engine stored stays when it goes"
    other.close()
    third = rig_on(folder)
    assert found(third, keys) == 6, "also when all have gone"
    third.close()


def test_engines_of_different_namespaces_see_nothing_of_each_other(folder: Path) -> None:
    one, other = rig_on(folder, "one"), rig_on(folder, "other")
    ours, theirs = put(one, 3), put(other, 3)
    assert found(one, theirs) == found(other, ours) == 0
    assert one.scheduler.clear()
    assert found(one, ours) == 0
    assert found(other, theirs) == 3
    one.close()
    other.close()


def test_a_block_that_another_engine_is_just_storing_is_no_failure(folder: Path) -> None:
    one, other = rig_on(folder), rig_on(folder)
    chain = hashes(4)
    (first,), (second,) = one.ranks, other.ranks
    early = first.worker.wait(first.worker.store(first.store_plans("batch", chain[:2], range(2))))
    late = second.worker.wait(second.worker.store(second.store_plans("batch", chain, range(4))))
    assert late.completed_keys == set(second.keys(chain))
    assert late.completed_bytes == 2 * OBJECT_BYTES, "only what nobody else stores is copied"
    second.worker.publish(late)
    first.worker.publish(early)
    assert found(one, one.keys(chain)) == 4
    one.close()
    other.close()


# Who makes it


def test_without_a_pool_and_without_a_size_the_start_says_what_to_type(folder: Path) -> None:
    extra = {"mode": "standalone", "pool": "p", "pool_dir": str(folder)}
    runtime = StandaloneRuntime(parse_options(extra))
    with pytest.raises(ConfigError, match=rf"umbp pool create p --dir {folder} --size"):
        Rig(runtime, "model", 1, SHAPE)
    assert list(folder.iterdir()) == []


def test_a_folder_that_is_not_there_is_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"pool_dir.*nowhere"):
        rig_on(folder / "nowhere")


def test_a_pool_of_another_size_holds_and_is_said_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig_on(folder).close()
    with caplog.at_level(logging.WARNING, "vllm.umbp"):
        rig = rig_on(folder, capacity_bytes="32MiB")
    (line,) = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    assert "8 MiB" in line
    assert "32 MiB" in line
    assert "umbp pool resize" in line
    rig.close()


def test_what_a_pool_is_made_with_can_not_be_chosen_any_more_and_that_is_said(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "vllm.umbp"):
        rig_on(folder, dram_high_watermark=0.9, dram_use_hugepages=False).close()
        assert not [record for record in caplog.records if "there already" in record.getMessage()]
        rig_on(folder, dram_high_watermark=0.9, dram_use_hugepages=False).close()
    (line,) = [record.getMessage() for record in caplog.records if "there already" in record.getMessage()]
    assert "'dram_high_watermark', 'dram_use_hugepages'" in line


def test_a_pool_whose_slabs_are_too_small_for_a_block_is_refused_in_a_sentence(folder: Path) -> None:
    Pool.create(pool_path(folder, "p"), 1 << 20, slab_bytes=4096, min_object_bytes=1024).close()
    with pytest.raises(SegmentError, match="--slab-size 8192"):
        rig_on(folder)


def test_something_else_under_the_pools_name_is_refused_and_left_alone(folder: Path) -> None:
    path = Path(pool_path(folder, "p"))
    path.write_bytes(b"somebody's notes" * 1000)
    with pytest.raises(SegmentError, match="isn't a UMBP pool"):
        rig_on(folder)
    assert path.read_bytes() == b"somebody's notes" * 1000


def _start_at_once(folder: str, barrier: Any, answers: Any) -> None:
    barrier.wait()
    try:
        rig = rig_on(Path(folder))
        answers.put((put(rig, 2, "common"), ""))
    except UMBPError as error:
        answers.put(([], str(error)))
    barrier.wait()


def test_of_engines_that_start_at_once_one_makes_the_pool_and_all_use_it(folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(5), context.Queue()
    engines = [context.Process(target=_start_at_once, args=(str(folder), barrier, answers)) for _ in range(4)]
    for engine in engines:
        engine.start()
    barrier.wait(60)
    told = [answers.get(timeout=60) for _ in engines]
    assert [error for _, error in told] == [""] * 4
    with Pool.attach(pool_path(folder, "p")) as pool:
        assert pool.stats()["processes"] == 5
        assert pool.stats()["objects"] == 2
    barrier.wait(60)
    for engine in engines:
        engine.join(60)
        assert engine.exitcode == 0
    assert [path.name for path in folder.iterdir()] == ["umbp-p"], "nothing else is left"


@pytest.mark.parametrize(
    ("change", "message"), [({"boot_id": "x"}, "another host"), ({"path": "/dev/shm/other"}, "same options")]
)
def test_a_worker_on_another_host_or_pool_stops_the_start(
    folder: Path, change: dict[str, str], message: str
) -> None:
    rig = rig_on(folder)
    extra = {**cast(Any, rig.ranks[0].worker).handshake_extra(), **change}
    with pytest.raises(SegmentError, match=message):
        cast(SupportsAttach, rig.new_scheduler(bind=False)).bind_workers({(0, 0, 0, 0): extra})
    rig.close()


# What ranks hold alike


def replicated_rig(folder: Path, whole: EngineTopology, replicas: int) -> tuple[list[RankRig], Any]:
    """An engine whose ranks hold the same bytes where they hold the same KV."""
    runtime, namespace = standalone(folder), UMBPNamespace("mla")
    ranks = []
    for tp, pcp, dcp, _ in whole.all_namespaces():
        topology = replace(whole, tp_rank=tp, pcp_rank=pcp, dcp_rank=dcp)
        rank = RankRig(_Replicated(runtime, replicas), namespace, topology, SHAPE)
        shard = tp // replicas if whole.dcp_size == 1 else 100 * pcp + tp
        rank.use_memory(SHAPE.memory(seed=shard))
        ranks.append(rank)
    layout = KVLayoutDescriptor((), whole, kv_tp_replicas=replicas)
    scheduler: Any = runtime.create_scheduler_handle(namespace, whole, layout)
    scheduler.bind_workers(
        {rank.topology.local_namespace: cast(Any, rank.worker).handshake_extra() for rank in ranks}
    )
    return ranks, scheduler


class _Replicated:
    """Makes workers whose layout says how many ranks hold the same."""

    def __init__(self, runtime: StandaloneRuntime, replicas: int) -> None:
        self._runtime = runtime
        self._replicas = replicas

    def create_worker_handle(
        self, namespace: UMBPNamespace, topology: RankTopology, layout: KVLayoutDescriptor
    ) -> Any:
        told = KVLayoutDescriptor(layout.regions, topology, kv_tp_replicas=self._replicas)
        return self._runtime.create_worker_handle(namespace, topology, told)

    def create_scheduler_handle(self, *arguments: Any) -> Any:
        return self._runtime.create_scheduler_handle(*arguments)


@pytest.mark.parametrize(
    ("sizes", "replicas", "copies"),
    [
        ({"tp_size": 2}, 2, 1),
        ({"tp_size": 4}, 2, 2),
        ({"tp_size": 4}, 4, 1),
        # Prefill-context ranks hold all KV; decode context deals it out among them.
        ({"tp_size": 1, "pcp_size": 2}, 1, 1),
        ({"tp_size": 2, "pcp_size": 2}, 2, 1),
        ({"tp_size": 2, "pcp_size": 2}, 1, 2),
        ({"tp_size": 2, "dcp_size": 2}, 1, 2),
        ({"tp_size": 1, "pcp_size": 2, "dcp_size": 2}, 1, 2),
        ({"tp_size": 2, "pcp_size": 2, "dcp_size": 4}, 1, 4),
    ],
    ids=str,
)
def test_what_ranks_hold_alike_is_stored_once_and_restored_on_all(
    folder: Path, sizes: dict[str, int], replicas: int, copies: int
) -> None:
    ranks, scheduler = replicated_rig(folder, EngineTopology(**sizes), replicas)
    chain = hashes(5)
    content = [rank.read(3) for rank in ranks]
    for rank in ranks:
        job = rank.worker.wait(rank.worker.store(rank.store_plans("batch", chain, range(5))))
        assert job.completed_keys == set(rank.keys(chain))
        rank.worker.publish(job)
    with Pool.attach(pool_path(folder, "p")) as pool:
        assert pool.stats()["objects"] == 5 * copies
    keys = [key for rank in ranks for key in rank.keys(chain)]
    assert all(scheduler.lookup(keys))
    assert scheduler.lookup_raw(0, chain) == 5
    assert cast(SupportsRawHold, scheduler).hold_raw("r", 0, chain) == 5
    assert cast(SupportsHold, scheduler).hold("s", keys) == len(keys)
    cast(SupportsHold, scheduler).unhold("r")
    cast(SupportsHold, scheduler).unhold("s")
    for rank, before in zip(ranks, content, strict=True):
        rank.scrub(range(5))
        job = rank.worker.wait(rank.worker.load(rank.load_plans("batch", chain, range(5))))
        assert job.completed_keys == set(rank.keys(chain))
        assert rank.read(3) == before
    scheduler.close()
    for rank in ranks:
        rank.worker.close()


def test_only_one_rank_reports_the_shared_pools_use(folder: Path) -> None:
    rig = rig_on(folder, tp_size=2)
    put(rig, 3)
    usages = [cast(SupportsUsage, rank.worker).usage() for rank in rig.ranks]
    assert [usage.get("pool_objects") for usage in usages] == [6.0, None]
    rig.close()


# What happens when it goes


@pytest.mark.parametrize("evictions", [0, 3])
def test_evictions_are_counted_from_when_an_engine_came_and_never_backwards(
    folder: Path, clock: TickClock, evictions: int
) -> None:
    """Scenario: a pool that had evicted was destroyed, and the count that fell ended the engine's metrics."""

    def small_pool() -> str:
        path = pool_path(folder, "p")
        Pool.create(path, 8 * 8192, slab_bytes=8192, min_object_bytes=4096).close()
        return path

    path = small_pool()
    early = rig_on(folder)
    put(early, 8)
    put(early, 4, "more")
    late = rig_on(folder)
    usage = [cast(SupportsUsage, rig.ranks[0].worker).usage for rig in (early, late)]
    assert [use()["evicted_objects"] for use in usage] == [4.0, 0.0]
    with Pool.attach(path) as pool:
        pool.destroy()
    assert [use()["evicted_objects"] for use in usage] == [4.0, 0.0]
    assert [use()["pool_capacity_bytes"] for use in usage] == [0.0, 0.0]
    small_pool()
    clock.advance(named_pool.LOOK_AGAIN_S)
    assert [use()["evicted_objects"] for use in usage] == [4.0, 0.0]
    put(late, 8, "again")
    put(late, evictions, "yet more")
    assert [use()["evicted_objects"] for use in usage] == [4.0 + evictions, float(evictions)]
    early.close()
    late.close()


@pytest.mark.parametrize("by", ["destroy", "unlink"])
def test_a_pool_that_goes_is_missed_and_one_that_comes_is_used(
    folder: Path, by: str, clock: TickClock
) -> None:
    rig = rig_on(folder)
    keys = put(rig, 4)
    held = cast(SupportsHold, rig.scheduler).hold("r", keys)
    assert held == 4
    (rank,) = rig.ranks
    unpublished = rank.worker.wait(rank.worker.store(rank.store_plans("batch", hashes(2, "late"), [0, 1])))
    path = Path(pool_path(folder, "p"))
    if by == "destroy":
        with Pool.attach(path) as pool:
            pool.destroy()
    else:
        path.unlink()
        clock.advance(named_pool.LOOK_AGAIN_S)
    assert not path.exists()
    assert found(rig, keys) == 0
    assert cast(SupportsHold, rig.scheduler).hold("s", keys) == 0
    job = rank.worker.wait(rank.worker.load(rank.load_plans("batch", hashes(4), range(4))))
    assert job.failed_keys == set(keys)
    job = rank.worker.wait(rank.worker.store(rank.store_plans("batch", hashes(4), range(4))))
    assert job.failed_keys == set(keys)
    rank.worker.publish(unpublished)
    cast(SupportsHold, rig.scheduler).unhold("r")

    # Used at once: a worker that were later than its scheduler would fail what that one has promised.
    Pool.create(path, 4 << 20, slab_bytes=64 << 10, min_object_bytes=1024).close()
    assert found(rig, keys) == 0
    assert found(rig, put(rig, 4)) == 4
    with Pool.attach(path) as pool:
        pool.audit()
        assert pool.stats()["pinned"] == 0
        assert pool.stats()["objects"] == 4
    rig.close()


def mapped(folder: Path) -> int:
    """Bytes of the pool's file that are mapped in this process, by all its attachments."""
    total, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line.split()[0].endswith(":"):
            is_inside = str(folder) in line
        elif is_inside and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def until_mapped() -> None:
    for thread in threading.enumerate():
        if thread.name == "umbp-prefault":
            thread.join(timeout=60)


@pytest.mark.parametrize("prefault", [True, "auto", False])
def test_the_pages_of_the_pool_that_stays_are_mapped_and_of_each_that_comes(
    folder: Path, prefault: bool | str, clock: TickClock
) -> None:
    """Scenario: the pages were mapped for the attachment that made the pool, which is closed at once."""
    rig = rig_on(folder, dram_prefault=prefault, dram_use_hugepages=False)
    until_mapped()
    capacity = 8 << 20
    assert (mapped(folder) >= capacity) == (prefault is not False)
    path = Path(pool_path(folder, "p"))
    with Pool.attach(path) as pool:
        pool.destroy()
    (rank,) = rig.ranks
    cast(SupportsUsage, rank.worker).usage()
    for leaving in cast(Any, rank.worker)._storer.unfinished():
        leaving.result(timeout=60)
    Pool.create(
        path, capacity, slab_bytes=64 << 10, min_object_bytes=1024, memory=MemoryPolicy(hugepages=False)
    ).close()
    clock.advance(named_pool.LOOK_AGAIN_S)
    cast(SupportsUsage, rank.worker).usage()
    until_mapped()
    assert (mapped(folder) >= capacity) == (prefault is not False)
    rig.close()


def test_the_memory_of_a_destroyed_pool_goes_with_a_look_at_its_use(folder: Path) -> None:
    """Scenario: an engine that moves nothing kept a destroyed pool mapped, and so its memory taken."""
    rig = rig_on(folder)
    put(rig, 2)
    path = pool_path(folder, "p")
    with Pool.attach(path) as pool:
        pool.destroy()
    assert str(folder) in Path("/proc/self/maps").read_text()
    (rank,) = rig.ranks
    assert set(cast(SupportsUsage, rank.worker).usage().values()) == {0.0}
    assert found(rig, rig.keys(hashes(2))) == 0
    for leaving in cast(Any, rank.worker)._storer.unfinished():
        leaving.result(timeout=60)
    assert str(folder) not in Path("/proc/self/maps").read_text()
    rig.close()


def test_a_pool_that_comes_back_too_small_for_a_block_is_not_used(folder: Path, clock: TickClock) -> None:
    rig = rig_on(folder)
    path = Path(pool_path(folder, "p"))
    path.unlink()
    Pool.create(path, 1 << 20, slab_bytes=4096, min_object_bytes=1024).close()
    clock.advance(named_pool.LOOK_AGAIN_S)
    (rank,) = rig.ranks
    job = rank.worker.wait(rank.worker.store(rank.store_plans("batch", hashes(2), range(2))))
    assert job.failed_keys == job.keys
    rig.close()


def test_only_what_has_gone_is_told_as_gone_when_the_scheduler_attaches_anew(
    folder: Path, clock: TickClock
) -> None:
    rig = rig_on(folder)
    teller = cast(SupportsEvictedKeys, rig.scheduler)
    assert list(teller.take_evicted_keys()) == []
    keys = put(rig, 6)
    cast(SupportsNote, rig.scheduler).note("r", "admit", hashes(6))
    path = Path(pool_path(folder, "p"))
    with Pool.attach(path) as pool:
        pool.remove(keys[:2])
        rig.bind(rig.scheduler)
        assert sorted(teller.take_evicted_keys()) == sorted(keys[:2])
        pool.remove(keys[2:3])
        assert list(teller.take_evicted_keys()) == keys[2:3]
        pool.destroy()
    Pool.create(path, 4 << 20, slab_bytes=64 << 10, min_object_bytes=1024).close()
    clock.advance(named_pool.LOOK_AGAIN_S)
    assert sorted(teller.take_evicted_keys()) == sorted(keys[3:])
    assert list(teller.take_evicted_keys()) == []
    rig.close()


# Quotas


def test_an_engine_fills_no_more_than_its_quota_and_takes_nothing_of_others(folder: Path) -> None:
    other = rig_on(folder, "other")
    theirs = put(other, 20)
    greedy = rig_on(folder, "greedy", namespace_quota=0.25)
    for number in range(60):
        put(greedy, 16, f"batch {number}")
    assert found(other, theirs) == 20
    with Pool.attach(pool_path(folder, "p")) as pool:
        (entry,) = [ns for ns in pool.namespaces() if ns.name == "greedy"]
        assert entry.used_bytes <= pool.capacity_bytes // 4
        assert entry.used_bytes > pool.capacity_bytes // 8
    greedy.close()
    other.close()


def test_the_options_reach_the_pool_as_json_gives_them(folder: Path) -> None:
    extra = {"mode": "standalone", "pool": "p", "pool_dir": str(folder), "total_capacity_bytes": "2MiB"}
    rig = Rig(StandaloneRuntime(parse_options(json.loads(json.dumps(extra)))), "model", 1, SHAPE)
    with Pool.attach(pool_path(folder, "p")) as pool:
        assert pool.capacity_bytes == 2 << 20
    rig.close()


def test_a_store_that_nobody_publishes_gives_its_slots_back_when_it_is_forgotten(folder: Path) -> None:
    """Scenario: publishing failed now and then, and what was reserved for it stayed so for good."""
    rig = rig_on(folder)
    (rank,) = rig.ranks
    chain = hashes(8)
    for _ in range(3):
        job = rank.worker.wait(rank.worker.store(rank.store_plans("batch", chain, range(8))))
        assert len(job.completed_keys) == 8
        del job
        assert cast(SupportsUsage, rank.worker).usage()["pool_pinned_objects"] == 0
    assert found(rig, rig.keys(chain)) == 0
    put(rig, 8)
    assert found(rig, rig.keys(chain)) == 8
    rig.close()
