"""Stores that each break one sentence of the contract, for `test_suite_catches`."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from umbp.store.base import ClusterStore, Outcome, StoreError, StoreTraits
from umbp.testing.stores.contract import StoreContract
from umbp.testing.stores.memory import TRAITS, MemoryCluster, MemoryStore

DONE, MISS, LATER, BROKEN = Outcome.DONE, Outcome.MISS, Outcome.LATER, Outcome.BROKEN
DAMAGED = Outcome.DAMAGED


class Broken(StoreContract):
    """The store in memory, whose connections are of another class."""

    __test__ = False
    Store: type[MemoryStore] = MemoryStore
    traits: StoreTraits = replace(TRAITS, most_bytes=1 << 20, most_keys=256, most_objects=32)

    def __init_subclass__(cls) -> None:
        cls.__test__ = True

    @pytest.fixture(scope="class")
    @classmethod
    def make_store(cls) -> Callable[[], ClusterStore]:
        cluster = MemoryCluster(cls.traits)
        return lambda: cls.Store(cluster)

    @pytest.fixture
    def make_unreachable(self) -> Callable[[], ClusterStore]:
        cluster = MemoryCluster(self.traits)
        cluster.is_down = True
        return lambda: type(self).Store(cluster)


class TestAnswersInReverse(Broken):
    class Store(MemoryStore):
        def exists(self, keys: Sequence[str]) -> list[Outcome]:
            return super().exists(keys)[::-1]


class TestAnswersTooFew(Broken):
    class Store(MemoryStore):
        def remove(self, keys: Sequence[str]) -> list[Outcome]:
            return super().remove(keys)[:1]


class TestAnswersInNumbers(Broken):
    class Store(MemoryStore):
        def exists(self, keys: Sequence[str]) -> list[Outcome]:
            return [each is DONE for each in super().exists(keys)]  # type: ignore[misc]


class TestMissesWhatOthersPut(Broken):
    class Store(MemoryStore):
        def get(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[Outcome]:
            outcomes = super().get(keys, addresses, sizes)
            return outcomes if self is self.cluster.__dict__.setdefault("first", self) else [MISS] * len(keys)


class TestOverwrites(Broken):
    class Store(MemoryStore):
        def _put(self, key: str, address: int, size: int) -> Outcome:
            if not self._is_dead():
                self.cluster.objects.pop(key, None)
            return super()._put(key, address, size)


class TestRefusesWhatIsThere(Broken):
    class Store(MemoryStore):
        def _put(self, key: str, address: int, size: int) -> Outcome:
            return (
                LATER
                if key in self.cluster.objects and not self._is_dead()
                else super()._put(key, address, size)
            )


class TestSpoilsWhatItStores(Broken):
    class Store(MemoryStore):
        def _put(self, key: str, address: int, size: int) -> Outcome:
            outcome = super()._put(key, address, size)
            ctypes.memset(address, 0, 1)
            return outcome


class TestCutsWhatIsTooLarge(Broken):
    class Store(MemoryStore):
        def _get(self, key: str, address: int, size: int) -> Outcome:
            value = self.cluster.objects.get(key, b"")
            if self._is_dead() or len(value) <= size:
                return super()._get(key, address, size)
            ctypes.memmove(address, value, size)
            return DONE


class TestWritesBeyondTheRange(Broken):
    class Store(MemoryStore):
        def _get(self, key: str, address: int, size: int) -> Outcome:
            value = self.cluster.objects.get(key, b"")
            if not self._is_dead() and len(value) > size:
                ctypes.memmove(address, value, len(value))
            return super()._get(key, address, size)


class TestFillsWhatIsTooSmall(Broken):
    class Store(MemoryStore):
        def _get(self, key: str, address: int, size: int) -> Outcome:
            value = self.cluster.objects.get(key)
            if self._is_dead() or value is None or len(value) >= size:
                return super()._get(key, address, size)
            ctypes.memmove(address, value, len(value))
            return DONE


class TestMissesWhatHasAnotherSize(Broken):
    class Store(MemoryStore):
        def get(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[Outcome]:
            return [MISS if each is DAMAGED else each for each in super().get(keys, addresses, sizes)]


class TestTakesForDamagedWhatGoesMeanwhile(Broken):
    class Store(MemoryStore):
        gone: set[str] = set()  # noqa: RUF012 # of all connections

        def remove(self, keys: Sequence[str]) -> list[Outcome]:
            self.gone.update(keys)
            return super().remove(keys)

        def _get(self, key: str, address: int, size: int) -> Outcome:
            outcome = super()._get(key, address, size)
            is_beside = threading.current_thread() is not threading.main_thread()
            return DAMAGED if outcome is MISS and is_beside and key in self.gone else outcome


class TestRemovesNothingThatHasAnotherSize(Broken):
    class Store(MemoryStore):
        odd: set[str] = set()  # noqa: RUF012 # of all connections

        def _get(self, key: str, address: int, size: int) -> Outcome:
            outcome = super()._get(key, address, size)
            self.odd.update({key} if outcome is DAMAGED else ())
            return outcome

        def remove(self, keys: Sequence[str]) -> list[Outcome]:
            outcomes = super().remove([key for key in keys if key not in self.odd])
            return outcomes[:1] * len(keys) or [BROKEN if self._is_dead() else DONE for _ in keys]


class TestGivesOtherBytes(Broken):
    class Store(MemoryStore):
        def _get(self, key: str, address: int, size: int) -> Outcome:
            outcome = super()._get(key, address, size)
            if size > 1000:
                ctypes.memset(address + size - 1, 0, 1)
            return outcome


class TestKeepsWhatItRemoved(Broken):
    class Store(MemoryStore):
        def remove(self, keys: Sequence[str]) -> list[Outcome]:
            return [BROKEN if self._is_dead() else DONE for _ in keys]


class TestMissesWhatItRemoves(Broken):
    class Store(MemoryStore):
        def remove(self, keys: Sequence[str]) -> list[Outcome]:
            there = [DONE if key in self.cluster.objects else MISS for key in keys]
            return super().remove(keys) if self._is_dead() else (super().remove(keys), there)[1]


class TestTakesAPrefixForAPattern(Broken):
    class Store(MemoryStore):
        def remove_prefix(self, prefix: str) -> Outcome:
            return super().remove_prefix(prefix.partition("*")[0])


class TestRemovesWhatHasThePrefixInside(Broken):
    class Store(MemoryStore):
        def remove_prefix(self, prefix: str) -> Outcome:
            if not self._is_dead():
                self.remove([key for key in list(self.cluster.objects) if prefix in key])
            return super().remove_prefix(prefix)


class TestAnswersAfterClosing(Broken):
    class Store(MemoryStore):
        def _is_dead(self) -> bool:
            return self.is_broken or self.cluster.is_down


class TestTakesTheOthersAlong(Broken):
    class Store(MemoryStore):
        def close(self) -> None:
            self.cluster.objects.clear()
            super().close()


class TestRaisesWhenClosedTwice(Broken):
    class Store(MemoryStore):
        def close(self) -> None:
            if self.is_closed:
                raise StoreError("closed already")
            super().close()


class TestRaisesWhenItIsClosed(Broken):
    class Store(MemoryStore):
        def exists(self, keys: Sequence[str]) -> list[Outcome]:
            if self.is_closed:
                raise StoreError("closed")
            return super().exists(keys)


class TestOpensNothing(Broken):
    class Store(MemoryStore):
        def open(self) -> None:
            self.is_open = True


class TestProbesFromMemory(Broken):
    class Store(MemoryStore):
        def probe(self) -> bool:
            return True


class TestTakesLessThanItSays(Broken):
    class Store(MemoryStore):
        def put(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[Outcome]:
            outcomes = super().put(keys, addresses, sizes)
            return outcomes[:8] + [each if each is BROKEN else LATER for each in outcomes[8:]]


class TestShowsHalfAnObject(Broken):
    class Store(MemoryStore):
        was_asked = threading.Event()

        def get(self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[Outcome]:
            outcomes = super().get(keys, addresses, sizes)
            self.was_asked.set()
            return outcomes

        def _put(self, key: str, address: int, size: int) -> Outcome:
            if self._is_dead() or key in self.cluster.objects or size != 2 << 20:
                return super()._put(key, address, size)
            self.cluster.objects[key] = ctypes.string_at(address, size // 2) + bytes(size - size // 2)
            for _ in range(20):  # the reader goes round all keys
                self.was_asked.clear()
                if not self.was_asked.wait(0.2):
                    break
            self.cluster.objects[key] = ctypes.string_at(address, size)
            return DONE
