"""What becomes of bytes: they come back as they were, whole, and nowhere else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from umbp.store.base import Outcome
from umbp.testing.stores.rig import StoreRig
from umbp.testing.stores.rules.support import DAMAGED, DONE, MISS, StoreRules, pattern

SIZES = (1, 2, 63, 64, 4095, 4096, 4097, 65_536, 65_537, 300_001, 1 << 20)
ROUNDS = 8
COMING = 4
COMINGS = 20
LOOKS = 3
START_S = 60.0
"""A test whose other thread isn't there for longer has failed."""


class ContentRules(StoreRules):
    """Bytes."""

    def test_bytes_of_every_size_come_back_as_they_were_for_everyone(
        self, rig: StoreRig, other: StoreRig, name: str
    ) -> None:
        objects = {f"{name}{size}": pattern(size, size) for size in SIZES}
        self.expect(rig.put(objects), [DONE] * len(SIZES))
        self.expect(rig.fetch(objects), [DONE] * len(SIZES))
        self.expect(other.fetch(dict(reversed(objects.items()))), [DONE] * len(SIZES))

    @pytest.mark.parametrize("asked", [1, 999, 1001, 5000], ids="of {} bytes".format)
    def test_an_object_of_another_size_is_damaged(
        self, rig: StoreRig, other: StoreRig, name: str, asked: int
    ) -> None:
        rig.put({f"{name}odd": pattern(1, 1000), f"{name}right": pattern(2, 1000)})
        for each in (rig, other):
            outcomes, found = each.get({f"{name}odd": asked, f"{name}right": 1000})
            assert outcomes[0] is not DONE
            self.expect(outcomes, [DAMAGED, DONE])
            assert outcomes[1] is not DONE or found[1] == pattern(2, 1000)

    @pytest.mark.parametrize("found", [1, 999, 1001, 5000], ids="of {} bytes".format)
    def test_what_is_damaged_stands_in_the_way_until_it_is_removed(
        self, rig: StoreRig, other: StoreRig, name: str, found: int
    ) -> None:
        self.needs_certainty()
        value = {f"{name}odd": pattern(1, 1000)}
        rig.put({f"{name}odd": pattern(2, found)})
        for _ in range(2):
            assert other.put(value) == [DONE]
            assert other.fetch(value) == [DAMAGED]
        assert other.remove(list(value)) == [DONE]
        assert other.fetch(value) == [MISS]
        assert other.put(value) == [DONE]
        assert rig.fetch(value) == other.fetch(value) == [DONE]

    @pytest.mark.parametrize("size", [1000, 10, 2000])
    def test_what_is_there_keeps_its_bytes_and_putting_it_again_is_done(
        self, rig: StoreRig, other: StoreRig, name: str, size: int
    ) -> None:
        self.needs_certainty()
        objects = {f"{name}a": pattern(1, 1000), f"{name}b": pattern(2, 1000)}
        self.expect(rig.put(objects), [DONE] * 2)
        for each in (rig, other):
            self.expect(each.put({f"{name}a": pattern(9, size), f"{name}c": pattern(3, 10)}), [DONE] * 2)
            self.expect(each.fetch(objects), [DONE] * 2)

    def test_what_was_removed_can_be_put_anew(self, rig: StoreRig, other: StoreRig, name: str) -> None:
        for number in range(4):
            objects = {f"{name}a": pattern(number, 1000 + number)}
            put = rig.put(objects)
            self.expect(put, [DONE])
            if not self.may_fail:
                self.expect(other.fetch(objects), [DONE])
            self.expect(rig.remove([f"{name}a"]), [DONE])

    def test_what_comes_and_goes_is_never_damaged(self, rig: StoreRig, other: StoreRig, name: str) -> None:
        """One connection puts and removes; the other asks beside each change, for what is absent too."""
        objects = {f"{name}{number}": pattern(number, 1000) for number in range(COMING)}
        sizes = {key: 1000 for each in objects for key in (each, f"{each}absent")}
        changes = (lambda: rig.put(objects), lambda: rig.remove(list(objects)))
        start = threading.Barrier(2)

        def beside(act: Callable[[], object]) -> None:
            """Do it when the other one begins, or leave nobody waiting."""
            start.wait(START_S)
            try:
                act()
            except BaseException:
                start.abort()
                raise

        outcomes: set[Outcome] = set()

        def look() -> None:
            for _ in range(LOOKS):
                outcomes.update(other.get(sizes)[0])

        def ask() -> None:
            for _ in range(COMINGS * len(changes)):
                beside(look)

        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(ask)
            for _ in range(COMINGS):
                for change in changes:
                    beside(change)
            asking.result()
        assert DAMAGED not in outcomes

    def test_nobody_ever_reads_half_an_object(self, rig: StoreRig, other: StoreRig, name: str) -> None:
        """One connection puts large objects; the other asks for them meanwhile, and gets all or nothing."""
        objects = {f"{name}{number}": pattern(number, 2 << 20) for number in range(ROUNDS)}
        is_put = threading.Event()

        def ask() -> None:
            while not is_put.is_set():
                for key, value in objects.items():
                    assert other.fetch({key: value}) != [DAMAGED]

        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(ask)
            try:
                for key, value in objects.items():
                    rig.put({key: value})
            finally:
                is_put.set()
            asking.result()
        for key, value in objects.items():
            self.expect(other.fetch({key: value}), [DONE])
