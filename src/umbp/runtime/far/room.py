"""How much of what a store has its pools can take at once. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from umbp.data import Rank
from umbp.pool import Pool, slot_bytes
from umbp.runtime.base import HandshakeExtra

_PREFIX = "object_bytes:"


def told_sizes(bytes_by_group: Mapping[int, int]) -> dict[str, str | int]:
    """What a worker tells of its objects, for `FarRoom.learn`."""
    return {f"{_PREFIX}{group_id}": size for group_id, size in bytes_by_group.items()}


class FarRoom:
    """Bounds promises of objects that must be fetched: each needs a slot until it has been copied, and a slot
    that is pinned can't be had. What others pin later isn't known here, nor how pins lie about the slabs.
    """

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        """Bytes of a slot by cache group."""

    def learn(self, extras: Iterable[HandshakeExtra]) -> None:
        """How large the workers' objects are."""
        self._slots = {}
        for extra in extras:
            for name, value in extra.items():
                if name.startswith(_PREFIX):
                    group_id = int(name.removeprefix(_PREFIX))
                    self._slots[group_id] = max(self._slots.get(group_id, 0), slot_bytes(int(value)))

    def blocks(self, pools: Mapping[Rank, Pool], group_id: int, promised: Mapping[int, int]) -> int | None:
        """How many blocks of a cache group all pools have room for, beside those that are `promised` by
        cache group and may not have been fetched yet; None where that can't be told.
        """
        if group_id not in self._slots:
            return None
        return min(
            self._objects(pool, group_id, promised, sum(each is pool for each in pools.values()))
            for pool in set(pools.values())
        )

    def _objects(self, pool: Pool, group_id: int, promised: Mapping[int, int], ranks: int) -> int:
        """The same of one pool, which has the objects of so many ranks."""
        own, largest = self._slots[group_id], max(self._slots.values())
        taken = dict.fromkeys(self._slots.values(), 0)
        # What is pinned may be of any group.
        taken[largest] = pool.stats()["pinned"]
        for each, blocks in promised.items():
            if each in self._slots:
                taken[self._slots[each]] += blocks * ranks
        slabs = pool.capacity_bytes // pool.slab_bytes
        # A slab has slots of one size.
        others = sum(
            -(-count // max(pool.slab_bytes // size, 1)) for size, count in taken.items() if size != own
        )
        return max((slabs - others) * (pool.slab_bytes // own) - taken[own], 0) // ranks
