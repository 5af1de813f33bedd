"""Cores for copying beside the engine's own threads.

vLLM's CPU backend pins a worker's main thread to the cores of its OpenMP threads, and every thread that is
started later inherits that: copy threads would only take turns with the forward. The process that started the
worker isn't pinned. What it may use and no worker is pinned to is free; vLLM keeps such cores where a
connector is set. Nothing is widened beyond the starter's own cores, so a `taskset` around the engine holds.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Collection, Iterator
from pathlib import Path


def free_cores() -> tuple[int, ...]:
    """Cores that the process which started this one may use, and none of its children is pinned to.

    Empty where there are none, where this process isn't pinned, and where `multiprocessing` did not start it:
    threads then run where they would anyway.
    """
    starter = multiprocessing.parent_process()
    if starter is None or starter.pid is None:
        return ()
    with contextlib.suppress(OSError):
        around = os.sched_getaffinity(starter.pid)
        own = os.sched_getaffinity(os.getpid())
        if own < around:
            return tuple(sorted(around - own - _pinned_children(starter.pid, around)))
    return ()


def use_cores_too(cores: Collection[int]) -> None:
    """The calling thread may run on these cores too. If the system refuses, nothing changes."""
    if cores:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, os.sched_getaffinity(0) | set(cores))


def use_free_cores() -> None:
    """The calling thread may run on the free cores too: for threads that work beside the engine's."""
    use_cores_too(free_cores())


def _pinned_children(pid: int, around: set[int]) -> set[int]:
    """What the process's children are pinned to: the other ranks' workers compute there."""
    taken: set[int] = set()
    for child in _children(pid):
        with contextlib.suppress(OSError):  # gone meanwhile
            cores = os.sched_getaffinity(child)
            if cores < around:
                taken |= cores
    return taken


def _children(pid: int) -> Iterator[int]:
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The second field is a name in brackets, which may hold anything; state and parent follow.
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid:
                yield int(stat.parent.name)
