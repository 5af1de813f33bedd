"""What can be told of pools from outside, without attaching, and so without disturbing anybody: also of pools
that are damaged, that belong to others, or whose lock is held by a stopped process.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from umbp import _native
from umbp.errors import SegmentError
from umbp.pool.sharing import FILE_PREFIX, NamespaceUse

_NO_GROUP = 2**32 - 1


@dataclass(frozen=True, slots=True)
class PoolProcess:
    """One place in a pool's table of processes. `pid` is the process's own, in its own pid namespace."""

    place: int
    pid: int
    uid: int
    is_alive: bool
    """It holds its byte lock; a dead one's place is reaped by the next to use the pool."""
    holds_size: bool
    """The pool can't be resized as long as it lives."""
    pinned_slots: int
    """Objects that it reads, writes or promises; only counted by `inspect_pool`."""


@dataclass(frozen=True, slots=True)
class SlotClass:
    """The slabs whose objects have one size."""

    slot_bytes: int
    slabs: int
    free_slots: int


@dataclass(frozen=True, slots=True)
class PoolFile:
    """A pool as its file tells, read while others may change it: figures need not fit to the byte."""

    path: str
    problem: str
    """Why nobody can attach it, one sentence; empty where all is well. Then all figures count."""
    owner_uid: int
    group_gid: int | None
    mode: int
    file_bytes: int
    memory_bytes: int
    """What the file takes of the host's memory, tables and all."""
    created_s: int
    capacity_bytes: int
    max_bytes: int
    slab_bytes: int
    min_object_bytes: int
    eviction_policy: str
    high_watermark: float
    """The share in use where eviction starts, and the one where it stops."""
    low_watermark: float
    used_bytes: int
    objects: int
    free_slabs: int
    resizing_pid: int | None
    processes: tuple[PoolProcess, ...]
    classes: tuple[SlotClass, ...]
    namespaces: tuple[NamespaceUse, ...]
    counters: Mapping[str, int]

    @property
    def name(self) -> str:
        """By which the commands know it: a file that isn't named like a pool goes by its path."""
        base = os.path.basename(self.path)
        return base.removeprefix(FILE_PREFIX) if base.startswith(FILE_PREFIX) else self.path

    @property
    def state(self) -> str:
        """`ready`, `resizing`, or `unusable` (see `problem`)."""
        if self.problem:
            return "unusable"
        return "ready" if self.resizing_pid is None else "resizing"

    @property
    def alive(self) -> int:
        return sum(process.is_alive for process in self.processes)

    @property
    def bound_bytes(self) -> int:
        """Free slots in slabs that hold objects: room for objects of the same size only."""
        return sum(each.slot_bytes * each.free_slots for each in self.classes)

    @property
    def tail_bytes(self) -> int:
        """Lost at the ends of slabs, where no whole slot fits."""
        return sum(each.slabs * (self.slab_bytes % each.slot_bytes) for each in self.classes)


def inspect_pool(path: str | os.PathLike[str]) -> PoolFile:
    """`SegmentError` where there is no such file, or where it isn't a pool."""
    report = _native.inspect(os.path.abspath(path), True)
    if not report["is_pool"] and not os.path.basename(path).startswith(FILE_PREFIX):
        raise SegmentError(f"{os.fspath(path)} isn't a UMBP pool")
    return _pool_file(os.path.abspath(path), report)


def list_pools(folder: str | os.PathLike[str]) -> list[PoolFile]:
    """Every pool in a folder, by name; whatever is named like one, too, with what is wrong with it."""
    found = []
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if entry.is_file(follow_symlinks=False))
    except OSError as error:
        raise SegmentError(f"the folder {os.fspath(folder)} can't be read: {error.strerror}") from None
    for name in names:
        path = os.path.join(os.path.abspath(folder), name)
        try:
            report = _native.inspect(path, False)
        except SegmentError:
            continue  # gone meanwhile
        if report["is_pool"] or name.startswith(FILE_PREFIX):
            found.append(_pool_file(path, report))
    return found


def destroy_pool(path: str | os.PathLike[str]) -> None:
    """Deletes a pool's file and tells all who are attached; works on damaged and stuck pools as well.
    `SegmentError` where it isn't a pool, or this user may not."""
    _native.destroy(os.path.abspath(path))


def _pool_file(path: str, report: dict[str, Any]) -> PoolFile:
    report = {name: value for name, value in report.items() if name != "is_pool"}
    group = report.pop("group_gid")
    resizing = report.pop("resizing_pid")
    return PoolFile(
        path=path,
        group_gid=None if group == _NO_GROUP else group,
        resizing_pid=resizing or None,
        processes=tuple(PoolProcess(*row) for row in report.pop("processes")),
        classes=tuple(SlotClass(*row) for row in report.pop("classes")),
        namespaces=tuple(NamespaceUse.from_row(row) for row in report.pop("namespaces")),
        **report,
    )
