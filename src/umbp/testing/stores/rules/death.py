"""A store that dies and comes back: outcomes while it is dead, and what works again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import ClassVar, Protocol

import pytest

from umbp.store.base import ClusterStore, Outcome, StoreError
from umbp.testing.stores.rig import StoreRig
from umbp.testing.stores.rules.support import BROKEN, DONE, LATER, MISS, open_rig, pattern


class MortalStore(Protocol):
    """A store of the test's own, which can be killed and started again, empty, in its old place."""

    def connect(self) -> ClusterStore: ...

    def kill(self) -> None: ...

    def revive(self) -> None: ...


class StoreDeathContract:
    """A fixture `mortal` gives a `MortalStore`; each of these tests takes seconds where the store does."""

    patience_s: ClassVar[float] = 60.0
    """So long a store that came back may take to work again."""

    @pytest.fixture
    def mortal(self) -> MortalStore:
        raise NotImplementedError("give a fixture `mortal`")

    @pytest.fixture
    def rig(self, mortal: MortalStore) -> Iterator[StoreRig]:
        rig = open_rig(mortal.connect())
        yield rig
        rig.store.close()

    def test_dead_it_is_no_more_than_outcomes_and_alive_again_it_works(
        self, mortal: MortalStore, rig: StoreRig
    ) -> None:
        objects = {f"mortal:{number}": pattern(number, 1000) for number in range(3)}
        assert rig.put(objects) == [DONE] * 3
        mortal.kill()
        assert not rig.is_well()
        assert set(rig.exists(list(objects))) == {BROKEN}
        assert not {DONE, MISS} & set(rig.put({"mortal:new": pattern(9, 100)}))
        assert DONE not in rig.fetch(objects)
        assert DONE not in rig.remove(list(objects))
        assert rig.store.remove_prefix("mortal:") is BROKEN
        rig.store.describe()
        unlucky = mortal.connect()
        with pytest.raises(StoreError):
            unlucky.open()
        unlucky.close()
        mortal.revive()
        again = rig if rig.store.traits.recovers else open_rig(mortal.connect())
        self.wait_for(again.is_well)
        assert set(again.exists(list(objects))) <= {MISS, DONE}
        self.wait_for(lambda: again.put(objects) == [DONE] * 3)
        assert again.fetch(objects) == [DONE] * 3

    def test_nothing_is_wrong_however_soon_it_comes_back(self, mortal: MortalStore, rig: StoreRig) -> None:
        old = {f"mortal:{number}": pattern(number, 1000) for number in range(3)}
        assert rig.put(old) == [DONE] * 3
        mortal.kill()
        mortal.revive()
        new = {key: pattern(7, 1000) for key in old}
        outcomes: list[Outcome] = rig.put(new)
        if rig.store.traits.recovers:
            self.wait_for(lambda: rig.put(new) == [DONE] * 3)
            assert set(rig.fetch(new)) <= {DONE, MISS, LATER}
        else:
            assert set(outcomes) <= {DONE, BROKEN, LATER}

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        """Ask until it is so."""
        until_s = time.monotonic() + self.patience_s
        while not is_so():
            assert time.monotonic() < until_s, "the store didn't come back"
