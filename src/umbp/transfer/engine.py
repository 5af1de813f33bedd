"""Copies between engine memory and pool slots, by the native engine's threads and without the GIL."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from umbp import _native
from umbp.pool.pool import Pool
from umbp.transfer.runs import BlockRuns


class Engine(Protocol):
    """What moves blocks between a kind of engine memory and pools. One thread may load while another
    stores."""

    @property
    def sums_in_passing(self) -> bool:
        """Whether a checksum of what is stored costs little: it is computed while the bytes are in the
        cache anyhow, not by reading them once more."""
        ...

    def prepare(self, pool: Pool) -> None:
        """The pool will be copied from and to: do now what would take long then."""
        ...

    def leave(self, pool: Pool) -> None:
        """The pool is about to be closed; no copy of it runs."""
        ...

    def fence(self) -> Any:
        """Taken when a transfer is asked for, on the thread that launches the model; goes into the call. What
        has been launched before it is done before bytes move."""
        ...

    def store(
        self,
        runs: BlockRuns,
        block_ids: npt.ArrayLike,
        pool: Pool,
        tickets: npt.ArrayLike,
        *,
        checksum: bool = False,
        fence: Any = None,
    ) -> npt.NDArray[np.uint8]: ...

    def load(
        self,
        runs: BlockRuns,
        block_ids: npt.ArrayLike,
        pool: Pool,
        tickets: npt.ArrayLike,
        *,
        checksum: bool = False,
        fence: Any = None,
    ) -> npt.NDArray[np.uint8]: ...

    def close(self) -> None: ...


class CopyEngine:
    """A few threads that move blocks. Safe to call from several threads; a call returns when its bytes have
    moved.

    The caller answers for the engine memory: it stays mapped, and nobody else uses those blocks, during a
    call.
    """

    def __init__(self, threads: int, cores: Sequence[int] | None = None) -> None:
        """`threads` counts the caller's own. The others run on any of `cores`; None or none: wherever whoever
        brings a copy may run, off his own core.
        """
        self._native = _native.CopyEngine(threads, np.array(cores or (), dtype=np.uint32))

    @property
    def cores(self) -> tuple[int, ...]:
        """What the threads beside the caller's are bound to; empty: nothing."""
        return tuple(self._native.cores)

    @property
    def kernel(self) -> str:
        """What copies large batches past the cache: "avx2", "avx512", "sse2", "neon", or "portable", memcpy.

        UMBP_COPY_KERNEL in the environment names one, which is then used for batches of any size.
        """
        return self._native.kernel

    @property
    def threads(self) -> int:
        return self._native.threads

    @property
    def sums_in_passing(self) -> bool:
        return True

    def prepare(self, pool: Pool) -> None:
        """Host memory needs no preparation."""

    def leave(self, pool: Pool) -> None:
        """Nothing of a pool is kept."""

    def fence(self) -> None:
        """Host memory has no streams: what a caller sees finished is finished."""

    def store(
        self,
        runs: BlockRuns,
        block_ids: npt.ArrayLike,
        pool: Pool,
        tickets: npt.ArrayLike,
        *,
        checksum: bool = False,
        fence: object = None,
    ) -> npt.NDArray[np.uint8]:
        """Gathers blocks into slots that this process has reserved; a `CopyStatus` for each."""
        return self._native.store(runs.native, _blocks(block_ids), pool.native, _tickets(tickets), checksum)

    def load(
        self,
        runs: BlockRuns,
        block_ids: npt.ArrayLike,
        pool: Pool,
        tickets: npt.ArrayLike,
        *,
        checksum: bool = False,
        fence: object = None,
    ) -> npt.NDArray[np.uint8]:
        """Scatters acquired objects into blocks; a `CopyStatus` for each. With `checksum` all are compared
        with theirs, else those that came from elsewhere and nobody has compared yet. The block of one that is
        damaged may hold its bytes; of any other status but OK it is untouched, unless this process was taken
        for dead meanwhile."""
        return self._native.load(runs.native, _blocks(block_ids), pool.native, _tickets(tickets), checksum)

    def open_stores(
        self, runs: BlockRuns, block_ids: npt.ArrayLike, pool: Pool, tickets: npt.ArrayLike
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint64]]:
        """For bytes that a device moves: what `store` would answer, and the addresses of the slots that may
        be written; 0 for any other."""
        return self._native.open_stores(runs.native, _blocks(block_ids), pool.native, _tickets(tickets))

    def checksum_stores(self, runs: BlockRuns, pool: Pool, tickets: npt.ArrayLike) -> npt.NDArray[np.uint8]:
        """Adds the checksums of slots that a device has filled; a `CopyStatus` for each."""
        return self._native.checksum_stores(runs.native, pool.native, _tickets(tickets))

    def open_loads(
        self,
        runs: BlockRuns,
        block_ids: npt.ArrayLike,
        pool: Pool,
        tickets: npt.ArrayLike,
        *,
        checksum: bool = False,
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint64]]:
        """For bytes that a device moves: what `load` would answer, and the addresses of the objects that may
        be read; 0 for any other. What has to be compared is read here."""
        return self._native.open_loads(
            runs.native, _blocks(block_ids), pool.native, _tickets(tickets), checksum
        )

    def close(self) -> None:
        """Ends the threads. Copies in flight finish first."""
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _blocks(block_ids: npt.ArrayLike) -> npt.NDArray[np.int64]:
    return np.ascontiguousarray(block_ids, dtype=np.int64)


def _tickets(tickets: npt.ArrayLike) -> npt.NDArray[np.uint64]:
    return np.ascontiguousarray(tickets, dtype=np.uint64)
