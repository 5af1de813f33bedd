"""Which memory a store has been told of: a pool's, and no longer than it is used."""

from __future__ import annotations

from umbp.pool import Pool
from umbp.store.gate import StoreGate

REGISTER_TIMEOUT_S = 60.0
"""Pinning a large pool for a network card takes a while."""


class RegisteredPool:
    """A pool's memory, made known to a gate's store. A pool that has grown since is told of anew.

    Threads may call it side by side; a range that is told of twice does no harm.
    """

    def __init__(self, gate: StoreGate, pool: Pool) -> None:
        self._gate = gate
        self._pool = pool
        self._ranges: frozenset[tuple[int, int]] = frozenset()

    def tell(self) -> None:
        """Tell the store of what it doesn't know yet; `StoreError` where it refuses."""
        ranges = frozenset(self._pool.arena_ranges())
        if ranges == self._ranges:
            return
        base, _ = self._pool.arena
        for offset, size in sorted(ranges - self._ranges):
            self._gate.register(base + offset, size, REGISTER_TIMEOUT_S)
        self._ranges = ranges
