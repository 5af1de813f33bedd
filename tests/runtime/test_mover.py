"""What a job's keys come to, from what became of its rows; and what moving many objects costs beside it."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbp.data import BlockLoadBatch, BlockStoreBatch, TransferJobState
from umbp.errors import SegmentError
from umbp.pool import Pool
from umbp.runtime.mover import Moved, ObjectMover, settle
from umbp.runtime.moves import Move
from umbp.transfer import BlockRuns, CopyEngine

BLOCKS = 4096
BLOCK_BYTES = 64

ROWS = st.lists(st.tuples(st.sampled_from("abcd"), st.booleans(), st.sampled_from([0, 8])), max_size=6)


@given(st.lists(ROWS, min_size=1, max_size=3), st.booleans())
def test_a_key_is_lost_if_any_of_its_rows_is_and_counts_its_bytes_once(
    parts: list[list[tuple[str, bool, int]]], is_cut_short: bool
) -> None:
    rows = [row for part in parts for row in part]
    column = [key for key, _, _ in rows]
    job = TransferJobState(BlockLoadBatch(column, range(len(rows)), [0] * len(rows), "r"))
    job.start()
    told = parts[:-1] if is_cut_short else parts
    moves = [
        Moved(
            job.key_column if len(parts) == 1 else [key for key, _, _ in part],
            np.array([is_done for _, is_done, _ in part], dtype=bool),
            np.array([size for _, _, size in part], dtype=np.int64),
            None if all(is_done for _, is_done, _ in part) else "lost",
        )
        for part in told
    ]
    settle(job, moves, "cut short" if is_cut_short else None)
    seen = [row for part in told for row in part]
    lost = {key for key, is_done, _ in seen if not is_done} | (set(column) - {key for key, _, _ in seen})
    assert job.completed_keys == set(column) - lost
    assert job.failed_keys == lost
    assert not lost or job.error == ("cut short" if is_cut_short else "lost")
    assert not column or job.status == ("failed" if lost else "completed")
    for key in set(column):
        sizes = [size for (name, _, _), size in zip(rows, job.plan_bytes or [], strict=True) if name == key]
        assert sum(sizes) == max((size for name, _, size in seen if name == key), default=0)
    assert job.completed_bytes == sum(
        size for key, size in zip(column, job.plan_bytes or [], strict=True) if key not in lost
    )


@pytest.fixture
def mover() -> Iterator[ObjectMover]:
    with (
        Pool.create_memfd(64 << 20, slab_bytes=1 << 20, min_object_bytes=BLOCK_BYTES) as pool,
        CopyEngine(1) as engine,
    ):
        mover = ObjectMover(pool, pool.namespace("a"), engine, has_checksums=False)
        yield mover
        mover.close()
        if not pool.native.is_expelled:
            pool.audit()


@pytest.fixture
def runs() -> Iterator[BlockRuns]:
    memory = np.zeros((BLOCKS, BLOCK_BYTES), dtype=np.uint8)
    memory[:] = np.arange(BLOCKS, dtype=np.uint16).astype(np.uint8)[:, None]
    yield BlockRuns.from_columns([memory.ctypes.data], [BLOCK_BYTES], [BLOCK_BYTES], [0], BLOCKS)
    del memory


def move(runs: BlockRuns, keys: list[str]) -> Move:
    return Move(runs, keys, range(len(keys)), keys)


def test_a_second_row_or_store_of_a_key_is_done_by_the_first(mover: ObjectMover, runs: BlockRuns) -> None:
    first = mover.store(move(runs, ["a", "b", "a"]), None)
    assert first.is_done.tolist() == [True] * 3
    assert first.copied_bytes.tolist() == [BLOCK_BYTES, BLOCK_BYTES, 0]
    again = mover.store(move(runs, ["b", "c"]), None)
    assert again.is_done.tolist() == [True] * 2
    assert again.copied_bytes.tolist() == [0, BLOCK_BYTES]
    assert mover.publish(["a", "b", "a"]) == []
    assert mover.publish(["b", "c"]) == []
    assert mover.pool.lookup(["a", "b", "c"]).all()
    assert mover.store(move(runs, ["a"]), None).is_done.all()
    assert mover.publish(["a"]) == []


def test_a_row_whose_copy_fails_takes_the_later_rows_of_its_key_with_it(
    mover: ObjectMover, runs: BlockRuns
) -> None:
    moved = mover.store(Move(runs, ["a", "b", "a"], [BLOCKS, 1, 2], ["a", "b", "a"]), None)
    assert moved.is_done.tolist() == [False, True, False]
    assert moved.error is not None
    assert mover.publish(["a", "b"]) == []
    assert mover.pool.lookup(["a", "b"]).tolist() == [False, True]


def test_what_a_clear_took_away_is_stored_anew_and_only_that_is_published(
    mover: ObjectMover, runs: BlockRuns
) -> None:
    assert mover.store(move(runs, ["a", "b"]), None).is_done.all()
    mover.pool.clear(mover.pool.namespace("a"))
    assert mover.store(move(runs, ["b", "c"]), None).is_done.all()
    assert mover.publish(["a", "b", "c"]) == ["a"]
    assert mover.pool.lookup(["a", "b", "c"]).tolist() == [False, True, True]


def test_what_is_published_once_the_pool_is_left_is_lost(mover: ObjectMover, runs: BlockRuns) -> None:
    mover.store(move(runs, ["a", "b"]), None)
    assert mover.publish(["a"]) == []
    mover.close()
    assert mover.publish(["b"]) == ["b"]
    assert mover.pool.lookup(["a", "b"]).tolist() == [True, False]
    assert mover.pool.stats()["pinned_here"] == 0


def test_a_pool_that_has_taken_its_process_for_dead_can_be_left(mover: ObjectMover, runs: BlockRuns) -> None:
    mover.store(move(runs, ["a"]), None)
    os.close(os.dup(mover.pool.native.fd))  # drops the byte lock
    reap = "import sys, umbp.pool; umbp.pool.Pool.attach(sys.argv[1]).close()"
    subprocess.run([sys.executable, "-c", reap, mover.pool.handle.path], check=True)
    with pytest.raises(SegmentError):
        mover.pool.audit()
    mover.close()


def test_a_pool_without_room_loses_the_tail_and_says_so(runs: BlockRuns) -> None:
    with (
        Pool.create_memfd(2 * 8192, slab_bytes=8192, min_object_bytes=BLOCK_BYTES) as pool,
        CopyEngine(1) as engine,
    ):
        mover = ObjectMover(pool, pool.namespace("a"), engine, has_checksums=False)
        moved = mover.store(move(runs, list("abcdef")), None)
        assert moved.is_done.tolist() == [True] * 4 + [False] * 2
        assert moved.error == "full: no room (full)"
        mover.close()
        assert pool.stats()["pinned"] == 0


def test_moving_an_object_costs_a_microsecond_beside_the_copy(mover: ObjectMover, runs: BlockRuns) -> None:
    """Of 4,096 objects at once, all going well; the bound leaves room for a busy machine."""
    best_s = {"store": 1.0, "load": 1.0}
    for number in range(9):
        hashes = [hashlib.sha256(f"{number} {block}".encode()).digest() for block in range(BLOCKS)]
        keys = [f"umbp:vllm:v1:n:tp0:pcp0:dcp0:pp0:g0:{block.hex()}" for block in hashes]
        batch = BlockStoreBatch(
            keys, range(BLOCKS), [0] * BLOCKS, hashes, [None] * BLOCKS, [()] * BLOCKS, [16] * BLOCKS, "r"
        )
        for verb, act in (("store", mover.store), ("load", mover.load)):
            job = TransferJobState(batch)
            job.start()
            begun = time.perf_counter()
            settle(job, [act(Move(runs, batch.keys, batch.block_ids, batch.keys), None)])
            if verb == "store":
                assert mover.publish(batch.keys) == []
            best_s[verb] = min(best_s[verb], time.perf_counter() - begun)
            assert job.completed_bytes == BLOCKS * BLOCK_BYTES
    assert best_s["store"] < BLOCKS * 4e-6
    assert best_s["load"] < BLOCKS * 3e-6
