"""The bounds that a store states: callers keep to them, and up to them everything works."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from umbp.store.base import ClusterStore, Outcome
from umbp.testing.stores.rig import StoreRig
from umbp.testing.stores.rules.support import DONE, MISS, SLACK_BYTES, StoreRules, open_rig, pattern

THREADS = 4
ROUNDS = 3


class BoundsRules(StoreRules):
    """Bounds, and many at once."""

    def test_as_many_keys_as_are_allowed_are_asked_and_removed_in_one_call(
        self, rig: StoreRig, name: str
    ) -> None:
        keys = [f"{name}{number}" for number in range(rig.store.traits.most_keys)]
        rig.put({key: pattern(1, 100) for key in (keys[0], keys[-1])})
        self.expect(rig.exists(keys), [DONE] + [MISS] * (len(keys) - 2) + [DONE] if len(keys) > 1 else [DONE])
        self.expect(rig.remove(keys), [DONE] * len(keys))

    @pytest.mark.parametrize("size", [1000, 16_384])
    def test_as_many_objects_as_are_allowed_go_and_come_in_one_call(
        self, rig: StoreRig, other: StoreRig, name: str, size: int
    ) -> None:
        traits = rig.store.traits
        number = max(min(traits.most_objects, traits.most_bytes // size), 1)
        objects = {f"{name}{each}": pattern(each, size) for each in range(number)}
        self.expect(rig.put(objects), [DONE] * number)
        self.expect(other.fetch(objects), [DONE] * number)

    def test_as_many_bytes_as_are_allowed_go_and_come_in_one_call(
        self, rig: StoreRig, other: StoreRig, name: str
    ) -> None:
        traits = rig.store.traits
        number = min(traits.most_objects, 8)
        objects = {f"{name}{each}": pattern(each, traits.most_bytes // number) for each in range(number)}
        self.expect(rig.put(objects), [DONE] * number)
        self.expect(other.fetch(objects), [DONE] * number)

    def test_one_object_may_be_larger_than_a_batch(self, rig: StoreRig, other: StoreRig, name: str) -> None:
        value = {f"{name}large": pattern(1, rig.store.traits.most_bytes + SLACK_BYTES // 2)}
        self.expect(rig.put(value), [DONE])
        self.expect(other.fetch(value), [DONE])

    def test_threads_put_and_get_and_ask_side_by_side(self, rig: StoreRig, name: str) -> None:
        """Largest batches of small objects, from several threads on one connection."""
        number = rig.store.traits.most_objects

        def work(part: int) -> set[Outcome]:
            mine = _part_of(rig, part)
            outcomes: set[Outcome] = set()
            for each in range(ROUNDS):
                objects = {f"{name}{part}:{each}:{place}": pattern(place, 512) for place in range(number)}
                outcomes.update(mine.put(objects), mine.exists(list(objects)), mine.fetch(objects))
                outcomes.update(mine.remove(list(objects)))
            return outcomes

        with ThreadPoolExecutor(THREADS) as pool:
            outcomes = set().union(*pool.map(work, range(THREADS)))
        assert self.may_fail or outcomes == {DONE}

    def test_memory_that_was_unregistered_can_come_again(
        self, make_store: Callable[[], ClusterStore], name: str
    ) -> None:
        store = make_store()
        rig = open_rig(store)
        try:
            for each in ("first", "again"):
                self.expect(rig.put({f"{name}{each}": pattern(1, 5000)}), [DONE])
                store.unregister(rig.address, rig.memory_bytes)
                store.unregister(rig.address, rig.memory_bytes)
                store.register(rig.address, rig.memory_bytes)
                self.expect(rig.fetch({f"{name}{each}": pattern(1, 5000)}), [DONE])
        finally:
            store.close()

    def test_several_pieces_of_memory_can_be_registered(
        self, make_store: Callable[[], ClusterStore], name: str
    ) -> None:
        store = make_store()
        first = open_rig(store)
        second = StoreRig(_AlreadyOpen(store), SLACK_BYTES)  # type: ignore[arg-type]
        try:
            self.expect(first.put({f"{name}1": pattern(1, 5000)}), [DONE])
            self.expect(second.fetch({f"{name}1": pattern(1, 5000)}), [DONE])
            self.expect(second.put({f"{name}2": pattern(2, 5000)}), [DONE])
            self.expect(first.fetch({f"{name}2": pattern(2, 5000)}), [DONE])
        finally:
            store.close()


class _AlreadyOpen:
    """The store, for one more rig on it."""

    def __init__(self, store: ClusterStore) -> None:
        self._store = store

    def open(self) -> None:
        """It is."""

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


def _part_of(rig: StoreRig, part: int) -> StoreRig:
    """A rig on the same store, with a part of the memory to itself."""
    mine = object.__new__(StoreRig)
    mine.store = rig.store
    mine.memory_bytes = rig.memory_bytes // THREADS
    mine.address = rig.address + part * mine.memory_bytes
    return mine
