"""Taking the memory of a pool: is there room for all of it, and, before each portion, still for the rest?"""

import os
from collections.abc import Callable

from umbp import _native
from umbp.pool.limits import memory_limits, refuse_over_limit
from umbp.pool.memory import Progress


def refuse_unless_it_fits(
    capacity_bytes: int,
    max_bytes: int,
    slab_bytes: int,
    min_object_bytes: int,
    processes: int,
    eviction_policy: str,
    path: str | os.PathLike[str] | None = None,
) -> None:
    """`CapacityError` before anything is taken; the pool's tables count."""
    limits = memory_limits(path=path)
    refuse_over_limit(capacity_bytes, limits)
    wanted = _native.reserved_bytes(
        capacity_bytes, max_bytes, slab_bytes, min_object_bytes, processes, eviction_policy
    )
    refuse_over_limit(wanted, limits)


def while_it_fits(
    capacity_bytes: int, progress: Progress | None, path: str | os.PathLike[str] | None = None
) -> Callable[[int], None]:
    """Asked by the native core before each portion that it takes. The ranks of an engine start at the same
    time: each by itself would fit, all of them need not.
    """

    def check(left_bytes: int) -> None:
        what = "a pool" if left_bytes == capacity_bytes else "the rest of a pool"
        refuse_over_limit(left_bytes, memory_limits(path=path), what)
        if progress is not None:
            progress(capacity_bytes - left_bytes, capacity_bytes)

    return check
