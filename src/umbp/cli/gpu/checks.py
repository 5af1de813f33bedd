"""Right bytes at the right time: every engine, every layout, beside a busy compute stream."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from umbp.cli.gpu.lab import Lab, is_what_it_says
from umbp.cli.gpu.layouts import LAYOUTS, Caches, Layout
from umbp.pool import CopyStatus, Outcome, Pool, slot_bytes
from umbp.transfer import BlockRuns, Engine, derive_runs

if TYPE_CHECKING:
    import torch

BLOCKS = 40
MOVED = 12
WIPED = 0xEE


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule, tried on one layout by one engine; `problem` is empty where it holds."""

    rule: str
    layout: str
    engine: str
    problem: str


class _WrongError(Exception):
    """What a rule found."""


class Bench:
    """One engine over one layout's caches, and a pool with room for all their blocks."""

    def __init__(self, lab: Lab, layout: Layout, caches: Caches, pool: Pool, engine: Engine) -> None:
        self.lab = lab
        self.layout = layout
        self.caches = caches
        self.pool = pool
        self.engine = engine
        self.runs: BlockRuns = derive_runs(caches, BLOCKS)
        self._names = 0

    def content(self, blocks: Sequence[int]) -> list[bytes]:
        self.lab.settle()
        return [self.layout.block_bytes(self.caches, block) for block in blocks]

    def fill(self, blocks: Sequence[int], value: int) -> None:
        """On the compute stream."""
        import torch

        def work() -> None:
            for cache in self.caches.values():
                for block in blocks:
                    cache[block].view(torch.uint8).fill_(value)

        self.lab.launch(work)

    def copy_out(self, blocks: Sequence[int], target: list[torch.Tensor]) -> None:
        """On the compute stream, as attention reads them."""
        self.lab.launch(
            lambda: target.extend(cache[block].clone() for cache in self.caches.values() for block in blocks)
        )

    def reserve(self, count: int) -> tuple[list[str], Any]:
        self._names += count
        keys = [f"{self._names - i}" for i in range(count)]
        tickets, outcomes = self.pool.reserve(self.pool.namespace("check"), keys, self.runs.object_bytes)
        _demand(set(outcomes.tolist()) == {Outcome.RESERVED}, "no room in the pool: the check's own fault")
        return keys, tickets

    def store(self, blocks: Sequence[int], *, checksum: bool = False, fence: Any = None) -> Any:
        """Tickets that hold the stored objects."""
        keys, tickets = self.reserve(len(blocks))
        statuses = self.engine.store(self.runs, blocks, self.pool, tickets, checksum=checksum, fence=fence)
        _all_ok("store", statuses)
        self.pool.publish(tickets)
        return self.pool.acquire(keys)[0]

    def load(self, blocks: Sequence[int], held: Any, *, checksum: bool = False, fence: Any = None) -> None:
        statuses = self.engine.load(self.runs, blocks, self.pool, held, checksum=checksum, fence=fence)
        _all_ok("load", statuses)

    def objects(self, held: Any) -> list[bytes]:
        addresses, lengths = self.pool.payload(held)
        return [
            ctypes.string_at(address, length)
            for address, length in zip(addresses.tolist(), lengths.tolist(), strict=True)
        ]

    def forget(self, held: Any) -> None:
        self.pool.release(held)
        self.pool.clear(self.pool.namespace("check"))


def moves_the_right_bytes(bench: Bench) -> None:
    """Blocks out of order to the pool, then back into others; nothing else is touched."""
    order = np.random.default_rng(1).permutation(BLOCKS)
    sources, targets = order[:MOVED].tolist(), order[MOVED : 2 * MOVED].tolist()
    before = bench.content(range(BLOCKS))
    for checksum in (False, True):
        held = bench.store(sources, checksum=checksum)
        _same("stored", bench.objects(held), [before[block] for block in sources])
        bench.fill(targets, WIPED)
        bench.load(targets, held, checksum=checksum, fence=bench.engine.fence())
        _same("loaded", bench.content(targets), [before[block] for block in sources])
        others = [block for block in range(BLOCKS) if block not in targets]
        _same("left alone", bench.content(others), [before[block] for block in others])
        bench.forget(held)


def stores_what_a_launched_forward_writes(bench: Bench) -> None:
    """The forward still runs when the store is asked for; what it overwrites after the store's end stays out
    of the pool."""
    blocks = list(range(MOVED))
    bench.fill(blocks, 1)
    bench.lab.settle()
    bench.lab.keep_busy()
    bench.fill(blocks, 2)
    held = bench.store(blocks, fence=bench.engine.fence())
    bench.fill(blocks, 3)
    bench.lab.settle()
    size = bench.runs.object_bytes
    _same("stored", bench.objects(held), [bytes([2]) * size] * MOVED)
    bench.forget(held)


def loads_after_what_a_launched_forward_reads(bench: Bench) -> None:
    """The forward still reads the old blocks when the load into them is asked for."""
    sources, targets = list(range(MOVED)), list(range(MOVED, 2 * MOVED))
    bench.fill(sources, 4)
    bench.fill(targets, 5)
    bench.lab.settle()
    held = bench.store(sources)
    read: list[torch.Tensor] = []
    bench.lab.keep_busy()
    bench.copy_out(targets, read)
    bench.load(targets, held, fence=bench.engine.fence())
    _same("loaded", bench.content(targets), [bytes([4]) * bench.runs.object_bytes] * MOVED)
    import torch

    is_old = all(bool((each.contiguous().view(torch.uint8) == 5).all()) for each in read)
    _demand(is_old, "the forward read blocks that a load had overwritten")
    bench.forget(held)


def loads_and_stores_at_once(bench: Bench) -> None:
    """Two threads, other blocks each, beside a busy compute stream."""
    stored, loaded = list(range(MOVED)), list(range(MOVED, 2 * MOVED))
    sources = list(range(2 * MOVED, 3 * MOVED))
    before = bench.content(range(3 * MOVED))
    held = bench.store(sources)
    with ThreadPoolExecutor(2) as threads:
        for _ in range(3):
            bench.lab.keep_busy()
            fence = bench.engine.fence()
            storing = threads.submit(bench.store, stored, fence=fence)
            threads.submit(bench.load, loaded, held, fence=fence).result()
            new = storing.result()
            _same("stored", bench.objects(new), [before[block] for block in stored])
            _same("loaded", bench.content(loaded), [before[block] for block in sources])
            bench.pool.release(new)
    bench.forget(held)


def refuses_damage(bench: Bench) -> None:
    """A flipped byte in the pool is found by its checksum, and its block is left alone."""
    held = bench.store([0, 1], checksum=True)
    address = int(bench.pool.payload(held[:1])[0][0])
    (ctypes.c_uint8 * 1).from_address(address)[0] ^= 0xFF
    before = bench.content([2, 3])
    good = bench.content([1])
    statuses = bench.engine.load(bench.runs, [2, 3], bench.pool, held, checksum=True)
    wanted = [CopyStatus.BAD_CHECKSUM, CopyStatus.OK]
    _demand(statuses.tolist() == wanted, f"loading a damaged and a whole object gave {statuses.tolist()}")
    _same("left alone", bench.content([2]), before[:1])
    _same("loaded", bench.content([3]), good)
    bench.forget(held)


RULES: dict[str, Callable[[Bench], None]] = {
    "bytes": moves_the_right_bytes,
    "store order": stores_what_a_launched_forward_writes,
    "load order": loads_after_what_a_launched_forward_reads,
    "both at once": loads_and_stores_at_once,
    "damage": refuses_damage,
}


def findings(lab: Lab, layouts: Sequence[Layout] = LAYOUTS) -> Iterator[Finding]:
    """Every rule, on every layout, by every engine that is there."""
    for layout in layouts:
        caches = layout.make(BLOCKS, lab.device, seed=7)
        slot = slot_bytes(derive_runs(caches, BLOCKS).object_bytes)
        engines = lab.engines(caches)
        with Pool.create_memfd(
            4 * BLOCKS * slot,
            slab_bytes=BLOCKS * slot,
            min_object_bytes=slot - 4096 or 1,
            lock_patience_s=1.0,
        ) as pool:
            for name, engine in engines.items():
                engine.prepare(pool)
                bench = Bench(lab, layout, caches, pool, engine)
                for rule, check in RULES.items():
                    yield Finding(rule, str(layout), name, _tried(check, bench, name))
                engine.leave(pool)
                engine.close()


def _tried(check: Callable[[Bench], None], bench: Bench, name: str) -> str:
    try:
        check(bench)
    except _WrongError as wrong:
        return str(wrong)
    except Exception as error:  # noqa: BLE001 - whatever a device throws is a finding
        return f"{type(error).__name__}: {error}".partition("\n")[0]
    return "" if is_what_it_says(name, bench.engine, bench.pool) else "the driver failed, copies were staged"


def _demand(holds: bool, problem: str) -> None:
    if not holds:
        raise _WrongError(problem)


def _all_ok(what: str, statuses: Any) -> None:
    bad = sorted({CopyStatus(status).name for status in statuses.tolist() if status != CopyStatus.OK})
    _demand(not bad, f"{what}: {', '.join(bad)}")


def _same(what: str, found: list[bytes], wanted: list[bytes]) -> None:
    wrong = sum(a != b for a, b in zip(found, wanted, strict=True))
    _demand(not wrong, f"{what}: {wrong} of {len(wanted)} blocks have wrong bytes")
