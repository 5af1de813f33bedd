"""How fast blocks move, against one copy of the same bytes from or to pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from umbp.cli.bench.report import Row, rounded
from umbp.cli.bench.timing import interleaved
from umbp.cli.gpu.lab import Lab
from umbp.pool import Pool, slot_bytes
from umbp.transfer import derive_runs

if TYPE_CHECKING:
    import torch

ROUNDS = 7
CASES = ((32, 64 << 10), (60, 8 << 10), (60, 2 << 10))
"""Runs of an object, and bytes of a run."""


def rates(lab: Lab, all_bytes: int) -> Iterator[Row]:
    """One row for each case, direction and engine; about `all_bytes` move each time."""
    for ranges, range_bytes in CASES:
        yield from _rates_of(lab, ranges, range_bytes, max(1, all_bytes // (ranges * range_bytes)))


def _rates_of(lab: Lab, ranges: int, range_bytes: int, objects: int) -> Iterator[Row]:
    import torch

    buffer = torch.zeros((ranges, objects, range_bytes), dtype=torch.uint8, device=lab.device)
    caches = {f"layer{i}": buffer[i] for i in range(ranges)}
    runs = derive_runs(caches, objects)
    slot = slot_bytes(runs.object_bytes)
    blocks = np.random.default_rng(2).permutation(objects)
    engines = lab.engines(caches)
    per_slab = max(1, min(objects, (64 << 20) // slot))
    slabs = 2 * (-(-objects // per_slab))
    with Pool.create_memfd(
        slabs * per_slab * slot, slab_bytes=per_slab * slot, min_object_bytes=runs.object_bytes
    ) as pool:
        keys = [str(i) for i in range(objects)]
        namespace = pool.namespace("rates")
        tickets, _ = pool.reserve(namespace, [f"new {key}" for key in keys], runs.object_bytes)
        written, _ = pool.reserve(namespace, keys, runs.object_bytes)
        pool.publish(written)
        held, _ = pool.acquire(keys)
        to_host, to_device = _references(lab, buffer)
        cases: dict[str, Callable[[], object]] = {"store memcpy": to_host, "load memcpy": to_device}
        for name, engine in engines.items():
            engine.prepare(pool)
            cases[f"store {name}"] = lambda e=engine: e.store(runs, blocks, pool, tickets)  # type: ignore[misc]
            cases[f"load {name}"] = lambda e=engine: e.load(runs, blocks, pool, held)  # type: ignore[misc]
        times = interleaved(cases, ROUNDS)
        for engine in engines.values():
            engine.leave(pool)
            engine.close()
        pool.release(held)
        pool.abandon(tickets)
    moved_bytes = objects * runs.object_bytes
    for case, each in times.items():
        op, _, name = case.partition(" ")
        yield {
            "op": op,
            "engine": name,
            "ranges": ranges,
            "range_bytes": range_bytes,
            "objects": objects,
            "gb_per_s": rounded(moved_bytes / each.median_s / 1e9),
            "ratio_to_memcpy": rounded(times[f"{op} memcpy"].median_s / each.median_s),
        }


def _references(lab: Lab, buffer: torch.Tensor) -> tuple[Callable[[], None], Callable[[], None]]:
    """All of the buffer's bytes in one copy to pinned memory, and back."""
    import torch

    pinned = torch.empty(buffer.shape, dtype=torch.uint8, pin_memory=buffer.device.type != "cpu")

    def to_host() -> None:
        pinned.copy_(buffer, non_blocking=True)
        lab.settle()

    def to_device() -> None:
        buffer.copy_(pinned, non_blocking=True)
        lab.settle()

    return to_host, to_device
