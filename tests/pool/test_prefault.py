"""A pool's pages are mapped beside its work, and nobody who works at the pool notices."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from thp import mapped_bytes
from zygote import Zygote

from umbp.errors import SegmentError
from umbp.pool import MemoryPolicy, Outcome, Pool, prefault

MIB = 1 << 20
SLAB, SMALL = MIB, 32 << 10
SMALL_PAGES = MemoryPolicy(hugepages=False)
PATIENCE_S = 60.0

Make = Callable[..., Pool]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "umbp-test"


@pytest.fixture
def make(path: Path) -> Iterator[Make]:
    pools: list[Pool] = []

    def made(slabs: int, max_slabs: int = 0, slab_bytes: int = SLAB) -> Pool:
        pool = Pool.create(
            path,
            slabs * slab_bytes,
            max_bytes=max(max_slabs, slabs) * slab_bytes,
            slab_bytes=slab_bytes,
            min_object_bytes=4096,
            memory=SMALL_PAGES,
        )
        pools.append(pool)
        return pool

    yield made
    for pool in pools:
        pool.close()


class Heard:
    """What the background says of its end."""

    def __init__(self) -> None:
        self._said: queue.SimpleQueue[str] = queue.SimpleQueue()

    def __call__(self, reason: str, taken_s: float) -> None:
        assert taken_s >= 0.0
        self._said.put(reason)

    def reason(self) -> str:
        return self._said.get(timeout=PATIENCE_S)

    def is_silent(self) -> bool:
        return self._said.empty()


def rss(pool: Pool) -> int:
    return mapped_bytes("Rss", pool.arena[0])


def _wait(event: threading.Event) -> None:
    assert event.wait(PATIENCE_S)


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "umbp-prefault"]


def test_all_pages_are_mapped_and_the_thread_ends(make: Make) -> None:
    pool, heard = make(slabs=40), Heard()
    before = rss(pool)
    pool.prefault_in_background(heard)
    assert heard.reason() == ""
    assert rss(pool) - before >= 38 * SLAB
    pool.close()
    assert not threads()


def test_what_a_pool_may_grow_to_takes_no_memory(make: Make, path: Path) -> None:
    pool, heard = make(slabs=4, max_slabs=64), Heard()
    before = path.stat().st_blocks
    pool.prefault_in_background(heard)
    assert heard.reason() == ""
    assert path.stat().st_blocks == before


def test_the_thread_is_entered_before_it_works(make: Make) -> None:
    entered: list[str] = []
    heard = Heard()
    make(slabs=1).prefault_in_background(heard, enter=lambda: entered.append(threading.current_thread().name))
    assert heard.reason() == ""
    assert entered == ["umbp-prefault"]


def test_a_second_call_begins_nothing(make: Make) -> None:
    pool, heard = make(slabs=1), Heard()
    pool.prefault_in_background(heard)
    pool.prefault_in_background(heard)
    assert heard.reason() == ""
    pool.close()
    assert heard.is_silent()


def test_while_another_resizes_the_pool_the_background_waits_and_closing_does_not(
    make: Make, path: Path, zygote: Zygote, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefault, "BUSY_S", 3600.0)
    pool, heard, entered = make(4, 64, slab_bytes=SMALL), Heard(), threading.Event()
    actor, countdown, is_refused = zygote.spawn("serve", os.fspath(path)), 0, False
    while not is_refused:
        countdown += 1
        actor.call("arm", countdown, True)
        actor.send("resize", 64 * SMALL)
        actor.wait_until_stopped()
        if pool.acquire(["nothing"])[1].tolist() == [Outcome.MISS]:  # not with the lock in hand
            try:
                with pool.size_held():
                    pass
            except SegmentError as error:
                is_refused = "while it is being resized" in str(error)
        if not is_refused:
            os.kill(actor.pid, signal.SIGCONT)
            assert actor.receive() == 64 * SMALL
            pool.resize(4 * SMALL)
    pool.prefault_in_background(heard, enter=entered.set)
    assert entered.wait(PATIENCE_S)
    pool.close()
    assert heard.is_silent()


def test_a_pool_is_resized_while_its_pages_are_mapped(make: Make, path: Path) -> None:
    """Nobody is refused, and no memory is taken for slabs that have gone meanwhile."""
    pool = make(slabs=8, max_slabs=256)
    metadata = path.stat().st_blocks * 512 - 8 * SLAB
    others, heard = [Pool.attach(path) for _ in range(3)], Heard()
    pool.resize(256 * SLAB)
    for each in others:
        each.prefault_in_background(heard)
    for slabs in (8, 200, 16, 256, 3):
        assert pool.resize(slabs * SLAB) == slabs * SLAB
    assert [heard.reason() for _ in others] == [""] * 3
    for each in others:
        each.close()
    pool.audit()
    assert path.stat().st_blocks * 512 - metadata < 4 * SLAB


def test_a_resize_waits_for_who_holds_the_size_for_a_moment(make: Make) -> None:
    """And nobody new may hold it meanwhile."""
    pool = make(slabs=4, max_slabs=8)
    refused: list[SegmentError] = []

    def resize() -> None:
        try:
            pool.resize(8 * SLAB)
        except SegmentError as error:
            refused.append(error)

    thread = threading.Thread(target=resize)
    with pool.size_held():
        thread.start()
        while thread.is_alive():
            try:
                with pool.size_held():
                    continue
            except SegmentError:
                break
    thread.join()
    assert refused == []
    assert pool.capacity_bytes == 8 * SLAB


def test_a_destroyed_pool_is_left_alone(make: Make) -> None:
    pool, heard = make(slabs=64), Heard()
    pool.destroy()
    before = rss(pool)
    pool.prefault_in_background(heard)
    for each in threads():
        each.join(PATIENCE_S)
    assert rss(pool) == before
    assert heard.is_silent()


def test_a_kernel_that_can_not_is_told_of_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefault._native, "populate", lambda *_: 22)
    heard = Heard()
    pool = make(slabs=40)
    pool.prefault_in_background(heard)
    assert heard.reason() == os.strerror(22)
    pool.close()
    assert heard.is_silent()


def test_a_system_without_a_thread_to_give_is_told_of(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    pool, heard = make(slabs=1), Heard()
    pool.prefault_in_background(heard)
    assert "no thread" in heard.reason()
    pool.close()


def test_a_child_that_closes_the_pool_leaves_the_parents_thread_alone(make: Make) -> None:
    pool, go = make(slabs=4), threading.Event()
    heard = Heard()
    pool.prefault_in_background(heard, enter=partial(_wait, go))
    child = os.fork()
    if child == 0:
        pool.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    go.set()
    assert heard.reason() == ""


@pytest.mark.parametrize("after_s", [0.0, 0.004, 0.008, 0.012, 0.02, 0.03])
def test_an_interpreter_ends_well_while_pages_are_mapped(after_s: float) -> None:
    """Scenario: the thread came back from the kernel when the interpreter had gone, and all aborted."""
    code = f"""
import threading
from umbp.pool import Pool
pool = Pool.create_memfd(512 << 20, slab_bytes=16 << 20, min_object_bytes=1 << 20)
entered = threading.Event()
pool.prefault_in_background(lambda why, taken_s: None, enter=entered.set)
entered.wait()
threading.Event().wait({after_s})
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
