"""What other processes on one pool cost a scheduler: how long its lookups, pins and releases take, and how
often the lock can't be had in time.

The scheduler asks for chains of blocks as for one request after another, without a pause. Seven others do
what engines do to a pool, also without a pause and without the copies that take most of an engine's time: the
lock is asked for far more often than in service. Beside the scheduler alone it is measured beside seven
processes that only compute: what is lost there is the processor's, not the pool's.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from rich.console import Console

from umbp.cli.bench import machine
from umbp.cli.bench.report import Report, Row
from umbp.pool import Outcome, Pool, PoolHandle

if TYPE_CHECKING:
    from multiprocessing.queues import Queue

RESULTS = Path(__file__).resolve().parent / "results"
OTHERS = 7
OBJECTS = 20_000
OBJECT_BYTES = 3000
CHAIN, HIT = 256, 64
"""Blocks of a prompt, and how many of them the scheduler pins."""
CHAINS = OBJECTS // CHAIN // 2
"""The scheduler's own prompts, half of the pool; they are pinned, so that it always finds them."""
BATCH = 64
PREFIX = "umbp:bench:"
SECONDS, SMALL_SECONDS = 4.0, 0.4
PATIENT_S = 1.0
"""For the others: they wait like transfers; the scheduler has the pool's default patience."""

Times = dict[str, list[float]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Measured:
    """One process's work: seconds of every call by verb, keys answered "not now" and keys asked."""

    seconds: Times
    not_now: int
    asked: int


def run(is_small: bool) -> int:
    """Measures all cases; writes the results unless it is a small run."""
    report = measure(2 if is_small else OTHERS, SMALL_SECONDS if is_small else SECONDS)
    report.show(Console())
    if not is_small:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "contention.md").write_text(report.as_markdown())
        (RESULTS / "contention.json").write_text(report.as_json() + "\n")
    return 0


def measure(others: int, seconds: float) -> Report:
    cases: dict[str, tuple[str, int]] = {
        "alone": ("compute", 0),
        f"beside {others} that compute": ("compute", others),
        f"beside {others} on the pool": ("share", others),
    }
    rows: list[Row] = []
    reference: dict[str, float] = {}
    for case, (role, count) in cases.items():
        scheduler, company = _measure(role, count, seconds)
        for verb, times in scheduler.seconds.items():
            rows.append(_row(case, verb, times, seconds, reference.setdefault(verb, float(np.median(times)))))
        if company:
            stored = [s for one in company for s in one.seconds.get("reserve+publish", [])]
            if stored:
                rows.append(_row(case, f"others: reserve+publish {BATCH}", stored, seconds, None))
        share = scheduler.not_now / scheduler.asked
        rows.append({"case": case, "verb": "pins not now, share of keys", "per_s": round(share, 5)})
    return Report(
        title=f"A scheduler beside {others} other processes on one pool",
        results=rows,
        machine=machine.facts("umbp"),
        notes=[
            f"{OBJECTS} objects, full; {seconds:g} s a case; ratio: median over that of the scheduler alone."
        ],
    )


def _row(case: str, verb: str, times: list[float], seconds: float, reference_s: float | None) -> Row:
    p50, p99 = np.quantile(times, (0.5, 0.99)).tolist()
    row: dict[str, str | int | float] = {
        "case": case,
        "verb": verb,
        "per_s": round(len(times) / seconds),
        "p50_us": round(p50 * 1e6, 1),
        "p99_us": round(p99 * 1e6, 1),
        "max_us": round(max(times) * 1e6),
    }
    return row if reference_s is None else {**row, "ratio": round(p50 / reference_s, 2)}


def _measure(role: str, others: int, seconds: float) -> tuple[Measured, list[Measured]]:
    slot = (OBJECT_BYTES + 64 + 4095) // 4096 * 4096
    spawn = multiprocessing.get_context("spawn")
    with Pool.create_memfd(
        OBJECTS * slot, slab_bytes=100 * slot, min_object_bytes=OBJECT_BYTES, processes=others + 2
    ) as pool:
        ns = pool.namespace("bench")
        for number in range(CHAINS):
            hashes = chain(0, number)
            tickets, _ = pool.reserve_raw(ns, PREFIX, hashes, OBJECT_BYTES, [None, *hashes[:-1]])
            pool.publish(tickets)
            pool.acquire_raw(PREFIX, hashes)
        start, stop, answers = spawn.Barrier(others + 1), spawn.Event(), spawn.Queue()
        crowd = [
            spawn.Process(target=_company, args=(role, pool.handle, number + 1, start, stop, answers))
            for number in range(others)
        ]
        first = spawn.Process(target=_scheduler, args=(pool.handle, seconds, start, stop, answers))
        for process in (*crowd, first):
            process.start()
        told = [answers.get(timeout=seconds + 60) for _ in range(others + 1)]
        for process in (*crowd, first):
            process.join()
        pool.audit()
    return next(m for is_first, m in told if is_first), [m for is_first, m in told if not is_first]


def chain(owner: int, number: int) -> list[bytes]:
    """The block hashes of one prompt."""
    return [b"%08d%08d%016d" % (owner, number, block) for block in range(CHAIN)]


def _timed(times: Times, verb: str, call: Callable[[], T]) -> T:
    begin = time.perf_counter()
    answer = call()
    times.setdefault(verb, []).append(time.perf_counter() - begin)
    return answer


def _scheduler(
    handle: PoolHandle, seconds: float, start: Barrier, stop: Event, answers: Queue[object]
) -> None:
    rng = random.Random(1)
    chains = [chain(0, number) for number in range(CHAINS)]
    times: Times = {}
    not_now = asked = 0
    with Pool.attach(handle) as pool:
        start.wait()
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            hashes = rng.choice(chains)
            _timed(times, f"lookup {CHAIN}", partial(pool.match, PREFIX, hashes))
            promise = partial(pool.acquire_raw, PREFIX, hashes[:HIT])
            tickets, outcomes = _timed(times, f"acquire {HIT}", promise)
            asked += HIT
            not_now += int((outcomes == Outcome.NOT_NOW).sum())
            held = tickets[outcomes == Outcome.HIT]
            _timed(times, f"release {HIT}", partial(pool.release, held))
            pool.touch_raw(PREFIX, hashes)
        stop.set()
    answers.put((True, Measured(times, not_now, asked)))


def _company(
    role: str, handle: PoolHandle, me: int, start: Barrier, stop: Event, answers: Queue[object]
) -> None:
    times: Times = {}
    with Pool.attach(handle, lock_patience_s=PATIENT_S) as pool:
        ns = pool.namespace("bench")
        start.wait()
        number = 0
        while not stop.is_set():
            number += 1
            hashes = chain(me, number)
            if role == "share":
                for begin in range(0, CHAIN, BATCH):
                    part = hashes[begin : begin + BATCH]
                    _timed(times, "reserve+publish", partial(_store, pool, ns, part))
                    tickets, outcomes = pool.acquire_raw(PREFIX, part)
                    pool.release(tickets[outcomes == Outcome.HIT])
    answers.put((False, Measured(times, 0, 0)))


def _store(pool: Pool, ns: int, hashes: list[bytes]) -> None:
    tickets, outcomes = pool.reserve_raw(ns, PREFIX, hashes, OBJECT_BYTES, [None, *hashes[:-1]])
    pool.publish(tickets[outcomes == Outcome.RESERVED])
