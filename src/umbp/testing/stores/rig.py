"""A connection with memory of its own, for tests: objects go out and come back as bytes, and whatever is
written beside a range is noticed.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, Sequence
from itertools import accumulate

from umbp.store.base import ClusterStore, Outcome, StoreError

GUARD_BYTES = 64
GUARD = 0xA5
"""What lies between the ranges, and what they hold before anything is fetched."""


class StoreRig:
    """An open store and its registered memory, of one thread at a time."""

    def __init__(self, store: ClusterStore, memory_bytes: int) -> None:
        self.store = store
        self.memory_bytes = memory_bytes
        self._map = mmap.mmap(-1, memory_bytes)
        self._bytes = (ctypes.c_ubyte * memory_bytes).from_buffer(self._map)
        self.address = ctypes.addressof(self._bytes)
        store.open()
        store.register(self.address, memory_bytes)

    def is_well(self) -> bool:
        """What its probe says; where that says why not, it does so in a sentence."""
        try:
            return self.store.probe()
        except StoreError as error:
            assert str(error)
            assert "\n" not in str(error)
            return False

    def put(self, objects: Mapping[str, bytes]) -> list[Outcome]:
        """Store all in one call; the memory is the same afterwards."""
        addresses = self._lay_out([len(value) for value in objects.values()])
        for address, value in zip(addresses, objects.values(), strict=True):
            ctypes.memmove(address, value, len(value))
        outcomes = self.store.put(list(objects), addresses, [len(value) for value in objects.values()])
        for address, value in zip(addresses, objects.values(), strict=True):
            assert ctypes.string_at(address, len(value)) == value, "a put changed the memory that it read"
        return checked(outcomes, len(objects))

    def get(self, sizes: Mapping[str, int]) -> tuple[list[Outcome], list[bytes]]:
        """Fetch all in one call: the outcomes, and what is in the ranges."""
        addresses = self._lay_out(list(sizes.values()))
        outcomes = self.store.get(list(sizes), addresses, list(sizes.values()))
        found = [ctypes.string_at(*each) for each in zip(addresses, sizes.values(), strict=True)]
        for address, size in zip(addresses, sizes.values(), strict=True):
            beside = ctypes.string_at(address + size, GUARD_BYTES)
            assert beside == bytes([GUARD]) * GUARD_BYTES, "a get wrote beyond its range"
            assert ctypes.string_at(address - GUARD_BYTES, GUARD_BYTES) == beside, (
                "a get wrote before its range"
            )
        return checked(outcomes, len(sizes)), found

    def fetch(self, objects: Mapping[str, bytes]) -> list[Outcome]:
        """Fetch all in one call, and hold what is there against what it should be."""
        outcomes, found = self.get({key: len(value) for key, value in objects.items()})
        for outcome, value, expected in zip(outcomes, found, objects.values(), strict=True):
            assert outcome is not Outcome.DONE or value == expected, "a get gave other bytes"
        return outcomes

    def exists(self, keys: Sequence[str]) -> list[Outcome]:
        return checked(self.store.exists(keys), len(keys))

    def remove(self, keys: Sequence[str]) -> list[Outcome]:
        return checked(self.store.remove(keys), len(keys))

    def _lay_out(self, sizes: Sequence[int]) -> list[int]:
        """Ranges with guards around each."""
        ends = list(accumulate(size + GUARD_BYTES for size in sizes))
        total = GUARD_BYTES + (ends[-1] if ends else 0)
        assert total <= self.memory_bytes, "the rig is too small"
        ctypes.memset(self.address, GUARD, total)
        return [self.address + end - size for end, size in zip(ends, sizes, strict=True)]


def checked(outcomes: Sequence[Outcome], count: int) -> list[Outcome]:
    """As many outcomes as there were objects."""
    assert len(outcomes) == count
    assert all(isinstance(each, Outcome) for each in outcomes)
    return list(outcomes)
