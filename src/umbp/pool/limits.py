"""How much memory a new pool may take: what cgroup, host and file system leave free, read before anything
is allocated."""

import os
from dataclasses import dataclass
from pathlib import Path

from umbp.errors import CapacityError
from umbp.kinds import format_size

_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """One bound on new memory: where it comes from, and how many bytes it leaves."""

    source: str
    free_bytes: int


def memory_limits(root: Path = Path("/"), path: str | os.PathLike[str] | None = None) -> list[MemoryLimit]:
    """Every bound that can be read. `root` stands for `/` in tests; `path` names a file on the pool's file
    system."""
    limits = [limit for version in _VERSIONS for limit in _cgroup_limits(root, version)]
    available = _available_bytes(root)
    if available is not None:
        limits.append(MemoryLimit("the host's available memory", available))
    if path is not None:
        folder = Path(path).parent
        if folder.is_dir():
            fs = os.statvfs(folder)
            limits.append(MemoryLimit(f"the file system of {folder}", fs.f_bavail * fs.f_frsize))
    return limits


def refuse_over_limit(wanted_bytes: int, limits: list[MemoryLimit], what: str = "a pool") -> None:
    """Raises CapacityError, one sentence with both figures, where the tightest bound leaves less than
    wanted."""
    tightest = min(limits, key=lambda limit: limit.free_bytes, default=None)
    if tightest is not None and wanted_bytes > tightest.free_bytes:
        wanted, free = format_size(wanted_bytes), format_size(tightest.free_bytes)
        if wanted == free:  # a little too much: to the byte, lest the sentence contradict itself
            wanted, free = f"{wanted_bytes} bytes", f"{tightest.free_bytes} bytes"
        raise CapacityError(
            f"{what} of {wanted} doesn't fit: {tightest.source} leaves {free}; choose a smaller capacity"
        )


@dataclass(frozen=True, slots=True)
class _Cgroups:
    """Where one version of cgroups keeps its figures; `reclaimable` are the entries of `memory.stat` that the
    kernel gives up before it refuses anybody.
    """

    controller: str
    mount: str
    limit: str
    used: str
    reclaimable: tuple[str, ...]


_VERSIONS = (
    _Cgroups("", "sys/fs/cgroup", "memory.max", "memory.current", ("active_file", "inactive_file")),
    _Cgroups(
        "memory",
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
)


def _cgroup_limits(root: Path, version: _Cgroups) -> list[MemoryLimit]:
    """The group and all above it: each of them bounds."""
    limits = []
    for group in _groups(root, version.controller, root / version.mount):
        most, used = _number(group / version.limit), _number(group / version.used)
        if most is None or used is None or most >= _UNLIMITED:
            continue
        stat = _table(group / "memory.stat")
        cache = sum(stat.get(name, 0) for name in version.reclaimable)
        limits.append(
            MemoryLimit(f"the memory limit of cgroup {_name(group, root)}", max(0, most - used + cache))
        )
    return limits


def _groups(root: Path, controller: str, mount: Path) -> list[Path]:
    """This process's group under `mount`, then its ancestors up to the mount itself."""
    own = "/"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, place = rest.partition(":")
        if controller in controllers.split(",") if controller else controllers == "":
            own = place
    group = mount / own.strip("/")
    groups = [group, *(parent for parent in group.parents if parent == mount or mount in parent.parents)]
    # In a container the path is often the host's while the mount shows the container's own group as its root.
    return list(dict.fromkeys([*groups, mount]))


def _name(group: Path, root: Path) -> str:
    return "/" + str(group.relative_to(root))


def _available_bytes(root: Path) -> int | None:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    if text == "max":
        return _UNLIMITED
    return int(text) if text.isdigit() else None


def _table(path: Path) -> dict[str, int]:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
