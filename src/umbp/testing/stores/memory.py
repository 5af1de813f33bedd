"""A cluster store in this process: a dictionary behind real addresses, which hangs, breaks and lies on
demand.

A `MemoryCluster` is what is shared and outlives connections; each `MemoryStore` is one connection to it. Any
thread may call either.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from umbp.store.base import Outcome, StoreError, StoreTraits

TRAITS = StoreTraits(
    name="memory",
    most_keys=4096,
    most_objects=256,
    most_bytes=64 << 20,
    lease_s=0.0,
    registers=True,
)

WAIT_S = 60.0
"""A test that waits longer for another thread has failed."""


@dataclass(frozen=True, slots=True)
class _Range:
    address: int
    size: int

    def holds(self, address: int, size: int) -> bool:
        return self.address <= address and address + size <= self.address + self.size


class MemoryCluster:
    """The objects, and what is wrong with the cluster at the moment."""

    def __init__(self, traits: StoreTraits = TRAITS, room_bytes: int = 1 << 30) -> None:
        self.traits = traits
        self.room_bytes = room_bytes
        self.objects: dict[str, bytes] = {}
        self.is_down = False
        """Nothing can be opened, every outcome is BROKEN, no probe goes well."""
        self.claimed: set[str] = set()
        """Said to exist, and never found."""
        self.stores: list[MemoryStore] = []
        """Every connection that was made."""
        self.misuses: list[str] = []
        """What callers did against the contract."""
        self._changed = threading.Condition()
        self._hanging_verbs: set[str] = set()
        self._hanging = 0
        self._periods: Counter[str] = Counter()

    def connect(self) -> MemoryStore:
        """One more connection, not opened yet."""
        store = MemoryStore(self)
        self.stores.append(store)
        return store

    def hang(self, *verbs: str) -> None:
        """From now on calls of these verbs (all, without any) go in and do not come out."""
        with self._changed:
            self._hanging_verbs |= set(verbs or VERBS)

    def go_on(self, *verbs: str) -> None:
        """Let out whoever hangs in these verbs (in any, without one), and nobody hangs there any more."""
        with self._changed:
            self._hanging_verbs -= set(verbs or VERBS)
            self._periods.update(verbs or VERBS)
            self._changed.notify_all()

    def wait_hanging(self, count: int) -> None:
        """Return when so many calls, at least, hang."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._hanging >= count, WAIT_S):
                raise AssertionError(f"{self._hanging} calls hang, not {count}")

    def damage(self, key: str) -> None:
        """Change a byte in the middle of an object."""
        value = bytearray(self.objects[key])
        value[len(value) // 2] ^= 0xFF
        self.objects[key] = bytes(value)

    def cut(self, key: str) -> None:
        """Leave the first half of an object, a byte at the least."""
        self.objects[key] = self.objects[key][: max(len(self.objects[key]) // 2, 1)]

    def pass_through(self, verb: str) -> None:
        """What each call does first: it hangs where it is to."""
        with self._changed:
            if verb not in self._hanging_verbs:
                return
            period = self._periods[verb]
            self._hanging += 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._periods[verb] != period)
            self._hanging -= 1


class MemoryStore:
    """One connection. The verbs are the contract's; `MemoryCluster.connect` makes it."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self.cluster = cluster
        self.is_open = False
        self.is_closed = False
        self.is_broken = False
        """This connection alone: as if the cluster were down, for ever."""
        self.refuses_memory = False
        self.calls: list[str] = []
        self._ranges: list[_Range] = []

    @property
    def traits(self) -> StoreTraits:
        return self.cluster.traits

    @property
    def registered(self) -> list[tuple[int, int]]:
        """Ranges, as they were told."""
        return [(each.address, each.size) for each in self._ranges]

    def open(self) -> None:
        self._enter("open")
        if self.is_open or self.is_closed:
            self.cluster.misuses.append("opened twice")
        if self._is_dead():
            raise StoreError("the memory cluster is down: let it come up")
        self.is_open = True

    def register(self, address: int, size: int) -> None:
        self._enter("register")
        if self._is_dead() or self.refuses_memory:
            raise StoreError("the memory cluster takes no memory")
        self._ranges.append(_Range(address, size))

    def unregister(self, address: int, size: int) -> None:
        self._enter("unregister")
        if self._is_dead():
            raise StoreError("the memory cluster does not answer")
        self._ranges = [each for each in self._ranges if each != _Range(address, size)]

    def exists(self, keys: Sequence[str]) -> list[Outcome]:
        self._enter("exists", keys=len(keys))
        if self._is_dead():
            return [Outcome.BROKEN] * len(keys)
        known, claimed = self.cluster.objects, self.cluster.claimed
        return [Outcome.DONE if key in known or key in claimed else Outcome.MISS for key in keys]

    def put(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[Outcome]:
        self._enter("put", sizes=sizes)
        return [self._put(*each) for each in zip(keys, addresses, sizes, strict=True)]

    def get(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[Outcome]:
        self._enter("get", sizes=sizes)
        return [self._get(*each) for each in zip(keys, addresses, sizes, strict=True)]

    def remove(self, keys: Sequence[str]) -> list[Outcome]:
        self._enter("remove", keys=len(keys))
        if self._is_dead():
            return [Outcome.BROKEN] * len(keys)
        for key in keys:
            self.cluster.objects.pop(key, None)
        return [Outcome.DONE] * len(keys)

    def remove_prefix(self, prefix: str) -> Outcome:
        self._enter("remove_prefix")
        if self._is_dead():
            return Outcome.BROKEN
        for key in [key for key in list(self.cluster.objects) if key.startswith(prefix)]:
            self.cluster.objects.pop(key, None)
        return Outcome.DONE

    def probe(self) -> bool:
        self._enter("probe")
        return not self._is_dead()

    def describe(self) -> Mapping[str, str]:
        return {"store": "in this process's memory", "objects": str(len(self.cluster.objects))}

    def close(self) -> None:
        self._enter("close")
        self.is_closed = True

    def _is_dead(self) -> bool:
        return self.is_closed or self.is_broken or self.cluster.is_down

    def _enter(self, verb: str, keys: int = 0, sizes: Sequence[int] = ()) -> None:
        """Note the call and what is wrong with it, and hang where the cluster does."""
        self.calls.append(verb)
        misuses = self.cluster.misuses
        if verb not in ("open", "close") and not self.is_open:
            misuses.append(f"{verb} before open")
        if keys > self.traits.most_keys:
            misuses.append(f"{verb} of {keys} keys")
        if len(sizes) > self.traits.most_objects or (len(sizes) > 1 and sum(sizes) > self.traits.most_bytes):
            misuses.append(f"{verb} of {len(sizes)} objects of {sum(sizes)} bytes")
        self.cluster.pass_through(verb)

    def _may_touch(self, verb: str, address: int, size: int) -> bool:
        if not self.traits.registers or any(each.holds(address, size) for each in self._ranges):
            return True
        self.cluster.misuses.append(f"{verb} at memory that nobody registered")
        return False

    def _put(self, key: str, address: int, size: int) -> Outcome:
        cluster = self.cluster
        if self._is_dead() or not self._may_touch("put", address, size):
            return Outcome.BROKEN
        if key not in cluster.objects:
            if sum(map(len, list(cluster.objects.values()))) + size > cluster.room_bytes:
                return Outcome.LATER
            cluster.objects.setdefault(key, ctypes.string_at(address, size))
        return Outcome.DONE

    def _get(self, key: str, address: int, size: int) -> Outcome:
        if self._is_dead() or not self._may_touch("get", address, size):
            return Outcome.BROKEN
        value = self.cluster.objects.get(key)
        if value is None:
            return Outcome.MISS
        if len(value) != size:
            return Outcome.DAMAGED
        ctypes.memmove(address, value, size)
        return Outcome.DONE


VERBS = (
    "open",
    "register",
    "unregister",
    "exists",
    "put",
    "get",
    "remove",
    "remove_prefix",
    "probe",
    "close",
)
