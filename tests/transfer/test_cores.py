"""Copy threads run beside a pinned worker's own, inside what the engine may use."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest

from umbp.pool import CopyStatus, Pool
from umbp.transfer import BlockRuns, CopyEngine
from umbp.transfer.cores import free_cores, use_cores_too

CORES = sorted(os.sched_getaffinity(0))
WAIT_S = 10.0

several_cores = pytest.mark.skipif(len(CORES) < 2, reason="this machine lets us use one core only")


@contextmanager
def worker(*pinned_to: int) -> Iterator[ProcessPoolExecutor]:
    """A process of ours, pinned as vLLM pins its workers."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, os.sched_setaffinity, (0, set(pinned_to))) as process:
        yield process


def test_without_a_pinned_worker_nothing_is_bound() -> None:
    assert free_cores() == ()
    with worker(*CORES) as process:
        assert process.submit(free_cores).result() == ()


@several_cores
def test_what_a_pinned_worker_leaves_is_free() -> None:
    with worker(CORES[0]) as process:
        assert process.submit(free_cores).result() == tuple(CORES[1:])


@several_cores
def test_what_another_worker_is_pinned_to_is_not_free() -> None:
    with ExitStack() as held:
        workers = [held.enter_context(worker(core)) for core in CORES]
        for each in workers:
            each.submit(os.getpid).result()  # all are up and pinned
        assert [each.submit(free_cores).result() for each in workers] == [()] * len(CORES)


@several_cores
def test_a_thread_may_run_on_free_cores_beside_its_own() -> None:
    with worker(CORES[0]) as process:
        process.submit(use_cores_too, CORES[1:]).result()
        assert process.submit(os.sched_getaffinity, 0).result() == set(CORES)


def test_cores_that_the_system_refuses_change_nothing() -> None:
    with worker(*CORES) as process:
        process.submit(use_cores_too, [1 << 20]).result()
        assert process.submit(os.sched_getaffinity, 0).result() == set(CORES)
    with CopyEngine(2, [1 << 20]) as engine:
        assert engine.cores == (1 << 20,)


@several_cores
def test_helpers_are_bound_and_the_caller_is_not() -> None:
    before = set(os.listdir("/proc/self/task"))
    with CopyEngine(3, CORES[1:2]) as engine:
        helpers = set(os.listdir("/proc/self/task")) - before
        assert len(helpers) == 2
        deadline_s = time.monotonic() + WAIT_S
        while any(os.sched_getaffinity(int(each)) != {CORES[1]} for each in helpers):
            assert time.monotonic() < deadline_s, "a helper is not where it should be"
        assert engine.cores == (CORES[1],)
        assert os.sched_getaffinity(0) == set(CORES)


@several_cores
def test_helpers_that_are_bound_to_nothing_keep_off_the_core_of_whoever_brings_a_copy() -> None:
    """Where all cores are busy they landed on it, and took turns with him."""
    blocks, size = 16, 1 << 20
    memory = np.ones((blocks, size), np.uint8)
    runs = BlockRuns.from_columns([memory.ctypes.data], [size], [size], [0], blocks)
    before = set(os.listdir("/proc/self/task"))
    with (
        Pool.create_memfd(32 << 20, slab_bytes=2 << 20, min_object_bytes=64) as pool,
        CopyEngine(3) as engine,
    ):
        helpers = set(os.listdir("/proc/self/task")) - before
        assert len(helpers) == 2
        keys = [f"{number}" for number in range(blocks)]
        tickets, _ = pool.reserve(pool.namespace("a"), keys, size)
        deadline_s = time.monotonic() + WAIT_S
        allowed: set[frozenset[int]] = set()
        while {len(cores) for cores in allowed} != {len(CORES) - 1}:
            assert time.monotonic() < deadline_s, f"helpers run on {allowed}"
            statuses = engine.store(runs, np.arange(blocks), pool, tickets)
            assert set(statuses.tolist()) == {CopyStatus.OK}
            allowed = {frozenset(os.sched_getaffinity(int(each))) for each in helpers}
        assert len(allowed) == 1
        assert os.sched_getaffinity(0) == set(CORES)
        pool.abandon(tickets)
