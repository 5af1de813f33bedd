"""Which memory a store has been told of: the pools', for as long as they are used."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

from umbp.errors import SegmentError
from umbp.pool import Pool
from umbp.store.base import StoreTraits
from umbp.store.gate import StoreGate, StoreUnavailable, Why

REGISTER_TIMEOUT_S = 60.0
"""Pinning a large pool for a network card takes a while."""

FORGET_TIMEOUT_S = 5.0


class RegisteredPools:
    """Tells a gate's store of pools' memory, of what they have grown by too, and of their end. Any thread."""

    def __init__(self, gate: StoreGate, traits: StoreTraits) -> None:
        self._gate = gate
        self._traits = traits
        self._lock = threading.Lock()
        self._ranges: dict[Pool, frozenset[tuple[int, int]]] = {}
        self._sizes_held: dict[Pool, contextlib.ExitStack] = {}

    def tell(self, pool: Pool, timeout_s: float = REGISTER_TIMEOUT_S) -> None:
        """Tell the store of what it doesn't know yet; `StoreError` where it refuses or that takes longer,
        `SegmentError` where the pool is being resized and its memory must stay where it is.
        """
        if not self._traits.registers:
            return
        until_s = time.monotonic() + timeout_s
        with self._turn(timeout_s):
            if self._traits.pins and pool not in self._sizes_held:
                held = contextlib.ExitStack()
                held.enter_context(pool.size_held())
                self._sizes_held[pool] = held
            known = self._ranges.get(pool, frozenset())
            base, _ = pool.arena
            for offset, size in sorted(frozenset(pool.arena_ranges()) - known):
                self._gate.register(base + offset, size, max(until_s - time.monotonic(), 0.0))
                known |= {(offset, size)}
                self._ranges[pool] = known

    def forget(self, pool: Pool) -> bool:
        """The pool isn't used any more. False: the store may still know its memory."""
        try:
            with self._turn(FORGET_TIMEOUT_S):
                ranges = self._ranges.pop(pool, frozenset())
                held = self._sizes_held.pop(pool, None)
        except StoreUnavailable:
            return False
        base, _ = pool.arena
        forgotten = [self._gate.forget(base + at, size, FORGET_TIMEOUT_S) for at, size in sorted(ranges)]
        if not all(forgotten):
            return False
        if held is not None:
            with contextlib.suppress(SegmentError):
                held.close()
        return True

    def close(self) -> None:
        """The store has been left: pools may change their size."""
        for held in self._sizes_held.values():
            with contextlib.suppress(SegmentError):
                held.close()
        self._sizes_held.clear()

    @contextlib.contextmanager
    def _turn(self, timeout_s: float) -> Iterator[None]:
        """One thread at a time; who registers much memory keeps others waiting no longer than they may."""
        if not self._lock.acquire(timeout=max(timeout_s, 0.0)):
            raise StoreUnavailable(self._traits.name, Why.BUSY)
        try:
            yield
        finally:
            self._lock.release()
