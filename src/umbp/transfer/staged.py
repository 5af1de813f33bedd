"""Copies for KV memory on an accelerator: gathered on the device, moved through pinned host memory, by a side
stream.

One host copy more than a direct path would need, and nothing but torch: it serves CUDA, ROCm and whatever
else torch has streams for. The side stream waits for what the compute stream had been given when the transfer
was asked for, so a store reads finished KV and a load overwrites no block that a launched forward still
reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from umbp.pool import CopyStatus, Pool
from umbp.transfer.engine import CopyEngine
from umbp.transfer.runs import BlockRuns

if TYPE_CHECKING:
    import torch

STAGING_BYTES = 64 << 20
"""Host and device memory that each direction may use beside the KV cache."""


@dataclass(frozen=True, slots=True)
class _Storage:
    """One device allocation, as bytes."""

    address: int
    content: torch.Tensor


class StagedEngine:
    """The device's counterpart of `CopyEngine`. Each direction is used by one thread at a time; both may run
    at once.

    `fence()` is called on the thread that launches the model, when a transfer is asked for, and goes into the
    call.
    """

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], threads: int) -> None:
        """`kv_caches`: torch tensors of one device, kept alive until `close`."""
        storages = {t.untyped_storage().data_ptr(): t for t in kv_caches.values()}
        self._storages = [_Storage(address, _bytes_of(t)) for address, t in storages.items()]
        self._device = next(iter(kv_caches.values())).device
        self._host = CopyEngine(threads)
        self._streams = {"load": _Stream(self._device), "store": _Stream(self._device)}
        self._staging: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    @property
    def sums_in_passing(self) -> bool:
        return True

    def prepare(self, pool: Pool) -> None:
        """Staging memory is pinned; the pool needs not be."""

    def leave(self, pool: Pool) -> None:
        """Nothing of a pool is kept."""

    def fence(self) -> Any:
        """What the compute stream has been given up to now."""
        return self._streams["load"].event()

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
        """As `CopyEngine.store`."""
        blocks, held = _columns(block_ids, tickets)
        statuses, _ = self._host.open_stores(runs, blocks, pool, held)
        stream = self._streams["store"]
        for rows, host, device in self._portions("store", runs, statuses):
            with stream.after(fence):
                index = stream.on_device(blocks[rows])
                for view, start, end in self._views(runs):
                    device[:, start:end] = view.index_select(0, index)
                host.copy_(device, non_blocking=True)
            stream.synchronize()
            statuses[rows] = self._host.store(
                _staged(host), np.arange(len(rows)), pool, held[rows], checksum=checksum
            )
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
        """As `CopyEngine.load`."""
        blocks, held = _columns(block_ids, tickets)
        statuses, _ = self._host.open_loads(runs, blocks, pool, held)
        stream = self._streams["load"]
        for rows, host, device in self._portions("load", runs, statuses):
            statuses[rows] = self._host.load(
                _staged(host), np.arange(len(rows)), pool, held[rows], checksum=checksum
            )
            good = np.flatnonzero(statuses[rows] == CopyStatus.OK)
            with stream.after(fence):
                device.copy_(host, non_blocking=True)
                index, place = stream.on_device(blocks[rows][good]), stream.on_device(good)
                for view, start, end in self._views(runs):
                    view.index_copy_(0, index, device[:, start:end].index_select(0, place))
            stream.synchronize()
        return statuses

    def close(self) -> None:
        """Ends the threads and lets the engine's memory go."""
        self._host.close()
        self._staging = {}
        self._storages = []

    def _portions(
        self, direction: str, runs: BlockRuns, statuses: npt.NDArray[np.uint8]
    ) -> Iterator[tuple[npt.NDArray[np.intp], torch.Tensor, torch.Tensor]]:
        """The good rows, as many at a time as staging holds, with host and device buffers of `(rows, object
        bytes)`.
        """
        good = np.flatnonzero(statuses == CopyStatus.OK)
        step = max(1, STAGING_BYTES // runs.object_bytes)
        for first in range(0, len(good), step):
            rows = good[first : first + step]
            host, device = self._buffers(direction, min(step, len(good)) * runs.object_bytes)
            size = len(rows) * runs.object_bytes
            shape = (len(rows), runs.object_bytes)
            yield rows, host[:size].view(shape), device[:size].view(shape)

    def _buffers(self, direction: str, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        found = self._staging.get(direction)
        if found is None or found[0].numel() < size:
            found = self._staging[direction] = self._streams[direction].buffers(size)
        return found

    def _views(self, runs: BlockRuns) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Each run as a `(blocks, bytes)` view of its allocation, with its place in the object."""
        columns = zip(
            runs.base_address.tolist(),
            runs.block_stride.tolist(),
            runs.run_bytes.tolist(),
            runs.object_offset.tolist(),
            strict=True,
        )
        for base, stride, size, offset in columns:
            storage = self._storage(base, base + stride * (runs.block_count - 1) + size)
            view = storage.content.as_strided((runs.block_count, size), (stride, 1), base - storage.address)
            yield view, offset, offset + size

    def _storage(self, start: int, end: int) -> _Storage:
        for storage in self._storages:
            if storage.address <= start and end <= storage.address + storage.content.numel():
                return storage
        raise ValueError(f"addresses {start:#x} to {end:#x} are in no registered KV cache")


class _Stream:
    """A side stream of one device; on a CPU, which has none, everything happens at once."""

    def __init__(self, device: torch.device) -> None:
        import torch

        self._torch = torch
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream: Any = None if self._module is None else self._module.Stream(device=device)

    def event(self) -> Any:
        if self._module is None:
            return None
        event = self._module.Event()
        event.record(self._module.current_stream(self._device))
        return event

    def after(self, fence: Any) -> AbstractContextManager[Any]:
        """Work inside goes to this stream, and runs after the fence."""
        if self._module is None:
            return nullcontext()
        if fence is not None:
            self._stream.wait_event(fence)
        found: AbstractContextManager[Any] = self._module.stream(self._stream)
        return found

    def synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def on_device(self, numbers: npt.NDArray[Any]) -> torch.Tensor:
        host = self._torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64))
        return host.to(self._device)

    def buffers(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A pinned host buffer and a device buffer of so many bytes."""
        torch = self._torch
        host = torch.empty(size, dtype=torch.uint8, pin_memory=self._module is not None)
        return host, torch.empty(size, dtype=torch.uint8, device=self._device)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _staged(host: torch.Tensor) -> BlockRuns:
    """A staging buffer of `(objects, bytes)` as a cache whose blocks are whole objects."""
    count, size = host.shape
    return BlockRuns.from_columns([host.data_ptr()], [size], [size], [0], count)


def _columns(
    block_ids: npt.ArrayLike, tickets: npt.ArrayLike
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]:
    return np.ascontiguousarray(block_ids, dtype=np.int64), np.ascontiguousarray(tickets, dtype=np.uint64)
