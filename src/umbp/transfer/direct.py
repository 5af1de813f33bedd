"""Copies between pool slots and KV memory on a device, by the device's own copy engines: no staging memory,
no kernel, no processor.

The pool's memory is pinned once. A transfer becomes columns of addresses, which the driver takes in large
batches on a side stream; the stream first waits for what the compute stream had been given when the transfer
was asked for, so a store reads finished KV and a load overwrites no block that a launched forward still
reads.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from umbp.pool import CopyStatus, Pool
from umbp.transfer.driver import Addresses, Driver, DriverError
from umbp.transfer.engine import CopyEngine, Engine
from umbp.transfer.pins import Pins
from umbp.transfer.runs import BlockRuns, merged_columns

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.umbp")

COPIES_PER_CALL = 16384
"""Started by one call of the driver; whole blocks only, at least one."""

SHORTEST_DIRECT_BYTES = 2048
"""Blocks whose runs are shorter on average are gathered on the device instead: each copy has a fixed cost. An
estimate; `umbp check-gpu` measures both ways."""

FAILURES_IN_A_ROW = 3
"""After so many the driver isn't asked again."""


class DirectEngine:
    """The counterpart of `CopyEngine` for a device, with another engine for what can't go directly. Each
    direction is used by one thread at a time; both may run at once."""

    def __init__(
        self,
        kv_caches: Mapping[str, torch.Tensor],
        driver: Driver,
        fallback: Engine,
        threads: int,
        *,
        shortest_bytes: int = SHORTEST_DIRECT_BYTES,
    ) -> None:
        """`kv_caches`: tensors of the driver's device, kept alive by the caller until `close`; `fallback` is
        closed with this engine and takes this driver's fences, and blocks whose runs are shorter on average
        than `shortest_bytes`."""
        allocations = sorted(
            {
                (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
                for storage in (tensor.untyped_storage() for tensor in kv_caches.values())
            }
        )
        self._starts, self._ends = (
            np.array(each, dtype=np.uint64) for each in zip(*allocations, strict=True)
        )
        self._driver = driver
        self._fallback = fallback
        self._host = CopyEngine(threads)
        self._pins = Pins(driver)
        self._streams = {"load": driver.stream(), "store": driver.stream()}
        self._shortest_bytes = shortest_bytes
        self._failures = 0

    def reaches(self, pool: Pool) -> bool:
        """Whether copies of this pool go directly: not once the driver has failed too often, or where it
        can't pin the pool."""
        return self._failures < FAILURES_IN_A_ROW and self._pins.hold(pool)

    @property
    def sums_in_passing(self) -> bool:
        """No processor sees what the device's copy engines move."""
        return False

    def prepare(self, pool: Pool) -> None:
        """Pin the pool's memory, which takes a while where it is large."""
        self._pins.hold(pool)
        self._fallback.prepare(pool)

    def leave(self, pool: Pool) -> None:
        self._pins.drop(pool)
        self._fallback.leave(pool)

    def fence(self) -> Any:
        return self._driver.fence()

    def store(
        self,
        runs: BlockRuns,
        block_ids: npt.ArrayLike,
        pool: Pool,
        tickets: npt.ArrayLike,
        *,
        checksum: bool = False,
        fence: Any = None,
    ) -> npt.NDArray[np.uint8]:
        """As `CopyEngine.store`; FAILED where the driver could not."""
        self._refuse_foreign(runs)
        if not self._goes_directly(runs, pool):
            return self._fallback.store(runs, block_ids, pool, tickets, checksum=checksum, fence=fence)
        blocks, held = np.asarray(block_ids, dtype=np.int64), np.asarray(tickets, dtype=np.uint64)
        statuses, objects = self._host.open_stores(runs, blocks, pool, held)
        rows = np.flatnonzero(statuses == CopyStatus.OK)
        if not self._move("store", runs, blocks[rows], objects[rows], fence):
            statuses[rows] = CopyStatus.FAILED
        elif checksum:
            statuses[rows] = self._host.checksum_stores(runs, pool, held[rows])
        return statuses

    def load(
        self,
        runs: BlockRuns,
        block_ids: npt.ArrayLike,
        pool: Pool,
        tickets: npt.ArrayLike,
        *,
        checksum: bool = False,
        fence: Any = None,
    ) -> npt.NDArray[np.uint8]:
        """As `CopyEngine.load`; FAILED, with a block of unknown content, where the driver could not."""
        self._refuse_foreign(runs)
        if not self._goes_directly(runs, pool):
            return self._fallback.load(runs, block_ids, pool, tickets, checksum=checksum, fence=fence)
        blocks = np.asarray(block_ids, dtype=np.int64)
        statuses, objects = self._host.open_loads(runs, blocks, pool, tickets, checksum=checksum)
        rows = np.flatnonzero(statuses == CopyStatus.OK)
        if not self._move("load", runs, blocks[rows], objects[rows], fence):
            statuses[rows] = CopyStatus.FAILED
        elif pool.native.is_expelled:
            # Taken for dead meanwhile: the slots may have got other objects.
            statuses[rows] = CopyStatus.BAD_TICKET
        return statuses

    def close(self) -> None:
        """Ends the threads and unpins the pools. No copy may run."""
        self._pins.close()
        self._host.close()
        self._fallback.close()

    def _goes_directly(self, runs: BlockRuns, pool: Pool) -> bool:
        lengths = merged_columns(runs)[2]
        return bool(lengths.mean() >= self._shortest_bytes) and self.reaches(pool)

    def _move(
        self, direction: str, runs: BlockRuns, blocks: npt.NDArray[np.int64], objects: Addresses, fence: Any
    ) -> bool:
        """Copies whole blocks from or to their objects; False if the driver failed. Nothing runs any more
        when this returns, whatever happened."""
        if not len(blocks):
            return True
        stream = self._streams[direction]
        try:
            try:
                stream.wait(fence)
                for on_device, in_pool, sizes in _batches(runs, blocks, objects):
                    targets, sources = (in_pool, on_device) if direction == "store" else (on_device, in_pool)
                    stream.copy(targets, sources, sizes)
            finally:
                stream.synchronize()
        except DriverError as error:
            self._count_failure(direction, len(blocks), error)
            return False
        self._failures = 0
        return True

    def _count_failure(self, direction: str, blocks: int, problem: DriverError) -> None:
        self._failures += 1
        logger.warning("UMBP: the device's driver failed to %s %d blocks: %s", direction, blocks, problem)
        if self._failures == FAILURES_IN_A_ROW:
            logger.warning("UMBP: from now on copies go by way of staging memory")

    def _refuse_foreign(self, runs: BlockRuns) -> None:
        """A copy outside the registered tensors would cost the process its device."""
        first, end = runs.extents().T
        allocation = np.searchsorted(self._starts, first, side="right").astype(np.int64) - 1
        outside = np.flatnonzero((allocation < 0) | (end > self._ends[allocation]))
        if len(outside):
            row = int(outside[0])
            raise ValueError(
                f"addresses {int(first[row]):#x} to {int(end[row]):#x} are in no registered KV cache"
            )


def _batches(
    runs: BlockRuns, blocks: npt.NDArray[np.int64], objects: Addresses
) -> Iterator[tuple[Addresses, Addresses, Addresses]]:
    """Columns of device addresses, addresses in the pool, and sizes."""
    base, stride, length, offset = merged_columns(runs)
    step = max(1, COPIES_PER_CALL // len(base))
    for first in range(0, len(blocks), step):
        some = slice(first, first + step)
        on_device = base + (blocks[some, None] * stride).astype(np.uint64)
        in_pool = objects[some, None] + offset
        yield on_device.ravel(), in_pool.ravel(), np.tile(length, len(on_device))
