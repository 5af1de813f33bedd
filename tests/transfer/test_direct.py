"""Copies by a device's driver, on a device in host memory that does everything as late as it may."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from late_device import LateCopies, LateDevice

from umbp.pool import CopyStatus, Outcome, Pool
from umbp.runtime.mover import ObjectMover
from umbp.runtime.moves import Move
from umbp.transfer import BlockRuns, CopyEngine, derive_runs, direct, pins
from umbp.transfer.direct import FAILURES_IN_A_ROW, DirectEngine
from umbp.transfer.runs import merged_columns

torch = pytest.importorskip("torch")

BLOCKS, HEADS, TOKENS, DIM, LAYERS = 24, 2, 8, 128, 3
OBJECT_BYTES = LAYERS * HEADS * TOKENS * DIM * 2
LAYOUTS = ["LBHNC", "LBNHC", "BLHNC", "BHLNC", "LHBNC"]

Caches = dict[str, Any]


def kv_caches(layout: str) -> Caches:
    """Layers' `[block, head, token, number]` views of one buffer, in some of vLLM's physical orders."""
    sizes = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": DIM}
    generator = torch.Generator().manual_seed(5)
    buffer = torch.randint(0, 30000, [sizes[axis] for axis in layout], dtype=torch.int16, generator=generator)
    ordered = buffer.permute([layout.index(axis) for axis in "LBHNC"])
    return {f"layer{i}": ordered[i] for i in range(LAYERS)}


@pytest.fixture
def caches() -> Caches:
    return kv_caches("LBHNC")


@pytest.fixture
def runs(caches: Caches) -> BlockRuns:
    return derive_runs(caches, BLOCKS)


@pytest.fixture
def pool() -> Iterator[Pool]:
    slot = OBJECT_BYTES + 4096
    with Pool.create_memfd(64 * slot, slab_bytes=8 * slot, min_object_bytes=OBJECT_BYTES) as pool:
        yield pool
        pool.audit()


@pytest.fixture
def device() -> LateDevice:
    return LateDevice(seed=7)


@pytest.fixture
def make(device: LateDevice) -> Iterator[Callable[[Caches], DirectEngine]]:
    engines: list[DirectEngine] = []

    def made(caches: Caches) -> DirectEngine:
        engines.append(DirectEngine(caches, device, LateCopies(device), 1, shortest_bytes=1))
        return engines[-1]

    yield made
    for engine in engines:
        engine.close()
    assert device.pins == {}
    assert not any(stream.pending for stream in device.streams)


@pytest.fixture
def engine(make: Callable[[Caches], DirectEngine], caches: Caches) -> DirectEngine:
    return make(caches)


def reserve(pool: Pool, count: int, name: str = "k") -> tuple[list[str], Any]:
    keys = [f"{name}{i}" for i in range(count)]
    tickets, outcomes = pool.reserve(pool.namespace("a"), keys, OBJECT_BYTES)
    assert set(outcomes.tolist()) == {Outcome.RESERVED}
    return keys, tickets


def stored(pool: Pool, engine: Any, runs: BlockRuns, blocks: list[int]) -> Any:
    """Tickets of the blocks' objects, held."""
    keys, tickets = reserve(pool, len(blocks))
    assert set(engine.store(runs, blocks, pool, tickets).tolist()) == {CopyStatus.OK}
    pool.publish(tickets)
    return pool.acquire(keys)[0]


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("per_call", [1, 40])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_one_engine_stores_the_other_loads(
    layout: str,
    per_call: int,
    checksum: bool,
    pool: Pool,
    make: Callable[[Caches], DirectEngine],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(direct, "COPIES_PER_CALL", per_call)
    caches = kv_caches(layout)
    runs = derive_runs(caches, BLOCKS)
    original = {name: cache.clone() for name, cache in caches.items()}
    blocks = np.array([3, 1, 4, 15, 9, 2, 6, 5, 23, 0, 11, 17])
    engines: dict[str, Any] = {"core": CopyEngine(2), "direct": make(caches)}
    for writer, reader in (("direct", "direct"), ("direct", "core"), ("core", "direct")):
        keys, tickets = reserve(pool, len(blocks), f"{writer} {reader}")
        statuses = engines[writer].store(runs, blocks, pool, tickets, checksum=checksum)
        assert (statuses == CopyStatus.OK).all()
        pool.publish(tickets)
        for cache in caches.values():
            cache.fill_(-1)
        held, _ = pool.acquire(keys)
        assert (engines[reader].load(runs, blocks, pool, held, checksum=checksum) == CopyStatus.OK).all()
        pool.release(held)
        untouched = np.setdiff1d(np.arange(BLOCKS), blocks)
        for name, cache in caches.items():
            assert torch.equal(cache[blocks], original[name][blocks])
            assert (cache[untouched] == -1).all()
            cache.copy_(original[name])


def test_a_store_reads_what_was_launched_before_it_was_asked_for(
    caches: Caches, runs: BlockRuns, pool: Pool, device: LateDevice, engine: DirectEngine
) -> None:
    """The forward that writes the block is still running when the store is asked for; the next one, which
    writes elsewhere, is launched before the store is at work."""
    device.launch(lambda: [cache[5].fill_(77) for cache in caches.values()])
    fence = engine.fence()
    device.launch(lambda: [cache[6].fill_(88) for cache in caches.values()])
    keys, tickets = reserve(pool, 1)
    engine.store(runs, [5], pool, tickets, fence=fence)
    pool.publish(tickets)
    held, _ = pool.acquire(keys)
    engine.load(runs, [9], pool, held)
    pool.release(held)
    assert all((cache[9] == 77).all() for cache in caches.values())


def test_a_load_overwrites_no_block_that_a_launched_forward_still_reads(
    caches: Caches, runs: BlockRuns, pool: Pool, device: LateDevice, engine: DirectEngine
) -> None:
    held = stored(pool, engine, runs, [1])
    before = caches["layer0"][2].clone()
    read: list[Any] = []
    device.launch(lambda: read.append(caches["layer0"][2].clone()))
    engine.load(runs, [2], pool, held, fence=engine.fence())
    pool.release(held)
    assert torch.equal(read[0], before)
    assert torch.equal(caches["layer0"][2], caches["layer0"][1])


def test_it_refuses_what_the_core_s_engine_refuses(
    caches: Caches, runs: BlockRuns, pool: Pool, engine: DirectEngine
) -> None:
    core = CopyEngine(1)
    keys, tickets = reserve(pool, 4)
    short = pool.reserve(pool.namespace("a"), ["short"], OBJECT_BYTES - 1)[0]
    pool.publish(tickets[3:])
    asked = [*tickets, int(short[0]), 12345]
    blocks = [0, BLOCKS, -1, 3, 4, 5]
    wanted = core.store(runs, blocks, pool, asked).tolist()
    assert engine.store(runs, blocks, pool, asked).tolist() == wanted
    assert len(set(wanted)) == 4

    engine.store(runs, [0], pool, tickets[:1], checksum=True)
    pool.publish(tickets[:1])
    held, _ = pool.acquire([keys[0], keys[3]])
    before = {name: cache.clone() for name, cache in caches.items()}
    asked, blocks = [*held, *held, 99], [7, 8, BLOCKS, -1, 9]
    for checksum in (True, False):
        wanted = core.load(runs, blocks, pool, asked, checksum=checksum).tolist()
        for name, cache in caches.items():
            cache.copy_(before[name])
        assert engine.load(runs, blocks, pool, asked, checksum=checksum).tolist() == wanted
    assert torch.equal(caches["layer1"][9:], before["layer1"][9:])
    pool.release(held)


def test_unequal_columns_and_foreign_addresses_are_refused(
    runs: BlockRuns, pool: Pool, engine: DirectEngine
) -> None:
    _, tickets = reserve(pool, 2)
    with pytest.raises(ValueError, match="unequal lengths"):
        engine.store(runs, [0], pool, tickets)
    foreign = derive_runs(kv_caches("LBHNC"), BLOCKS)
    for move in (engine.store, engine.load):
        with pytest.raises(ValueError, match="no registered KV cache"):
            move(foreign, [0, 1], pool, tickets)
    beyond = BlockRuns.from_columns(
        runs.base_address, runs.block_stride, runs.run_bytes, runs.object_offset, BLOCKS * LAYERS + 1
    )
    with pytest.raises(ValueError, match="no registered KV cache"):
        engine.store(beyond, [0, 1], pool, tickets)


def test_a_process_taken_for_dead_during_a_load_has_loaded_nothing(
    runs: BlockRuns, device: LateDevice, engine: DirectEngine
) -> None:
    """A descriptor of the pool's file was closed, so its byte lock is gone, and another process reaps while
    the copy runs: the slot may have got another object."""
    slot = OBJECT_BYTES + 4096
    with Pool.create_memfd(8 * slot, slab_bytes=slot, min_object_bytes=OBJECT_BYTES) as pool:
        held = stored(pool, engine, runs, [1])

        def reap() -> None:
            os.close(os.dup(pool.native.fd))
            code = f"from umbp.pool import Pool; Pool.attach({pool.handle.path!r}).reap()"
            subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

        device.launch(reap)
        assert engine.load(runs, [2], pool, held, fence=engine.fence()).tolist() == [CopyStatus.BAD_TICKET]
        engine.leave(pool)


# Failures


@pytest.mark.parametrize("verb", ["copy", "synchronize"])
def test_a_driver_s_failure_costs_its_own_blocks(
    caches: Caches, runs: BlockRuns, pool: Pool, device: LateDevice, engine: DirectEngine, verb: str
) -> None:
    """And what it had begun has ended when the call returns: a slot that is given back is written no more."""
    held = stored(pool, engine, runs, [1, 2])
    _, tickets = reserve(pool, 2, "other")
    for move, asked in ((engine.store, tickets), (engine.load, held)):
        device.faults[verb] = 1
        assert move(runs, [3, 4], pool, asked).tolist() == [CopyStatus.FAILED] * 2
        assert not any(stream.pending for stream in device.streams)
        assert move(runs, [3, 4], pool, asked).tolist() == [CopyStatus.OK] * 2
    pool.release(held)
    assert torch.equal(caches["layer2"][3:5], caches["layer2"][1:3])
    assert engine.reaches(pool)


def test_rows_that_were_refused_stay_refused_when_the_driver_fails(
    runs: BlockRuns, pool: Pool, device: LateDevice, engine: DirectEngine
) -> None:
    _, tickets = reserve(pool, 2)
    device.faults["copy"] = 1
    statuses = engine.store(runs, [0, BLOCKS], pool, tickets).tolist()
    assert statuses == [CopyStatus.FAILED, CopyStatus.BAD_BLOCK]


def test_a_driver_that_keeps_failing_is_not_asked_again(
    runs: BlockRuns,
    pool: Pool,
    device: LateDevice,
    make: Callable[[Caches], DirectEngine],
    caches: Caches,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fallback = LateCopies(device)
    with DirectEngineClosing(DirectEngine(caches, device, fallback, 1)) as engine:
        _, tickets = reserve(pool, 1)
        device.faults["copy"] = 1000
        for _ in range(FAILURES_IN_A_ROW):
            assert engine.store(runs, [0], pool, tickets).tolist() == [CopyStatus.FAILED]
        assert fallback.calls == 0
        assert engine.store(runs, [0], pool, tickets).tolist() == [CopyStatus.OK]
        assert fallback.calls == 1
        said = [record.getMessage() for record in caplog.records]
        assert sum("from now on copies go by way of staging" in line for line in said) == 1


class DirectEngineClosing:
    def __init__(self, engine: DirectEngine) -> None:
        self.engine = engine

    def __enter__(self) -> DirectEngine:
        return self.engine

    def __exit__(self, *_: object) -> None:
        self.engine.close()


def test_a_failed_transfer_is_a_lost_key_and_nothing_more(
    caches: Caches, runs: BlockRuns, pool: Pool, device: LateDevice, engine: DirectEngine
) -> None:
    mover = ObjectMover(pool, pool.namespace("a"), engine, has_checksums=False)
    keys = ["x", "y"]
    device.faults["synchronize"] = 1
    moved = mover.store(Move(runs, keys, [0, 1], keys), mover.fence())
    assert moved.is_done.tolist() == [False, False]
    assert moved.error == "failed: the copy ended with failed"
    assert pool.stats()["pinned"] == 0
    assert mover.store(Move(runs, keys, [0, 1], keys), mover.fence()).is_done.all()
    assert mover.publish(keys) == []
    device.faults["copy"] = 1
    assert not mover.load(Move(runs, keys, [2, 3], keys), mover.fence()).is_done.any()
    assert mover.load(Move(runs, keys, [2, 3], keys), mover.fence()).is_done.all()
    assert torch.equal(caches["layer0"][2:4], caches["layer0"][:2])
    assert pool.stats()["pinned"] == 0


# Pinning


def test_a_pool_is_pinned_once_by_portions_that_split_no_slab(
    runs: BlockRuns,
    pool: Pool,
    device: LateDevice,
    engine: DirectEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pins, "PORTION_BYTES", 3 * pool.slab_bytes + 8192)
    engine.prepare(pool)
    address, _ = pool.arena
    assert sorted(device.pins) == [address + 3 * i * pool.slab_bytes for i in range(3)]
    assert sum(device.pins.values()) == pool.capacity_bytes
    pinned = dict(device.pins)
    held = stored(pool, engine, runs, list(range(BLOCKS)))
    engine.load(runs, list(range(BLOCKS)), pool, held)
    pool.release(held)
    assert device.pins == pinned
    engine.leave(pool)
    assert device.pins == {}


def test_a_pool_that_cannot_be_pinned_is_copied_the_other_way_with_one_warning(
    runs: BlockRuns,
    pool: Pool,
    device: LateDevice,
    caches: Caches,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second portion is refused, so the first is given back, too."""
    monkeypatch.setattr(pins, "PORTION_BYTES", pool.slab_bytes)
    fallback = LateCopies(device)
    real_pin = device.pin

    def pin(address: int, size: int) -> None:
        if len(device.pins) == 2:
            device.faults["pin"] = 1
        real_pin(address, size)

    monkeypatch.setattr(device, "pin", pin)
    with DirectEngineClosing(DirectEngine(caches, device, fallback, 1)) as engine:
        engine.prepare(pool)
        assert device.pins == {}
        held = stored(pool, engine, runs, [1])
        assert engine.load(runs, [2], pool, held).tolist() == [CopyStatus.OK]
        pool.release(held)
        assert fallback.calls == 2
        assert torch.equal(caches["layer1"][2], caches["layer1"][1])
        assert pool.resize(4 * pool.slab_bytes) == 4 * pool.slab_bytes
    assert sum("can't be pinned" in record.getMessage() for record in caplog.records) == 1


def test_a_pinned_pool_keeps_its_size(pool: Pool, engine: DirectEngine) -> None:
    engine.prepare(pool)
    with pytest.raises(Exception, match="registered its memory"):
        pool.resize(pool.slab_bytes)
    engine.leave(pool)
    assert pool.resize(pool.slab_bytes) == pool.slab_bytes


def test_memory_that_a_pool_does_not_have_is_not_pinned(
    device: LateDevice, engine: DirectEngine, runs: BlockRuns, tmp_path: Path
) -> None:
    """A pool that can grow has address space for all that it may become."""
    slab = 8 * (OBJECT_BYTES + 4096)
    with Pool.create(
        tmp_path / "pool", 4 * slab, slab_bytes=slab, min_object_bytes=OBJECT_BYTES, max_bytes=64 * slab
    ) as pool:
        engine.prepare(pool)
        assert sum(device.pins.values()) == 4 * slab
        held = stored(pool, engine, runs, [1, 2, 3])
        pool.release(held)
        engine.leave(pool)


def test_pools_come_and_go_under_one_engine(
    runs: BlockRuns, device: LateDevice, engine: DirectEngine
) -> None:
    """A pool is re-created while engines run."""
    slot = OBJECT_BYTES + 4096
    for _ in range(3):
        with Pool.create_memfd(16 * slot, slab_bytes=8 * slot, min_object_bytes=OBJECT_BYTES) as pool:
            pool.release(stored(pool, engine, runs, [1, 2]))
            assert device.pins
            engine.leave(pool)
            assert device.pins == {}


# Layouts


def test_blocks_in_many_short_pieces_go_the_other_way(pool: Pool, device: LateDevice) -> None:
    caches = kv_caches("LHBNC")
    runs = derive_runs(caches, BLOCKS)
    piece = TOKENS * DIM * 2
    for shortest, calls in ((piece, 0), (piece + 1, 1)):
        fallback = LateCopies(device)
        with DirectEngineClosing(
            DirectEngine(caches, device, fallback, 1, shortest_bytes=shortest)
        ) as engine:
            _, tickets = reserve(pool, 1, f"at {shortest} ")
            assert engine.store(runs, [0], pool, tickets).tolist() == [CopyStatus.OK]
            assert fallback.calls == calls


@pytest.mark.parametrize(
    ("layout", "copies"), [("LBHNC", 3), ("LBNHC", 3), ("BLHNC", 1), ("BHLNC", 6), ("LHBNC", 6)]
)
def test_pieces_that_touch_are_one_copy(
    layout: str, copies: int, pool: Pool, device: LateDevice, make: Callable[[Caches], DirectEngine]
) -> None:
    """Where a block's layers follow each other in memory, as in the object, the block is one copy."""
    caches = kv_caches(layout)
    pool.release(stored(pool, make(caches), derive_runs(caches, BLOCKS), [0, 5]))
    assert device.calls == [2 * copies]


def test_merged_pieces_cover_the_same_bytes() -> None:
    runs = BlockRuns.from_columns(
        [1000, 1010, 1030, 1040, 2000, 2010],
        [100, 100, 100, 100, 100, 200],
        [10, 20, 10, 5, 10, 10],
        [0, 10, 30, 50, 60, 70],
        8,
    )
    base, stride, length, offset = merged_columns(runs)
    assert base.tolist() == [1000, 1040, 2000, 2010]
    assert stride.tolist() == [100, 100, 100, 200]
    assert length.tolist() == [40, 5, 10, 10]
    assert offset.tolist() == [0, 50, 60, 70]


def test_nothing_to_move_is_no_call(
    runs: BlockRuns, pool: Pool, device: LateDevice, engine: DirectEngine
) -> None:
    assert len(engine.store(runs, [], pool, [])) == 0
    assert engine.load(runs, [0], pool, [999]).tolist() == [CopyStatus.BAD_TICKET]
    assert device.calls == []
