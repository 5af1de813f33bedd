"""`umbp bench pool`: what the pool's verbs cost an object, bytes aside, in a small pool and in a large one.

Verbs are called for batches of 256 keys, as texts, which is how most callers spell them; `raw` rows give
hashes. What is stored is a chain, each block naming its parent. Objects are small, and their bytes stay
untouched.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import click
import numpy as np

from umbp import _native
from umbp.cli.bench import machine
from umbp.cli.bench.report import Report, Row, publish, rounded
from umbp.cli.bench.stock import OBJECT_BYTES, PREFIX, Stock, fill, make_pool, require
from umbp.cli.bench.timing import Times
from umbp.pool import Outcome, Pool, slot_bytes
from umbp.pool.pool import EVICTION_POLICY
from umbp.runtime.mover import pool_geometry

BATCH = 256
BATCHES = 16
"""Batches in a round, of which each case gives one mean."""
ROUND = BATCH * BATCHES
LARGE_OBJECT_BYTES = 256 << 10
LARGE_POOL_BYTES = 64 << 30
T = TypeVar("T")


@click.command("pool")
@click.option(
    "--entries",
    multiple=True,
    type=click.IntRange(ROUND, 1 << 24),
    help="Objects in the pool, 4 KiB each; may be given again.  [default: 10000 and 1000000]",
)
@click.option("--repeat", default=15, show_default=True, type=click.IntRange(1, 1000), help="Rounds.")
@click.option("--small", is_flag=True, help="A short run: 5,000 and 10,000 entries, 3 rounds.")
@click.option("--json", "is_json", is_flag=True, help="One JSON object instead of a table.")
def command(entries: tuple[int, ...], repeat: int, small: bool, is_json: bool) -> None:
    """What storing and reading cost an object, in batches of 256, in pools of 10 thousand and 1 million.

    A million entries take 4 GiB of memory.
    """
    sizes = (5_000, 10_000) if small else tuple(dict.fromkeys(entries)) or (10_000, 1_000_000)
    publish(measure(sizes, rounds=min(repeat, 3) if small else repeat), is_json=is_json)


def measure(sizes: Sequence[int], *, rounds: int) -> Report:
    """A report with a row for each case and size, the ratios of the sizes, and the share of bookkeeping."""
    return Report(
        title=f"The pool's verbs in batches of {BATCH}, median of {rounds}",
        results=[*verb_rows(sizes, rounds=rounds), _bookkeeping()],
        machine=machine.facts("umbp"),
        notes=(
            "evicting: the pool is full, so each new object is another's end.",
            "ratio: of the cost to that in the smallest pool; scale: the largest of these ratios.",
            f"bookkeeping: beyond its objects ({LARGE_OBJECT_BYTES >> 10} KiB each), of a pool's capacity.",
        ),
    )


def verb_rows(sizes: Sequence[int], *, rounds: int) -> list[Row]:
    """What each verb costs in pools of these sizes, and the verb that the largest pool makes dearest."""
    rows: list[Row] = []
    first: dict[str, float] = {}
    ratios: dict[str, float] = {}
    small, large = min(sizes), max(sizes)
    for size in sorted(sizes):
        for case, times in _times(size, rounds).items():
            row: dict[str, str | int | float] = {
                "case": case,
                "entries": size,
                "us_per_object": rounded(times.median_s * 1e6),
                "spread": rounded(times.spread),
            }
            ratios[case] = times.median_s / first.setdefault(case, times.median_s)
            rows.append(row if size == small else row | {"ratio": rounded(ratios[case])})
    if small != large:
        dearest = max(ratios, key=lambda case: ratios[case])
        scale: dict[str, str | int | float] = {
            "case": f"scale_{_short(large)}_vs_{_short(small)}",
            "ratio": rounded(ratios[dearest]),
        }
        rows.append(scale | {"of": dearest})
    return rows


def _times(size: int, rounds: int) -> dict[str, Times]:
    """Seconds an object of every case, a round each, after a round that warms up."""
    stock, fresh = Stock.of(size), Stock.of(ROUND, seed=2)
    rng = np.random.default_rng(3)
    seconds: dict[str, list[float]] = {}
    with make_pool(size + ROUND) as pool:
        fill(pool, stock)
        ns = pool.namespace("bench")
        for number in range(rounds + 1):
            chosen = rng.choice(size, ROUND, replace=False)
            found = {
                "lookup": _per_object(pool.lookup, _batches(stock.keys, chosen)),
                "acquire_release": _per_object(lambda keys: _read(pool, keys), _batches(stock.keys, chosen)),
                "acquire_release_raw": _per_object(
                    lambda hashes: _read_raw(pool, hashes), _batches(stock.raw, chosen)
                ),
                "reserve_publish": _per_object(
                    lambda keys: _store(pool, ns, keys), _batches(fresh.keys, range(ROUND))
                ),
            }
            require(pool.remove(fresh.keys(range(ROUND))), Outcome.REMOVED)
            found["reserve_publish_raw"] = _per_object(
                lambda hashes: _store_raw(pool, ns, hashes), _batches(fresh.raw, range(ROUND))
            )
            require(pool.remove(fresh.keys(range(ROUND))), Outcome.REMOVED)
            if number:
                _add(seconds, found)
        fill(pool, fresh)
        for number in range(rounds + 1):
            new = Stock.of(ROUND, seed=100 + number)
            taken_s = _per_object(lambda keys: _store(pool, ns, keys), _batches(new.keys, range(ROUND)))
            if number:
                _add(seconds, {"reserve_publish_evicting": taken_s})
        pool.audit()
    return {case: Times(tuple(each)) for case, each in seconds.items()}


def _store(pool: Pool, ns: int, keys: list[str]) -> None:
    tickets, outcomes = pool.reserve(ns, keys, OBJECT_BYTES, [None, *keys[:-1]])
    require(outcomes, Outcome.RESERVED)
    require(pool.publish(tickets), Outcome.PUBLISHED)


def _store_raw(pool: Pool, ns: int, hashes: list[bytes]) -> None:
    tickets, outcomes = pool.reserve_raw(ns, PREFIX, hashes, OBJECT_BYTES, [None, *hashes[:-1]])
    require(outcomes, Outcome.RESERVED)
    require(pool.publish(tickets), Outcome.PUBLISHED)


def _read(pool: Pool, keys: list[str]) -> None:
    tickets, outcomes = pool.acquire(keys)
    require(outcomes, Outcome.HIT)
    require(pool.release(tickets), Outcome.RELEASED)


def _read_raw(pool: Pool, hashes: list[bytes]) -> None:
    tickets, outcomes = pool.acquire_raw(PREFIX, hashes)
    require(outcomes, Outcome.HIT)
    require(pool.release(tickets), Outcome.RELEASED)


def _batches(spell: Callable[[list[int]], list[T]], numbers: Iterable[int]) -> list[list[T]]:
    return [spell(row.tolist()) for row in np.array(list(numbers)).reshape(BATCHES, BATCH)]


def _per_object(call: Callable[[list[T]], object], batches: list[list[T]]) -> float:
    begin = time.perf_counter()
    for batch in batches:
        call(batch)
    return (time.perf_counter() - begin) / ROUND


def _add(seconds: dict[str, list[float]], found: Mapping[str, float]) -> None:
    for case, taken_s in found.items():
        seconds.setdefault(case, []).append(taken_s)


def _bookkeeping() -> Row:
    """By the pool's own sizes, for a pool with four processes attached."""
    slab_bytes, smallest = pool_geometry(1 << 62, [LARGE_OBJECT_BYTES])
    taken = _native.reserved_bytes(
        LARGE_POOL_BYTES, LARGE_POOL_BYTES, slab_bytes, smallest, 4, EVICTION_POLICY
    )
    objects = LARGE_POOL_BYTES // slab_bytes * (slab_bytes // slot_bytes(LARGE_OBJECT_BYTES))
    share = (taken - objects * LARGE_OBJECT_BYTES) / LARGE_POOL_BYTES
    return {"case": "bookkeeping", "entries": objects, "share_of_capacity": rounded(share)}


def _short(count: int) -> str:
    """1000000 as 1m, 10000 as 10k."""
    for unit, letter in ((1_000_000, "m"), (1_000, "k")):
        if count % unit == 0:
            return f"{count // unit}{letter}"
    return str(count)
