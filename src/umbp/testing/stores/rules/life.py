"""Opening and closing: what is left afterwards, and for whom."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from umbp.store.base import ClusterStore, Outcome, StoreError
from umbp.testing.stores.rig import StoreRig
from umbp.testing.stores.rules.support import BROKEN, DONE, StoreRules, open_rig, pattern


class LifeRules(StoreRules):
    """Connections come and go."""

    @pytest.fixture
    def make_unreachable(self) -> Callable[[], ClusterStore]:
        """Makes connections to a store that isn't there."""
        pytest.skip("the test class has no fixture `make_unreachable`")

    def test_a_store_that_is_not_there_is_one_sentence(
        self, make_unreachable: Callable[[], ClusterStore]
    ) -> None:
        store = make_unreachable()
        with pytest.raises(StoreError) as caught:
            store.open()
        assert str(caught.value)
        assert "\n" not in str(caught.value)
        assert not store.probe()
        assert list(store.exists(["a"])) == [BROKEN]
        store.close()

    def test_after_closing_everything_is_broken_and_nothing_raises(
        self, make_store: Callable[[], ClusterStore], rig: StoreRig, name: str
    ) -> None:
        mine = open_rig(make_store())
        objects = {f"{name}a": pattern(1, 100), f"{name}b": pattern(2, 100)}
        self.expect(mine.put(objects), [DONE] * 2)
        mine.store.close()
        mine.store.close()
        assert mine.exists(list(objects)) == [BROKEN] * 2
        assert mine.put(objects) == [BROKEN] * 2
        assert mine.fetch(objects) == [BROKEN] * 2
        assert mine.remove(list(objects)) == [BROKEN] * 2
        assert mine.store.remove_prefix(name) is BROKEN
        assert not mine.store.probe()
        mine.store.describe()
        assert list(mine.store.exists([])) == []
        self.expect(rig.fetch(objects), [DONE] * 2)

    def test_a_store_that_was_never_opened_can_be_closed(
        self, make_store: Callable[[], ClusterStore]
    ) -> None:
        store = make_store()
        store.close()
        assert not store.probe()

    def test_closing_while_others_are_inside_costs_them_no_more_than_an_outcome(
        self, make_store: Callable[[], ClusterStore], name: str
    ) -> None:
        mine = open_rig(make_store())
        objects = {f"{name}{number}": pattern(number, 100_000) for number in range(4)}
        is_inside, is_closed = threading.Event(), threading.Event()

        def call() -> list[Outcome]:
            """The outcomes of a round that began when the store was closed."""
            while True:
                is_last = is_closed.is_set()
                try:
                    outcomes = mine.put(objects) + mine.fetch(objects) + mine.exists(list(objects))
                finally:
                    is_inside.set()
                if is_last:
                    return outcomes

        with ThreadPoolExecutor(1) as pool:
            calling = pool.submit(call)
            is_inside.wait()
            mine.store.close()
            is_closed.set()
            assert set(calling.result()) == {BROKEN}
