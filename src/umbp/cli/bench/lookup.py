"""`umbp bench lookup`: which of 8,192 keys are stored, asked by a process that stored none of them; and what
storing and reading cost an object beside that.

The reference is a list comprehension, `[key in entries for key in keys]`, over a Python dict of as many
entries. Both get strings of their own, newly built, in random order, in every round.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing.synchronize import Barrier, Event

import click
import numpy as np

from umbp.cli.bench import machine, mooncake
from umbp.cli.bench import pool as verbs
from umbp.cli.bench.report import Report, Row, publish, rounded
from umbp.cli.bench.stock import PREFIX, Stock, fill, make_pool
from umbp.cli.bench.timing import Times, timed
from umbp.errors import InvariantError
from umbp.pool import Pool, PoolHandle
from umbp.testing.launch import tie

ASKED = 8192
OTHERS = 7
"""Processes that keep the pool busy while the reader is measured under contention."""


@click.command("lookup")
@click.option(
    "--entries",
    multiple=True,
    type=click.IntRange(ASKED, 1 << 24),
    help="Objects in the pool, 4 KiB each; may be given again.  [default: 10000 and 1000000]",
)
@click.option("--repeat", default=15, show_default=True, type=click.IntRange(1, 1000), help="Rounds.")
@click.option("--against", type=click.Choice(["mooncake"]), help="Measure that store as well.")
@click.option("--small", is_flag=True, help="A short run: 10,000 entries, 3 rounds, 2 others.")
@click.option("--json", "is_json", is_flag=True, help="One JSON object instead of a table.")
def command(entries: tuple[int, ...], repeat: int, against: str | None, small: bool, is_json: bool) -> None:
    """Looking up 8,192 keys that are stored, from another process, against a Python dict.

    A million entries take 4 GiB of memory.
    """
    sizes = (10_000,) if small else tuple(dict.fromkeys(entries)) or (10_000, 1_000_000)
    report = measure(
        sizes,
        rounds=min(repeat, 3) if small else repeat,
        others=2 if small else OTHERS,
        is_against_mooncake=bool(against),
    )
    publish(report, is_json=is_json)


def measure(
    sizes: tuple[int, ...], *, rounds: int, others: int = OTHERS, is_against_mooncake: bool = False
) -> Report:
    """A report with rows for each size of pool, and for the smallest under contention too."""
    results: list[Row] = []
    for size in sorted(sizes):
        stock = Stock.of(size)
        with make_pool(size, processes=2 + others) as pool:
            fill(pool, stock)
            results += _in_another_process(pool.handle, size, rounds, "")
            if size == min(sizes):
                with _busy(pool.handle, size, others):
                    results += _in_another_process(pool.handle, size, rounds, "_contended")
    results += [row for row in verbs.verb_rows(sizes, rounds=rounds) if _is_shown(str(row["case"]))]
    notes = [
        "ratio_to_dict is time over that of [k in d for k in keys]; by raw: 32-byte hashes, no key texts.",
        f"contended: {others} other processes pin, store, remove and look up meanwhile.",
    ]
    if is_against_mooncake:
        missing = mooncake.why_not()
        if missing is None:
            results.append(_mooncake_row(min(sizes), rounds))
        else:
            notes.append(missing)
    return Report(
        title=f"Lookup of {ASKED} stored keys from another process, median of {rounds}",
        results=results,
        machine=machine.facts("umbp", *([mooncake.DISTRIBUTION] if is_against_mooncake else [])),
        notes=notes,
    )


def _is_shown(case: str) -> bool:
    """Of what `umbp bench pool` tells: the two pairs of verbs that go with every lookup, and the scale."""
    return case in ("reserve_publish", "acquire_release") or case.startswith("scale_")


def _in_another_process(handle: PoolHandle, size: int, rounds: int, suffix: str) -> list[Row]:
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=tie, initargs=(os.getpid(),)) as other:
        return other.submit(_read, handle, size, rounds, suffix).result()


def _read(handle: PoolHandle, size: int, rounds: int, suffix: str) -> list[Row]:
    """The reader: attaches, and asks for stored keys."""
    stock = Stock.of(size)
    entries = dict.fromkeys(stock.keys(range(size)))
    with Pool.attach(handle) as pool:
        pool.prefault()
        times = _reader_times(pool, stock, entries, rounds)
    reference = times["dict"]
    return [
        {
            "case": f"{case}{suffix}",
            "by": by,
            "order": order,
            "entries": size,
            "ms": rounded(times[name].median_s * 1e3),
            "spread": rounded(times[name].spread),
            **_against_dict(times[name], reference, is_contended=bool(suffix)),
        }
        for name, case, by, order in (
            ("keys", f"lookup_{ASKED}_hit", "key", "random"),
            ("raw", f"lookup_{ASKED}_hit", "raw", "random"),
            ("match", f"match_{ASKED}_hit", "raw", "stored"),
        )
    ]


def _against_dict(times: Times, reference: Times, *, is_contended: bool) -> dict[str, float]:
    """Not under contention: the dict's longer time would be the scheduler's, not its own."""
    if is_contended:
        return {}
    return {
        "ratio_to_dict": rounded(times.per(reference)),
        "dict_ms": rounded(reference.median_s * 1e3),
    }


def _reader_times(pool: Pool, stock: Stock, entries: dict[str, None], rounds: int) -> dict[str, Times]:
    rng = np.random.default_rng(2)
    seconds: dict[str, list[float]] = {"dict": [], "keys": [], "raw": [], "match": []}
    gc.disable()
    for number in range(rounds + 1):
        chosen = rng.choice(stock.count, ASKED, replace=False).tolist()
        begin = int(rng.integers(0, stock.count - ASKED + 1))
        known, keys, raw = stock.keys(chosen), stock.keys(chosen), stock.raw(chosen)
        chain = stock.raw(range(begin, begin + ASKED))
        asked: dict[str, Callable[[], int]] = {
            "dict": partial(_ask_dict, entries, known),
            "keys": partial(_ask_keys, pool, keys),
            "raw": partial(_ask_raw, pool, raw),
            "match": partial(pool.match, PREFIX, chain),
        }
        for name, ask in asked.items():
            answer, taken_s = timed(ask)
            if number:  # the first round warms up
                seconds[name].append(taken_s)
            if answer != ASKED:
                raise InvariantError(f"a stored key was not found, by {name}")
    return {name: Times(tuple(each)) for name, each in seconds.items()}


def _ask_dict(entries: dict[str, None], keys: list[str]) -> int:
    return len([key in entries for key in keys])


def _ask_keys(pool: Pool, keys: list[str]) -> int:
    return int(np.count_nonzero(pool.lookup(keys)))


def _ask_raw(pool: Pool, hashes: list[bytes]) -> int:
    return int(np.count_nonzero(pool.lookup_raw(PREFIX, hashes)))


@contextmanager
def _busy(handle: PoolHandle, size: int, count: int) -> Iterator[None]:
    """Other processes at work on the same pool."""
    spawn = multiprocessing.get_context("spawn")
    ready, enough = spawn.Barrier(count + 1), spawn.Event()
    common = (os.getpid(), handle, size, ready, enough)
    others = [spawn.Process(target=_disturb, args=(*common, number)) for number in range(count)]
    for other in others:
        other.start()
    try:
        ready.wait(60)
        yield
    finally:
        enough.set()
        for other in others:
            other.join()


def _disturb(parent: int, handle: PoolHandle, size: int, ready: Barrier, enough: Event, number: int) -> None:
    """One of three kinds of work: pins, new objects that are removed again, lookups."""
    tie(parent)
    stock, own = Stock.of(size), Stock.of(ASKED, seed=1000 + number)
    rng = random.Random(number)
    with Pool.attach(handle) as pool:
        ns = pool.namespace("bench")
        ready.wait(60)
        while not enough.is_set():
            if number % 3 == 0:
                tickets, _ = pool.acquire_raw(PREFIX, stock.raw(rng.sample(range(size), 256)))
                pool.release(tickets[tickets != 0])
            elif number % 3 == 1:
                keys = own.keys(rng.sample(range(ASKED), 64))
                tickets, _ = pool.reserve(ns, keys, 1)
                pool.publish(tickets[tickets != 0])
                pool.remove(keys)
            else:
                pool.lookup_raw(PREFIX, stock.raw(rng.sample(range(size), 1024)))


def _mooncake_row(size: int, rounds: int) -> Row:
    """Mooncake's `batch_is_exist`, in the process that stored the objects."""
    stock = Stock.of(size)
    rng = np.random.default_rng(2)
    with mooncake.store(max(64 << 20, 8192 * size)) as store, mooncake.buffer(store, 4096) as address:
        for begin in range(0, size, 1024):
            keys = stock.keys(range(begin, min(begin + 1024, size)))
            mooncake.require(store.batch_put_from(keys, [address] * len(keys), [256] * len(keys)))
        seconds = []
        for number in range(rounds + 1):
            keys = stock.keys(rng.choice(size, ASKED, replace=False).tolist())
            answer, taken_s = timed(partial(store.batch_is_exist, keys))
            if number:
                seconds.append(taken_s)
            if answer != [1] * ASKED:
                raise InvariantError("Mooncake did not find a stored key")
    times = Times(tuple(seconds))
    return {
        "case": f"mooncake_{ASKED}_hit",
        "by": "key",
        "order": "random",
        "entries": size,
        "ms": rounded(times.median_s * 1e3),
        "spread": rounded(times.spread),
    }
