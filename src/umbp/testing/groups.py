"""The process groups of engines, each with its leader, and how one ends with all that it had.

An engine that is killed leaves in the RAM file system what vLLM passes messages in, up to a quarter of a
gigabyte for each queue, and the process that would remove it is one of the group.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

END_TIMEOUT_S = 10.0
SHARED_MEMORY = re.compile(r"/dev/shm/(?:psm_|sem\.mp-|vllm_dist_)\S+")
"""vLLM's and Python's: queues of messages, semaphores, what ranks reduce in."""


def members(leader: int) -> list[int]:
    """All processes of the group, zombies too."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if os.getpgid(int(entry.name)) == leader:
                    found.append(int(entry.name))
    return found


def shared_memory_of(pids: Sequence[int]) -> set[Path]:
    """What vLLM has made for these processes in the RAM file system, as far as one of them has it mapped."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            found.update(SHARED_MEMORY.findall(Path(f"/proc/{pid}/maps").read_text()))
    return {Path(each) for each in found}


@contextlib.contextmanager
def taking_along(pids: Sequence[int]) -> Iterator[None]:
    """Whoever ends these processes while inside leaves nothing of vLLM's in the RAM file system."""
    left_behind = shared_memory_of(pids)
    yield
    for each in left_behind:
        each.unlink(missing_ok=True)


def kill_group(leader: int) -> None:
    """End a whole group at once, with all that vLLM has made for it, and wait until it has ended. A member
    does not come back from this.
    """
    pids = members(leader)
    is_member = os.getpid() in pids
    others = [pid for pid in pids if pid != os.getpid()]
    with taking_along(pids):
        if is_member:
            for pid in others:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        else:
            _kill_all_of(leader)
        wait_for_end(others)
    if is_member:
        _kill_all_of(leader)


def _kill_all_of(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def wait_for_end(pids: Sequence[int]) -> None:
    """Until these have ended, at most ten seconds each: whoever is killed is gone a moment later."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            descriptor = os.pidfd_open(pid)
            try:
                select.select([descriptor], [], [], END_TIMEOUT_S)
            finally:
                os.close(descriptor)


def is_running(pid: int) -> bool:
    """Whether the process exists and has not ended; a zombie has."""
    try:
        status = (Path("/proc") / str(pid) / "stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] not in ("Z", "X")
