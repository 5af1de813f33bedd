"""A store around a store, which fails as stores do: it misses what is there, has no room, breaks for a
moment, leaves half an object in the range, finds objects of other sizes, tells lies about what exists, and
holds calls until a test lets them go. What it does follows from its seed.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from umbp.store.base import ClusterStore, Outcome, StoreTraits

DONE, MISS, LATER, BROKEN = Outcome.DONE, Outcome.MISS, Outcome.LATER, Outcome.BROKEN
DAMAGED = Outcome.DAMAGED

HELD_S = 60.0
"""A test that holds a call for longer has failed."""


@dataclass(frozen=True, slots=True)
class Faults:
    """How likely each is, for each object; 0 never, 1 always."""

    misses: float = 0.0
    """A get finds nothing."""
    halves: float = 0.0
    """A get that isn't done has written half the range."""
    laters: float = 0.0
    """A put, get or removal isn't possible now."""
    lost_puts: float = 0.0
    """A put is done, and nothing is there."""
    breaks: float = 0.0
    """A whole call finds the store broken, though what it should do may be done."""
    lies: float = 0.0
    """`exists` says the contrary."""
    damage: float = 0.0
    """A get is done, and a byte is wrong: what the contract rules out, and whoever reads must notice."""
    odd_sizes: float = 0.0
    """A get that is done says that it found another size, which the contract rules out."""


class FaultyStore:
    """See the module; the verbs are those of `ClusterStore`. Any thread may call."""

    def __init__(self, inner: ClusterStore, faults: Faults, seed: int = 0) -> None:
        self._inner = inner
        self._faults = faults
        self._random = Random(seed)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._held: set[str] = set()
        self._holding = 0
        self.told: Counter[str] = Counter()
        """The faults that there were, by name."""

    def hold(self, *verbs: str) -> None:
        """From now on calls of these verbs wait."""
        with self._lock:
            self._held |= set(verbs)

    def let_go(self) -> None:
        """Nobody waits any more."""
        with self._lock:
            self._held.clear()
            self._changed.notify_all()

    def wait_held(self, count: int = 1) -> None:
        """Return when so many calls, at least, wait."""
        with self._lock:
            if not self._changed.wait_for(lambda: self._holding >= count, HELD_S):
                raise AssertionError(f"{self._holding} calls wait, not {count}")

    @property
    def traits(self) -> StoreTraits:
        return self._inner.traits

    def open(self) -> None:
        self._enter("open")
        self._inner.open()

    def register(self, address: int, size: int) -> None:
        self._enter("register")
        self._inner.register(address, size)

    def unregister(self, address: int, size: int) -> None:
        self._enter("unregister")
        self._inner.unregister(address, size)

    def exists(self, keys: Sequence[str]) -> Sequence[Outcome]:
        self._enter("exists")
        outcomes = list(self._inner.exists(keys))
        if keys and self._happens("breaks"):
            return [BROKEN] * len(keys)
        for place, outcome in enumerate(outcomes):
            if outcome is not BROKEN and self._happens("lies"):
                outcomes[place] = MISS if outcome is DONE else DONE
        return outcomes

    def put(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> Sequence[Outcome]:
        self._enter("put")
        outcomes = [LATER if self._happens("laters") else None for _ in keys]
        lost = [outcome is None and self._happens("lost_puts") for outcome in outcomes]
        chosen = [place for place, outcome in enumerate(outcomes) if outcome is None and not lost[place]]
        done = self._inner.put(
            [keys[place] for place in chosen],
            [addresses[place] for place in chosen],
            [sizes[place] for place in chosen],
        )
        if keys and self._happens("breaks"):
            return [BROKEN] * len(keys)
        found = dict(zip(chosen, done, strict=True))
        if found and BROKEN in found.values():
            return [BROKEN] * len(keys)
        return [found.get(place, outcome or DONE) for place, outcome in enumerate(outcomes)]

    def get(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> Sequence[Outcome]:
        self._enter("get")
        outcomes = list(self._inner.get(keys, addresses, sizes))
        if BROKEN in outcomes:
            return outcomes
        if keys and self._happens("breaks"):
            return [BROKEN] * len(keys)
        for place, (address, size) in enumerate(zip(addresses, sizes, strict=True)):
            if self._happens("misses"):
                outcomes[place] = MISS
            elif self._happens("laters"):
                outcomes[place] = LATER
            elif outcomes[place] is DONE and self._happens("odd_sizes"):
                outcomes[place] = DAMAGED
            if outcomes[place] is not DONE and self._happens("halves"):
                ctypes.memset(address, 0x5A, size // 2)
            if outcomes[place] is DONE and self._happens("damage"):
                byte = ctypes.c_ubyte.from_address(address + self._below(size))
                byte.value ^= 0xFF
        return outcomes

    def remove(self, keys: Sequence[str]) -> Sequence[Outcome]:
        self._enter("remove")
        outcomes = list(self._inner.remove(keys))
        if keys and self._happens("breaks"):
            return [BROKEN] * len(keys)
        return [LATER if each is DONE and self._happens("laters") else each for each in outcomes]

    def remove_prefix(self, prefix: str) -> Outcome:
        self._enter("remove_prefix")
        outcome = self._inner.remove_prefix(prefix)
        if self._happens("breaks"):
            return BROKEN
        return LATER if outcome is DONE and self._happens("laters") else outcome

    def probe(self) -> bool:
        self._enter("probe")
        return self._inner.probe() and not self._happens("breaks")

    def describe(self) -> Mapping[str, str]:
        return self._inner.describe()

    def close(self) -> None:
        self._enter("close")
        self._inner.close()

    def _enter(self, verb: str) -> None:
        with self._lock:
            if verb not in self._held:
                return
            self._holding += 1
            self._changed.notify_all()
            has_ended = self._changed.wait_for(lambda: verb not in self._held, HELD_S)
            self._holding -= 1
        if not has_ended:
            raise AssertionError(f"a call of {verb} was never let go")

    def _happens(self, fault: str) -> bool:
        likely: float = getattr(self._faults, fault)
        with self._lock:
            happens = likely > 0 and self._random.random() < likely
            self.told[fault] += happens
        return happens

    def _below(self, size: int) -> int:
        with self._lock:
            return self._random.randrange(size)
