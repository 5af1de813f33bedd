"""How one process tells another where its pool is."""

import os
from dataclasses import dataclass
from pathlib import Path

from umbp.errors import SegmentError


def boot_id() -> str:
    """The running kernel's; equal for all processes of one host, whatever their containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass(frozen=True, slots=True)
class PoolHandle:
    """A pool by the descriptor that a living process holds on it. Plain values: goes through msgpack and
    pickle."""

    pid: int
    fd: int
    boot_id: str

    @property
    def path(self) -> str:
        """The file to open, on the same host and in a pid namespace that sees the process."""
        return f"/proc/{self.pid}/fd/{self.fd}"

    def check_host(self) -> None:
        """Raises SegmentError where this is another host than the pool's."""
        if self.boot_id != boot_id():
            raise SegmentError(
                "the pool is on another host (its boot id differs);"
                " an embedded pool serves the ranks of one host"
            )

    def check_visible(self) -> None:
        """Raises SegmentError where the process that holds the pool can't be seen from here."""
        if not os.path.exists(self.path):
            raise SegmentError(
                f"the pool at {self.path} can't be reached:"
                " its process is gone, or is in another pid namespace"
            )
