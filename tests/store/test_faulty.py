"""The faulty store does what its faults say, the same for the same seed, and no more."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields

import pytest

from umbp.store.base import Outcome
from umbp.testing.stores.faulty import Faults, FaultyStore
from umbp.testing.stores.memory import MemoryCluster
from umbp.testing.stores.rig import GUARD, StoreRig

DONE, MISS, LATER, BROKEN = Outcome.DONE, Outcome.MISS, Outcome.LATER, Outcome.BROKEN
DAMAGED = Outcome.DAMAGED
OBJECTS = {f"k{number}": bytes([number]) * 100 for number in range(20)}


def rig_of(
    faults: Faults, seed: int = 0, cluster: MemoryCluster | None = None
) -> tuple[StoreRig, FaultyStore]:
    store = FaultyStore((cluster or MemoryCluster()).connect(), faults, seed)
    return StoreRig(store, 1 << 16), store


def filled() -> MemoryCluster:
    cluster = MemoryCluster()
    cluster.objects.update(OBJECTS)
    return cluster


def a_life(seed: int) -> list[list[Outcome]]:
    rig, _ = rig_of(Faults(0.2, 0.5, 0.2, 0.2, 0.1, 0.2), seed)
    return [
        outcomes
        for _ in range(5)
        for outcomes in (
            rig.put(OBJECTS),
            rig.exists(list(OBJECTS)),
            rig.fetch(OBJECTS),
            rig.remove(["k1", "k2"]),
        )
    ]


def test_the_same_seed_is_the_same_life_and_another_is_another() -> None:
    assert a_life(3) == a_life(3)
    assert a_life(3) != a_life(4)


def test_without_faults_it_is_the_store_itself() -> None:
    rig, store = rig_of(Faults())
    assert rig.put(OBJECTS) == rig.exists(list(OBJECTS)) == rig.fetch(OBJECTS) == [DONE] * 20
    assert rig.remove(list(OBJECTS)) == [DONE] * 20
    assert store.probe()
    assert not +store.told


@pytest.mark.parametrize("fault", [each.name for each in fields(Faults)])
def test_a_fault_that_is_certain_is_told(fault: str) -> None:
    rig, store = rig_of(Faults(**{fault: 1.0}), cluster=filled())
    keys = list(OBJECTS)
    rig.put({"new": b"value"})
    rig.exists(keys)
    rig.get({"k1": 100, "absent": 10})
    assert store.told[fault]


def test_what_is_missed_leaves_the_range_or_half_of_it() -> None:
    rig, _ = rig_of(Faults(misses=1.0), cluster=filled())
    assert rig.get({"k1": 100})[0] == [MISS]
    rig, _ = rig_of(Faults(halves=1.0), cluster=filled())
    outcomes, (value,) = rig.get({"absent": 100})
    assert outcomes == [MISS]
    assert value == b"\x5a" * 50 + bytes([GUARD]) * 50


def test_a_lost_put_is_done_and_nothing_is_there() -> None:
    rig, _ = rig_of(Faults(lost_puts=1.0))
    assert rig.put({"a": b"value"}) == [DONE]
    assert rig.exists(["a"]) == [MISS]


def test_lies_are_told_both_ways_and_never_of_a_broken_store() -> None:
    cluster = filled()
    rig, _ = rig_of(Faults(lies=1.0), cluster=cluster)
    assert rig.exists(["k1", "absent"]) == [MISS, DONE]
    cluster.is_down = True
    assert rig.exists(["k1", "absent"]) == [BROKEN] * 2


def test_damage_is_one_byte_of_what_was_fetched() -> None:
    rig, _ = rig_of(Faults(damage=1.0), cluster=filled())
    outcomes, (value,) = rig.get({"k1": 100})
    assert outcomes == [DONE]
    assert sum(a != b for a, b in zip(value, OBJECTS["k1"], strict=True)) == 1


def test_an_odd_size_is_told_of_what_was_fetched_and_of_nothing_absent() -> None:
    rig, _ = rig_of(Faults(odd_sizes=1.0), cluster=filled())
    assert rig.get({"k1": 100, "absent": 100})[0] == [DAMAGED, MISS]


def test_a_held_verb_waits_and_the_others_do_not() -> None:
    rig, store = rig_of(Faults(), cluster=filled())
    store.hold("exists")
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(rig.exists, ["k1"])
        store.wait_held()
        assert store.probe()
        assert rig.fetch({"k1": OBJECTS["k1"]}) == [DONE]
        assert not asking.done()
        store.let_go()
        assert asking.result() == [DONE]
