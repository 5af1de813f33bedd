"""Jobs that share a thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import Future

import pytest

from umbp.errors import UMBPError
from umbp.runtime.lane import Lane
from umbp.runtime.moves import Move
from umbp.transfer import BlockRuns


@pytest.fixture
def lane() -> Iterator[Lane]:
    lane = Lane("lane", lambda: None)
    yield lane
    lane.close()


def work(name: str, parts: int, log: list[str], gate: threading.Event | None = None) -> Iterator[None]:
    for part in range(parts):
        if part:
            yield
        if gate is not None:
            gate.wait()
        log.append(name)


def test_a_short_job_does_not_wait_for_the_end_of_a_long_one(lane: Lane) -> None:
    log: list[str] = []
    gate = threading.Event()
    long = lane.start(work("long", 50, log, gate))
    short = lane.start(work("short", 2, log))
    gate.set()
    short.result(timeout=60)
    long.result(timeout=60)
    assert log.count("long") == 50
    assert log.index("short") <= 2
    assert log[:5] == ["long", "short", "long", "short", "long"]


def test_a_lane_that_is_closed_has_ended_all_jobs(lane: Lane) -> None:
    log: list[str] = []
    gate = threading.Event()
    jobs = [lane.start(work(str(number), 20, log, gate)) for number in range(5)]
    assert set(lane.unfinished()) == set(jobs)
    closing = threading.Thread(target=lane.close)
    closing.start()
    gate.set()
    closing.join(timeout=60)
    assert all(job.done() for job in jobs)
    assert (lane.unfinished(), len(log)) == ([], 100)


def test_a_job_that_waits_for_another_ends_in_a_lane_that_is_being_closed(lane: Lane) -> None:
    """A pool is left when its last store has ended, and the engine ends meanwhile."""
    gate = threading.Event()
    jobs: list[Future[None]] = []

    def leave() -> Iterator[None]:
        gate.wait(60)
        with contextlib.suppress(RuntimeError):  # it doesn't wait for itself
            lane.close()
        while not jobs[1].done():
            yield

    log: list[str] = []
    jobs += [lane.start(leave()), lane.start(work("store", 3, log))]
    gate.set()
    for job in jobs:
        job.result(timeout=20)
    assert log == ["store"] * 3


def test_without_a_thread_there_is_no_lane_and_no_job_can_find_it_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(UMBPError, match=r"no thread for 'umbp-load'.*raise `ulimit -u`"):
            Lane("umbp-load", lambda: None)
    lane = Lane("umbp-load", lambda: None)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    lane.start(work("late", 1, [])).result(timeout=60)
    lane.close()


def test_a_job_of_nothing_ends(lane: Lane) -> None:
    lane.start(iter(())).result(timeout=60)


@pytest.mark.parametrize(("most_bytes", "sizes"), [(1, [1] * 5), (128, [2, 2, 1]), (10**9, [5])])
def test_a_move_in_parts_moves_the_same(most_bytes: int, sizes: list[int]) -> None:
    runs = BlockRuns.from_columns([4096], [64], [64], [0], 10)
    keys = [f"k{number}" for number in range(5)]
    move = Move(runs, keys, list(range(5)), [f"n{key}" for key in keys], [None, *keys[:-1]])
    parts = list(move.parts(most_bytes))
    assert [len(part.keys) for part in parts] == sizes
    for column in ("keys", "block_ids", "names", "parent_names"):
        assert [one for part in parts for one in getattr(part, column)] == getattr(move, column)
