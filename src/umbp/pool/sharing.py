"""Who shares a pool: its name, namespaces with their use and quota, and the group that may attach."""

import grp
import os
from dataclasses import dataclass
from typing import Self

from umbp.errors import ConfigError

NO_QUOTA = 2**64 - 1
FILE_PREFIX = "umbp-"


@dataclass(frozen=True, slots=True)
class NamespaceUse:
    """One namespace of a pool. `used_bytes` counts whole slots, also of what is being written."""

    name: str
    """Of one longer than 191 bytes the head; namespaces are told apart by all of it."""
    id: int
    epoch: int
    """Grows by one with each `clear`."""
    used_bytes: int
    quota_bytes: int | None
    """None: no bound of its own."""
    objects: int

    @classmethod
    def from_row(cls, row: tuple[str, int, int, int, int, int]) -> Self:
        """From the native core's columns."""
        name, number, epoch, used_bytes, quota, objects = row
        return cls(name, number, epoch, used_bytes, None if quota == NO_QUOTA else quota, objects)


def group_id(group: str | int) -> int:
    """The number of a group given by name or number; `ConfigError` where there is none of that name."""
    if isinstance(group, int) and not isinstance(group, bool) and 0 <= group < 2**32 - 1:
        return group
    if isinstance(group, str) and group.isascii() and group.isdecimal() and int(group) < 2**32 - 1:
        return int(group)
    try:
        return grp.getgrnam(str(group)).gr_gid
    except (KeyError, ValueError):
        raise ConfigError(f"there is no group {str(group)!r} on this host; give its name or number") from None


def pool_path(folder: str | os.PathLike[str], name: str) -> str:
    """Where the pool of that name lies in a folder. The prefix keeps it apart from what else is in there."""
    return os.path.join(folder, FILE_PREFIX + name)
