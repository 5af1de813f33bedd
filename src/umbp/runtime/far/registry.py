"""Which memory a store has been told of: the pools', for as long as they are used."""

from __future__ import annotations

import contextlib
import threading

from umbp.pool import Pool
from umbp.store.base import StoreTraits
from umbp.store.gate import StoreGate

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
        self._sizes_held = contextlib.ExitStack()

    def tell(self, pool: Pool) -> None:
        """Tell the store of what it doesn't know yet; `StoreError` where it refuses, `SegmentError` where the
        pool is being resized and its memory must stay where it is.
        """
        if not self._traits.registers:
            return
        with self._lock:
            known = self._ranges.get(pool, frozenset())
            if not known and self._traits.pins:
                self._sizes_held.enter_context(pool.size_held())
            ranges = frozenset(pool.arena_ranges())
            base, _ = pool.arena
            for offset, size in sorted(ranges - known):
                self._gate.register(base + offset, size, REGISTER_TIMEOUT_S)
            self._ranges[pool] = known | ranges

    def forget(self, pool: Pool) -> bool:
        """The pool isn't used any more. False: the store may still know its memory."""
        with self._lock:
            ranges = self._ranges.pop(pool, frozenset())
        base, _ = pool.arena
        forgotten = [self._gate.forget(base + at, size, FORGET_TIMEOUT_S) for at, size in sorted(ranges)]
        return all(forgotten)
