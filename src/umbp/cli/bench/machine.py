"""What the machine is that a result was measured on; nothing that names the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path


def facts(*distributions: str) -> dict[str, str]:
    """Processor, cores, memory, Python, and the versions of the installed distributions among these."""
    found = {
        "processor": _first_value(Path("/proc/cpuinfo"), "model name"),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "python": platform.python_version(),
    }
    for name in distributions:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _first_value(file: Path, key: str) -> str:
    for line in file.read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return platform.machine()
