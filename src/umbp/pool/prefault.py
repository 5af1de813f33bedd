"""Mapping a pool's pages in this process before their first use, at once or beside its work.

A page that is written for the first time costs a fault, and where nobody has written it yet, it is zeroed as
well: a copy into small pages takes several times as long then, and more where a virtual machine has its
memory from its host page by page. Mapped by the kernel in a row they cost a fraction of that.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from umbp import _native
from umbp.errors import SegmentError
from umbp.pool.memory import Progress

if TYPE_CHECKING:
    from umbp.pool.pool import Pool

PORTION_BYTES = 256 << 20
"""What is mapped between two words of progress."""

PIECE_BYTES = 16 << 20
"""What is mapped at a time in the background: some milliseconds, for which nobody else in the process can
map or give back memory, nor anybody resize the pool."""

BUSY_S = 0.5
"""How long a pool that is being resized is left alone."""


def prefault(address: int, size: int, progress: Progress | None = None) -> str:
    """Map a range's pages in this process, by portions; empty, or why the kernel can't."""
    for done in range(0, size, PORTION_BYTES):
        if progress is not None:
            progress(done, size)
        if error := _native.populate(address + done, min(PORTION_BYTES, size - done)):
            return os.strerror(error)
    return ""


class BackgroundPrefault:
    """Maps a pool's pages on a thread of its own, which rests as long as it works.

    Whoever resizes the pool waits for a piece at most. What the pool gets behind the place that has been
    reached is mapped too; what comes before it, or later, by its first use.
    """

    def __init__(
        self, pool: Pool, told: Callable[[str, float], None], enter: Callable[[], None] | None = None
    ) -> None:
        """`told` and `enter` as `Pool.prefault_in_background` has them."""
        self._pool = pool
        self._told = told
        self._enter = enter
        self._pid = os.getpid()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="umbp-prefault", daemon=True)

    def start(self) -> None:
        # An interpreter that ends while a thread is in the kernel aborts when that comes back.
        atexit.register(self.close)
        try:
            self._thread.start()
        except RuntimeError:
            atexit.unregister(self.close)
            self._told("the system has no thread for it", 0.0)

    def close(self) -> None:
        """When this returns, the pool's memory is left alone. Takes as long as one piece."""
        if self._pid != os.getpid():  # the thread is the parent's
            return
        self._is_closing.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._map()
        finally:
            atexit.unregister(self.close)

    def _map(self) -> None:
        if self._enter is not None:
            self._enter()
        begun_s, at, why = time.monotonic(), 0, ""
        while not self._is_closing.is_set():
            piece_s = time.monotonic()
            try:
                if self._pool.is_destroyed:
                    return
                with self._pool.size_held():
                    piece = self._piece_from(at)
                    if piece is not None:
                        at = sum(piece)
                        error = _native.populate(self._pool.arena[0] + piece[0], piece[1])
                        why = os.strerror(error) if error else ""
            except SegmentError:  # it is being resized, or a stopped process holds its lock
                self._is_closing.wait(BUSY_S)
                continue
            if piece is None or why:
                self._told(why, time.monotonic() - begun_s)
                return
            self._is_closing.wait(time.monotonic() - piece_s)

    def _piece_from(self, at: int) -> tuple[int, int] | None:
        """Offset and length of the first piece with memory that ends behind `at`."""
        for begin, size in self._pool.arena_ranges():
            if begin + size > at:
                first = max(begin, at)
                return first, min(PIECE_BYTES, begin + size - first)
        return None
