"""What the rules share: an adapter's flags and fixture, and two connections that many tests use."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import ClassVar
from uuid import uuid4

import pytest

from umbp.store.base import ClusterStore, Outcome
from umbp.testing.stores.rig import GUARD_BYTES, StoreRig

_numbers = count()
_run = uuid4().hex[:12]

DONE, MISS, LATER, BROKEN = Outcome.DONE, Outcome.MISS, Outcome.LATER, Outcome.BROKEN
DAMAGED = Outcome.DAMAGED

SLACK_BYTES = 2 << 20


class StoreRules:
    """The flags that an adapter sets, and its fixture."""

    may_fail: ClassVar[bool] = False
    """Any object may fail for no reason, and `exists` may be wrong; bytes never are."""

    @pytest.fixture(scope="class")
    @classmethod
    def make_store(cls) -> Callable[[], ClusterStore]:
        raise NotImplementedError("give a fixture `make_store`")

    @pytest.fixture(scope="class")
    @classmethod
    def rigs(cls, make_store: Callable[[], ClusterStore]) -> Iterator[list[StoreRig]]:
        """Two open connections, for all tests of the class."""
        made = [open_rig(make_store()) for _ in range(2)]
        yield made
        made[0].store.remove_prefix(f"contract:{_run}:")
        for each in made:
            each.store.close()

    @pytest.fixture
    def rig(self, rigs: list[StoreRig]) -> StoreRig:
        return rigs[0]

    @pytest.fixture
    def other(self, rigs: list[StoreRig]) -> StoreRig:
        """Another connection to the same store."""
        return rigs[1]

    @pytest.fixture
    def name(self, rig: StoreRig) -> Iterator[str]:
        """What the keys of this test begin with."""
        prefix = f"contract:{_run}:{next(_numbers)}:"
        yield prefix
        rig.store.remove_prefix(prefix)

    def expect(self, outcomes: Sequence[Outcome], wanted: Sequence[Outcome]) -> None:
        """The outcomes, where the adapter can't fail for no reason."""
        assert len(outcomes) == len(wanted)
        assert self.may_fail or list(outcomes) == list(wanted)

    def needs_certainty(self) -> None:
        if self.may_fail:
            pytest.skip("the store may fail for no reason")


def open_rig(store: ClusterStore) -> StoreRig:
    """Memory for one largest batch and what lies around its ranges."""
    traits = store.traits
    return StoreRig(store, traits.most_bytes + traits.most_objects * 2 * GUARD_BYTES + SLACK_BYTES)


def pattern(seed: int, size: int) -> bytes:
    """Bytes that differ from those of every other seed, from place to place."""
    unit = b"".join(
        ((seed * 2654435761 + place * 40503) & 0xFFFFFFFF).to_bytes(4, "little") for place in range(64)
    )
    return (unit * (size // len(unit) + 1))[:size]
