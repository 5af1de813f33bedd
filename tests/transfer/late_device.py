"""A device in host memory that keeps a driver's promises and not one more: everything happens as late as it
may, and in the worst order that is allowed."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from umbp.pool import CopyStatus, Pool
from umbp.transfer import BlockRuns, CopyEngine
from umbp.transfer.driver import Addresses, DriverError


class LateDevice:
    """Work of the compute stream runs when somebody waits for it; a copy when its stream is synchronised, and
    before any compute work that its stream was not told to wait for."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.pins: dict[int, int] = {}
        self.streams: list[LateStream] = []
        self.faults: dict[str, int] = {}
        """How many of the next calls of a verb fail: pin, copy, synchronize."""
        self.calls: list[int] = []
        """The number of copies of each batch."""
        self._compute: list[Callable[[], None]] = []
        self._done = 0

    # What a model does

    def launch(self, work: Callable[[], None]) -> None:
        self._compute.append(work)

    def run_until(self, fence: Any) -> None:
        while self._done < (len(self._compute) if fence is None else fence):
            self._done += 1
            self._compute[self._done - 1]()

    # What a driver does

    def fence(self) -> int:
        return len(self._compute)

    def stream(self) -> LateStream:
        self.streams.append(LateStream(self))
        return self.streams[-1]

    def pin(self, address: int, size: int) -> None:
        self.fail_if_told("pin")
        assert address % 4096 == 0
        assert size % 4096 == 0
        if any(address < start + length and start < address + size for start, length in self.pins.items()):
            raise DriverError("already registered")
        self.pins[address] = size

    def unpin(self, address: int, size: int) -> None:
        assert not any(stream.pending for stream in self.streams), "unpinned under a copy"
        if self.pins.pop(address, None) != size:
            raise DriverError("not registered")

    def fail_if_told(self, verb: str) -> None:
        if self.faults.get(verb, 0) > 0:
            self.faults[verb] -= 1
            raise DriverError(f"{verb} was told to fail")

    def is_pinned(self, address: int, size: int) -> bool:
        return any(
            start <= address and address + size <= start + length for start, length in self.pins.items()
        )


class LateStream:
    def __init__(self, device: LateDevice) -> None:
        self.pending: list[tuple[int, int, int]] = []
        self._device = device
        self._fence = 0

    def wait(self, fence: Any) -> None:
        if fence is not None:
            self._fence = max(self._fence, fence)

    def copy(self, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        columns = [column.tolist() for column in (targets, sources, sizes)]
        assert all(column.dtype == np.uint64 for column in (targets, sources, sizes))
        copies = list(zip(*columns, strict=True))
        for target, source, size in copies:
            # A copy must lie in one registration.
            assert self._device.is_pinned(target, size) != self._device.is_pinned(source, size)
        self._device.calls.append(len(copies))
        if self._device.faults.get("copy", 0) > 0:
            self.pending += copies[: len(copies) // 2]
        self._device.fail_if_told("copy")
        self.pending += copies

    def synchronize(self) -> None:
        self._device.run_until(self._fence)
        copies, self.pending = self.pending, []
        self._device.random.shuffle(copies)
        for target, source, size in copies:
            ctypes.memmove(target, source, size)
        self._device.fail_if_told("synchronize")


class LateCopies(CopyEngine):
    """The engine for what can't go directly: waits for its fence, and counts its calls. As a device's engines
    do, it compares what is to be compared before it writes.
    """

    def __init__(self, device: LateDevice) -> None:
        super().__init__(1)
        self.calls = 0
        self._device = device

    def store(self, *arguments: Any, fence: Any = None, **options: Any) -> npt.NDArray[np.uint8]:
        self.calls += 1
        self._device.run_until(fence)
        return super().store(*arguments, **options)

    def load(
        self, runs: BlockRuns, block_ids: npt.ArrayLike, pool: Pool, tickets: npt.ArrayLike, **options: Any
    ) -> npt.NDArray[np.uint8]:
        self.calls += 1
        self._device.run_until(options.pop("fence", None))
        blocks, held = np.asarray(block_ids, dtype=np.int64), np.asarray(tickets, dtype=np.uint64)
        statuses, _ = self.open_loads(runs, blocks, pool, held, **options)
        good = statuses == CopyStatus.OK
        statuses[good] = super().load(runs, blocks[good], pool, held[good], **options)
        return statuses
