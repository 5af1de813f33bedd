"""Which pools' memory the device can reach: pinned once, given back before the pool is left.

As long as it is pinned the pool can't be resized: the device would go on with pages that are no longer the
pool's.
"""

from __future__ import annotations

import logging
import threading
import time

from umbp.errors import SegmentError
from umbp.pool import Pool
from umbp.transfer.driver import Driver, DriverError

logger = logging.getLogger("vllm.umbp")

PORTION_BYTES = 1 << 30
"""Pinned in one call, or a slab where that is larger. No portion's edge lies inside a slab, so none inside an
object: a copy across two portions would be refused."""


class Pins:
    """Pools whose memory is pinned for one device. Serves several threads."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self._portions: dict[Pool, list[tuple[int, int]]] = {}
        """Empty where a pool can't be pinned, which is tried once."""

    def hold(self, pool: Pool) -> bool:
        """Whether the pool's memory is pinned; it is tried at the first call. A failure is one warning."""
        with self._lock:
            if pool not in self._portions:
                self._portions[pool] = self._pin(pool)
            return bool(self._portions[pool])

    def drop(self, pool: Pool) -> None:
        """Let a pool's memory go. No copy of it may run."""
        with self._lock:
            portions = self._portions.pop(pool, [])
            self._unpin(portions)
            if portions and not pool.native.closed:
                pool.native.release_size()

    def close(self) -> None:
        for pool in list(self._portions):
            self.drop(pool)

    def _pin(self, pool: Pool) -> list[tuple[int, int]]:
        start_s = time.monotonic()
        pinned: list[tuple[int, int]] = []
        try:
            pool.native.hold_size()
        except SegmentError as error:
            self._warn(error)
            return []
        try:
            for address, size in _portions_of(pool):
                self._driver.pin(address, size)
                pinned.append((address, size))
        except DriverError as error:
            self._unpin(pinned)
            pool.native.release_size()
            self._warn(error)
            return []
        logger.info(
            "UMBP: pinned %.1f GiB of the pool for the device in %.1f s",
            sum(size for _, size in pinned) / 2**30,
            time.monotonic() - start_s,
        )
        return pinned

    def _warn(self, error: Exception) -> None:
        logger.warning(
            "UMBP: the pool's memory can't be pinned (%s); copies go by way of staging memory", error
        )

    def _unpin(self, portions: list[tuple[int, int]]) -> None:
        for address, size in portions:
            try:
                self._driver.unpin(address, size)
            except DriverError as error:
                logger.warning("UMBP: the pool's memory can't be unpinned: %s", error)


def _portions_of(pool: Pool) -> list[tuple[int, int]]:
    """Of what has memory alone: pinning the rest would take some."""
    address, _ = pool.arena
    step = max(1, PORTION_BYTES // pool.slab_bytes) * pool.slab_bytes
    return [
        (address + at + first, min(step, size - first))
        for at, size in pool.arena_ranges()
        for first in range(0, size, step)
    ]
