"""Staged copies move the same bytes as direct ones, on CPU tensors; on a device only the streams differ."""

from __future__ import annotations

import numpy as np
import pytest

from umbp.pool import CopyStatus, Outcome, Pool
from umbp.transfer import CopyEngine, derive_runs, staged
from umbp.transfer.staged import StagedEngine

torch = pytest.importorskip("torch")

BLOCKS, HEADS, TOKENS, DIM = 24, 2, 8, 16


def kv_caches(layout: str) -> dict[str, object]:
    """Three layers' `[block, head, token, number]` views of one buffer, in some of vLLM's physical orders."""
    sizes = {"L": 3, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": DIM}
    generator = torch.Generator().manual_seed(5)
    buffer = torch.randint(0, 30000, [sizes[axis] for axis in layout], dtype=torch.int16, generator=generator)
    ordered = buffer.permute([layout.index(axis) for axis in "LBHNC"])
    return {f"layer{i}": ordered[i] for i in range(3)}


@pytest.fixture
def pool() -> Pool:
    object_bytes = 3 * HEADS * TOKENS * DIM * 2
    return Pool.create_memfd(1 << 20, slab_bytes=1 << 16, min_object_bytes=object_bytes)


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("staging_objects", [1, 5, 1000])
@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "BLHNC", "BHLNC", "LHBNC"])
def test_what_one_engine_stores_the_other_loads(
    layout: str, staging_objects: int, checksum: bool, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = kv_caches(layout)
    runs = derive_runs(caches, BLOCKS)
    monkeypatch.setattr(staged, "STAGING_BYTES", staging_objects * runs.object_bytes)
    original = {name: cache.clone() for name, cache in caches.items()}
    blocks = np.array([3, 1, 4, 15, 9, 2, 6, 5, 23, 0, 11, 17])
    engines = {"direct": CopyEngine(2), "staged": StagedEngine(caches, 2)}
    for writer, reader in (("direct", "staged"), ("staged", "direct"), ("staged", "staged")):
        namespace = pool.namespace(f"{layout} {writer} {reader}")
        keys = [f"{layout} {writer} {reader} {block}" for block in blocks]
        tickets, outcomes = pool.reserve(namespace, keys, runs.object_bytes)
        assert (outcomes == Outcome.RESERVED).all()
        stored = engines[writer].store(runs, blocks, pool, tickets, checksum=checksum)
        assert (stored == CopyStatus.OK).all()
        pool.publish(tickets)
        for cache in caches.values():
            cache.fill_(-1)
        held, _ = pool.acquire(keys)
        loaded = engines[reader].load(runs, blocks, pool, held, checksum=checksum)
        assert (loaded == CopyStatus.OK).all()
        pool.release(held)
        untouched = np.setdiff1d(np.arange(BLOCKS), blocks)
        for name, cache in caches.items():
            assert torch.equal(cache[blocks], original[name][blocks])
            assert (cache[untouched] == -1).all()
            cache.copy_(original[name])
        pool.clear(namespace)
    pool.audit()


def test_a_block_outside_and_a_foreign_ticket_fail_alone(pool: Pool) -> None:
    caches = kv_caches("LBHNC")
    runs = derive_runs(caches, BLOCKS)
    engine = StagedEngine(caches, 1)
    tickets, _ = pool.reserve(pool.namespace("n"), ["a", "b", "c"], runs.object_bytes)
    wanted = [CopyStatus.OK, CopyStatus.BAD_BLOCK, CopyStatus.BAD_TICKET]
    assert engine.store(runs, [0, BLOCKS, 2], pool, [*tickets[:2], 12345]).tolist() == wanted
    pool.publish(tickets[:1])
    held, _ = pool.acquire(["a"])
    before = caches["layer0"].clone()
    assert engine.load(runs, [-1], pool, held).tolist() == [CopyStatus.BAD_BLOCK]
    assert engine.load(runs, [1], pool, [999]).tolist() == [CopyStatus.BAD_TICKET]
    assert torch.equal(caches["layer0"], before)


def test_addresses_outside_the_registered_caches_are_refused(pool: Pool) -> None:
    engine = StagedEngine(kv_caches("LBHNC"), 1)
    others = kv_caches("LBHNC")
    runs = derive_runs(others, BLOCKS)
    tickets, _ = pool.reserve(pool.namespace("n"), ["a"], runs.object_bytes)
    with pytest.raises(ValueError, match="no registered KV cache"):
        engine.store(runs, [0], pool, tickets)
