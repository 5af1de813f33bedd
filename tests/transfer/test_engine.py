"""Copies into reserved slots and out of acquired ones."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from test_runs import View, backing_for, layers_of

from umbp.errors import ConfigError
from umbp.pool import CopyStatus, Outcome, Pool
from umbp.transfer import BlockRuns, CopyEngine, derive_runs

BLOCKS = 40


@pytest.fixture
def kv() -> npt.NDArray[np.uint8]:
    return np.random.default_rng(3).integers(0, 256, (4, BLOCKS, 9000), np.uint8)


@pytest.fixture
def runs(kv: npt.NDArray[np.uint8]) -> BlockRuns:
    return derive_runs({f"l{i}": View(layer) for i, layer in enumerate(kv)}, BLOCKS)


@pytest.fixture
def pool(runs: BlockRuns) -> Iterator[Pool]:
    slot = runs.object_bytes // 4096 * 4096 + 4096
    with Pool.create_memfd(
        64 * slot, slab_bytes=8 * slot, min_object_bytes=runs.object_bytes, lock_patience_s=5.0
    ) as pool:
        yield pool
        pool.audit()


@pytest.fixture(params=[1, 2, 4])
def engine(request: pytest.FixtureRequest) -> Iterator[CopyEngine]:
    with CopyEngine(request.param) as engine:
        yield engine


def reserve(pool: Pool, count: int, length: int, name: str = "k") -> tuple[list[str], npt.NDArray[np.uint64]]:
    keys = [f"{name}{i}" for i in range(count)]
    tickets, outcomes = pool.reserve(pool.namespace("a"), keys, length)
    assert set(outcomes.tolist()) == {Outcome.RESERVED}
    return keys, tickets


@pytest.mark.parametrize("checksum", [False, True])
def test_what_is_stored_is_loaded_into_any_blocks(
    kv: npt.NDArray[np.uint8], runs: BlockRuns, pool: Pool, engine: CopyEngine, checksum: bool
) -> None:
    before = kv.copy()
    source, target = np.arange(0, 15), np.arange(39, 24, -1)
    keys, tickets = reserve(pool, 15, runs.object_bytes)
    assert set(engine.store(runs, source, pool, tickets, checksum=checksum).tolist()) == {CopyStatus.OK}
    assert set(pool.publish(tickets).tolist()) == {Outcome.PUBLISHED}
    held, _ = pool.acquire(keys)
    kv[:, 15:] = 0
    assert set(engine.load(runs, target, pool, held, checksum=checksum).tolist()) == {CopyStatus.OK}
    assert (kv[:, :15] == before[:, :15]).all()
    assert (kv[:, target] == before[:, source]).all()
    assert not kv[:, 15:25].any()
    pool.release(held)


@pytest.mark.parametrize("order", ["LBHN", "LHBN", "BHLN", "BLNH"])
def test_blocks_of_several_runs_come_back_whole(order: str, engine: CopyEngine) -> None:
    backing = backing_for(order)
    layers = layers_of(backing, order)
    before = [layer.copy() for layer in layers]
    runs = derive_runs({f"l{i}": View(layer) for i, layer in enumerate(layers)}, 5)
    with Pool.create_memfd(8 * 4096, slab_bytes=4096, min_object_bytes=runs.object_bytes) as pool:
        keys, tickets = reserve(pool, 2, runs.object_bytes)
        assert engine.store(runs, [0, 3], pool, tickets).tolist() == [CopyStatus.OK] * 2
        pool.publish(tickets)
        held, _ = pool.acquire(keys)
        backing[:] = 0
        assert engine.load(runs, [4, 1], pool, held).tolist() == [CopyStatus.OK] * 2
        for layer, was in zip(layers, before, strict=True):
            assert (layer[4] == was[0]).all()
            assert (layer[1] == was[3]).all()
            assert not layer[[0, 2, 3]].any()


def test_a_store_needs_this_process_own_reservation(runs: BlockRuns, pool: Pool, engine: CopyEngine) -> None:
    keys, tickets = reserve(pool, 2, runs.object_bytes)
    pool.publish(tickets[:1])
    held, _ = pool.acquire(keys[:1])
    bad = [int(tickets[0]), int(held[0]), 0, 2**64 - 1]
    assert engine.store(runs, [0] * 4, pool, bad).tolist() == [CopyStatus.BAD_TICKET] * 4
    pool.release(held)


def test_a_load_needs_a_pin(runs: BlockRuns, pool: Pool, engine: CopyEngine) -> None:
    keys, tickets = reserve(pool, 2, runs.object_bytes)
    engine.store(runs, [1, 2], pool, tickets)
    assert engine.load(runs, [0], pool, tickets[:1]).tolist() == [CopyStatus.BAD_TICKET]  # reserved
    pool.publish(tickets)
    assert engine.load(runs, [0], pool, tickets[:1]).tolist() == [CopyStatus.BAD_TICKET]  # no pin
    held, _ = pool.acquire(keys)
    pool.remove(keys[:1])
    assert engine.load(runs, [0, 3], pool, held).tolist() == [CopyStatus.OK] * 2  # removed, but still pinned
    pool.release(held)
    assert engine.load(runs, [0, 3], pool, held).tolist() == [CopyStatus.BAD_TICKET] * 2


def test_blocks_outside_the_cache_are_refused_one_by_one(
    kv: npt.NDArray[np.uint8], runs: BlockRuns, pool: Pool, engine: CopyEngine
) -> None:
    before = kv.copy()
    keys, tickets = reserve(pool, 4, runs.object_bytes)
    ok, bad = CopyStatus.OK, CopyStatus.BAD_BLOCK
    assert engine.store(runs, [0, -1, BLOCKS, BLOCKS - 1], pool, tickets).tolist() == [ok, bad, bad, ok]
    engine.store(runs, [1, 2], pool, tickets[1:3])
    pool.publish(tickets)
    held, _ = pool.acquire(keys)
    assert engine.load(runs, [2**40, 1, -(2**62), 0], pool, held).tolist() == [bad, ok, bad, ok]
    assert (kv[:, 2:] == before[:, 2:]).all()
    pool.release(held)


def test_an_object_of_another_length_is_refused(runs: BlockRuns, pool: Pool, engine: CopyEngine) -> None:
    keys, tickets = reserve(pool, 1, runs.object_bytes - 1)
    assert engine.store(runs, [0], pool, tickets).tolist() == [CopyStatus.BAD_LENGTH]
    pool.publish(tickets)
    held, _ = pool.acquire(keys)
    assert engine.load(runs, [0], pool, held).tolist() == [CopyStatus.BAD_LENGTH]
    pool.release(held)


def test_a_flipped_bit_is_found_and_nothing_else_is_written(
    kv: npt.NDArray[np.uint8], runs: BlockRuns, pool: Pool, engine: CopyEngine
) -> None:
    keys, tickets = reserve(pool, 3, runs.object_bytes)
    engine.store(runs, [0, 1, 2], pool, tickets, checksum=True)
    pool.publish(tickets)
    held, _ = pool.acquire(keys)
    address = int(pool.payload(held)[0][1]) + 12345
    ctypes.c_uint8.from_address(address).value ^= 4
    others = np.delete(np.arange(BLOCKS), [10, 11, 12])
    before = kv.copy()
    ok, bad = CopyStatus.OK, CopyStatus.BAD_CHECKSUM
    assert engine.load(runs, [10, 11, 12], pool, held, checksum=True).tolist() == [ok, bad, ok]
    assert (kv[:, others] == before[:, others]).all()
    assert (kv[:, [10, 12]] == before[:, [0, 2]]).all()
    assert engine.load(runs, [11], pool, held[1:2], checksum=False).tolist() == [ok]
    pool.release(held)


def test_what_was_stored_without_a_checksum_does_not_pass_for_checked(
    runs: BlockRuns, pool: Pool, engine: CopyEngine
) -> None:
    keys, tickets = reserve(pool, 1, runs.object_bytes)
    engine.store(runs, [0], pool, tickets)
    pool.publish(tickets)
    held, _ = pool.acquire(keys)
    assert engine.load(runs, [1], pool, held, checksum=True).tolist() == [CopyStatus.BAD_CHECKSUM]
    pool.release(held)


def test_unequal_columns_are_refused(runs: BlockRuns, pool: Pool, engine: CopyEngine) -> None:
    with pytest.raises(ConfigError):
        engine.store(runs, [0, 1], pool, [1])
    assert len(engine.load(runs, [], pool, [])) == 0


def test_threads_may_copy_at_once(
    kv: npt.NDArray[np.uint8], runs: BlockRuns, pool: Pool, engine: CopyEngine
) -> None:
    """Each thread moves its own blocks to and fro; nobody's bytes end elsewhere."""
    before = kv.copy()
    wrong: list[str] = []

    def work(name: int) -> None:
        blocks = np.arange(name * 10, name * 10 + 10)
        keys, tickets = reserve(pool, 10, runs.object_bytes, f"t{name}.")
        statuses = set(engine.store(runs, blocks, pool, tickets).tolist())
        pool.publish(tickets)
        held, _ = pool.acquire(keys)
        for _ in range(20):
            kv[:, blocks] = 0
            statuses |= set(engine.load(runs, blocks, pool, held).tolist())
        pool.release(held)
        if statuses != {CopyStatus.OK} or (kv[:, blocks] != before[:, blocks]).any():
            wrong.append(f"thread {name}: {statuses}")

    pool.namespace("a")
    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_an_engine_needs_a_sensible_number_of_threads() -> None:
    for threads in (0, 1000):
        with pytest.raises(ConfigError):
            CopyEngine(threads)
    assert CopyEngine(3).threads == 3


WITHOUT_THREADS = """
import resource
import numpy as np
from umbp.pool import Pool
from umbp.transfer import BlockRuns, CopyEngine

pool = Pool.create_memfd(8 << 20, slab_bytes=1 << 20, min_object_bytes=4096)
memory = np.full(64 * 4096, 3, np.uint8)
runs = BlockRuns.from_columns([memory.ctypes.data], [4096], [4096], [0], 64)
tickets, _ = pool.reserve(pool.namespace("a"), [str(each) for each in range(64)], 4096)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (20 << 20), resource.RLIM_INFINITY))
resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, resource.RLIM_INFINITY))
engine = CopyEngine(16)
assert 1 <= engine.threads < 16, engine.threads
assert not engine.store(runs, range(64), pool, tickets).any()
engine.close()
print("fewer")
"""


def test_an_engine_does_with_the_threads_that_the_system_has() -> None:
    """Where a stack finds no room there is no thread; a limit of processes ends the same way."""
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_THREADS], capture_output=True, text=True, timeout=60, check=False
    )
    assert run.stdout == "fewer\n", run.stderr


def test_what_a_device_may_move_is_what_the_engine_itself_would(
    runs: BlockRuns, pool: Pool, engine: CopyEngine
) -> None:
    """Every way to be refused, beside a good row: the halves for a device answer as the whole call does, and
    give an address for the good rows alone."""
    keys, tickets = reserve(pool, 4, runs.object_bytes)
    _, short = reserve(pool, 1, runs.object_bytes - 1, "short")
    done = pool.reserve(pool.namespace("a"), ["done"], runs.object_bytes)[0]
    pool.publish(done)
    blocks = [0, BLOCKS, -1, 3, 4, 5, 6]
    asked = [*tickets, int(short[0]), int(done[0]), 12345]
    statuses, addresses = engine.open_stores(runs, blocks, pool, asked)
    assert statuses.tolist() == engine.store(runs, blocks, pool, asked).tolist()
    assert set(statuses.tolist()) == {
        *(CopyStatus.OK, CopyStatus.BAD_TICKET, CopyStatus.BAD_BLOCK, CopyStatus.BAD_LENGTH)
    }
    payloads, _ = pool.payload(asked)
    assert addresses.tolist() == np.where(statuses == CopyStatus.OK, payloads, 0).tolist()

    pool.abandon(tickets[1:3])
    pool.publish(tickets[[0, 3]])
    held, _ = pool.acquire([keys[0], keys[3], "done"])
    pool.release(held[2:])
    blocks = [0, BLOCKS, 5, 6]
    asked = [*held, int(short[0])]
    for checksum in (False, True):
        statuses, addresses = engine.open_loads(runs, blocks, pool, asked, checksum=checksum)
        assert statuses.tolist() == engine.load(runs, blocks, pool, asked, checksum=checksum).tolist()
        payloads, _ = pool.payload(asked)
        assert addresses.tolist() == np.where(statuses == CopyStatus.OK, payloads, 0).tolist()
    pool.release(held[:2])


def test_a_device_s_bytes_pass_for_checked_once_their_checksums_are_added(
    kv: npt.NDArray[np.uint8], runs: BlockRuns, pool: Pool, engine: CopyEngine
) -> None:
    keys, tickets = reserve(pool, 2, runs.object_bytes)
    statuses, addresses = engine.open_stores(runs, [7, 8], pool, tickets)
    assert set(statuses.tolist()) == {CopyStatus.OK}
    for block, address in zip((7, 8), addresses.tolist(), strict=True):
        content = b"".join(layer[block].tobytes() for layer in kv)
        ctypes.memmove(address, content, len(content))
    assert engine.checksum_stores(runs, pool, [int(tickets[0]), 999]).tolist() == [
        CopyStatus.OK,
        CopyStatus.BAD_TICKET,
    ]
    pool.publish(tickets)
    held, _ = pool.acquire(keys)
    wanted = [CopyStatus.OK, CopyStatus.BAD_CHECKSUM]
    assert engine.open_loads(runs, [0, 1], pool, held, checksum=True)[0].tolist() == wanted
    assert engine.load(runs, [0, 1], pool, held, checksum=True).tolist() == wanted
    assert (kv[:, 0] == kv[:, 7]).all()
    pool.release(held)
