"""What direct copies ask of an accelerator's driver: a handful of verbs, so that everything above them runs,
and is tested, without one."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.uint64]


class DriverError(Exception):
    """The driver refused, or isn't there; the message is a sentence without a full stop."""


class DriverStream(Protocol):
    """A queue of copies of its own, used by one thread at a time."""

    def wait(self, fence: Any) -> None:
        """What is copied from now on begins after what had been given to the compute stream at the fence."""
        ...

    def copy(self, targets: Addresses, sources: Addresses, sizes: Addresses) -> None:
        """Start copies, of which one side is pinned host memory and the other the device's. They run later
        and in no order among themselves; the columns may go once the call has returned. On an error some may
        have been started."""
        ...

    def synchronize(self) -> None:
        """Return when everything given to this stream has ended. An error says that some of it failed; none
        of it runs any more then either."""
        ...


class Driver(Protocol):
    """One device. Every verb raises `DriverError` alone."""

    def fence(self) -> Any:
        """What the calling thread's compute stream has been given up to now."""
        ...

    def stream(self) -> DriverStream: ...

    def pin(self, address: int, size: int) -> None:
        """Make host memory reachable for the device: whole pages, mapped until `unpin` of the same range."""
        ...

    def unpin(self, address: int, size: int) -> None: ...
