"""Slabs for a pool whose objects nobody knows beforehand: many engines of many models share it.

Objects of one size fill whole slabs, so the end of a slab that isn't a whole slot is lost: 2.5 % on average
for blocks of 64 KiB to 20 MiB in slabs of 64 MiB, 0.6 % in slabs of 256 MiB. A slab is also what moves from
one size to another when that one starves, and all objects in it go then; smaller slabs lose less. The tables
grow with the number of the smallest objects: 192 bytes each, 1 % of a pool at the default, 0.4 % where its
objects have 256 KiB.
"""

from umbp._native import slot_bytes
from umbp.errors import ConfigError
from umbp.kinds import PAGE_BYTES, format_size

MIN_OBJECT_BYTES = 16 << 10
LEAST_SLAB_BYTES, MOST_SLAB_BYTES = 64 << 20, 256 << 20
SLABS = 256
"""As many slabs as a pool has, unless they would be too small or too large."""
LEAST_SLABS = 8
HUGE_PAGE_BYTES = 2 << 20

INDEX_BYTES = 64
"""Of the index, for each of the smallest objects that a pool may grow to hold."""
INDEX_SHARE = 0.02
"""What the index may take of the capacity: a pool that may grow far has fewer, larger slots."""


def shared_geometry(capacity_bytes: int, max_bytes: int | None = None) -> tuple[int, int]:
    """Bytes of a slab and of the smallest object, for a pool of that size that may grow to `max_bytes`."""
    least = slot_bytes(MIN_OBJECT_BYTES) * LEAST_SLABS
    if capacity_bytes < least:
        raise ConfigError(
            f"a shared pool must have at least {format_size(least)}, not {format_size(capacity_bytes)}"
        )
    wanted = min(
        max(capacity_bytes // SLABS, LEAST_SLAB_BYTES), MOST_SLAB_BYTES, capacity_bytes // LEAST_SLABS
    )
    step = HUGE_PAGE_BYTES if wanted >= 8 * HUGE_PAGE_BYTES else PAGE_BYTES
    first = max(step, wanted // step * step)
    # Of the sizes about the wanted one, that which leaves the least over.
    sizes = range(first - first // 4 // step * step, first + 1, max(step, first // 64 // step * step))
    slab_bytes = min(reversed(sizes), key=lambda size: capacity_bytes % size)
    most_slots = INDEX_SHARE * capacity_bytes / INDEX_BYTES
    min_object_bytes = max(MIN_OBJECT_BYTES, int((max_bytes or capacity_bytes) / most_slots))
    return slab_bytes, min(min_object_bytes, slab_bytes - PAGE_BYTES)


def tail_share(slab_bytes: int, object_bytes: int) -> float:
    """The share of a slab that objects of this size leave unused at its end."""
    return slab_bytes % slot_bytes(object_bytes) / slab_bytes
