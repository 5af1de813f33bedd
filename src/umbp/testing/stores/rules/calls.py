"""What the verbs answer: in order, for each object, and how many."""

from __future__ import annotations

import pytest

from umbp.store.base import ClusterStore, StoreTraits
from umbp.testing.stores.rig import StoreRig
from umbp.testing.stores.rules.support import DONE, MISS, StoreRules, pattern

ODD_PREFIXES = (
    "a.b",
    "a*b",
    "a?b",
    "a[b]c",
    "a]b",
    "a^b",
    "a$b",
    "a|b",
    "a+b",
    "a(b)c",
    "a{2}b",
    "a\\b",
    "a b",
    "a/b",
)


class CallsRules(StoreRules):
    """Answers."""

    def test_a_store_has_the_verbs_and_states_what_it_is_like(self, rig: StoreRig) -> None:
        traits = rig.store.traits
        assert isinstance(rig.store, ClusterStore)
        assert isinstance(traits, StoreTraits)
        assert traits == rig.store.traits
        assert traits.name
        assert min(traits.most_keys, traits.most_objects, traits.most_bytes) >= 1
        assert traits.lease_s >= 0

    def test_no_objects_are_no_work(self, rig: StoreRig) -> None:
        store = rig.store
        answers = [store.exists([]), store.put([], [], []), store.get([], [], []), store.remove([])]
        assert [list(each) for each in answers] == [[]] * 4

    def test_what_is_there_exists_for_everyone_in_the_order_of_the_question(
        self, rig: StoreRig, other: StoreRig, name: str
    ) -> None:
        there = {f"{name}{number}": pattern(number, 100) for number in range(6)}
        self.expect(rig.put(there), [DONE] * 6)
        absent = [f"{name}absent{number}" for number in range(6)]
        mixed = [key for pair in zip(absent, there, strict=True) for key in pair]
        for each in (rig, other):
            self.expect(each.exists(mixed), [MISS, DONE] * 6)
            self.expect(each.exists(mixed[::-1]), [DONE, MISS] * 6)

    def test_what_is_absent_is_a_miss_beside_what_is_there(self, rig: StoreRig, name: str) -> None:
        there = {f"{name}1": pattern(1, 100), f"{name}3": pattern(3, 50)}
        self.expect(rig.put(there), [DONE] * 2)
        outcomes, found = rig.get({f"{name}0": 100, f"{name}1": 100, f"{name}2": 70, f"{name}3": 50})
        self.expect(outcomes, [MISS, DONE, MISS, DONE])
        assert outcomes[1] is not DONE or found[1] == there[f"{name}1"]
        assert outcomes[3] is not DONE or found[3] == there[f"{name}3"]

    def test_removing_is_done_for_what_is_there_and_what_is_not(
        self, rig: StoreRig, other: StoreRig, name: str
    ) -> None:
        objects = {f"{name}{number}": pattern(number, 100) for number in range(4)}
        rig.put(objects)
        keys = [f"{name}0", f"{name}absent", f"{name}2"]
        outcomes = other.remove(keys)
        self.expect(outcomes, [DONE] * 3)
        self.expect(rig.exists(list(objects)), [MISS, DONE, MISS, DONE])
        fetched = dict(zip(objects, rig.fetch(objects), strict=True))
        assert not [
            key for key, outcome in zip(keys, outcomes, strict=True) if outcome is fetched.get(key) is DONE
        ]

    def test_what_was_just_found_and_fetched_can_be_removed(
        self, rig: StoreRig, other: StoreRig, name: str
    ) -> None:
        objects = {f"{name}{number}": pattern(number, 100) for number in range(4)}
        rig.put(objects)
        rig.exists(list(objects))
        other.fetch(objects)
        self.expect(rig.remove(list(objects)), [DONE] * 4)
        self.expect(other.exists(list(objects)), [MISS] * 4)

    def test_a_prefix_is_removed_and_nothing_else(self, rig: StoreRig, other: StoreRig, name: str) -> None:
        inside = {f"{name}in:{number}": pattern(number, 100) for number in range(20)}
        outside = {
            f"{name}out:in:": pattern(50, 100),
            f"{name}in": pattern(51, 100),
            f"x{name}in:1": pattern(52, 100),
        }
        rig.put(inside)
        rig.put(outside)
        rig.exists(list(inside))
        outcome = other.store.remove_prefix(f"{name}in:")
        self.expect([outcome], [DONE])
        self.expect(rig.exists(list(inside)), [MISS] * 20)
        assert outcome is not DONE or DONE not in rig.fetch(inside)
        self.expect(rig.fetch(outside), [DONE] * 3)
        rig.remove(list(outside))

    def test_a_prefix_that_nothing_has_is_removed_too(self, rig: StoreRig, name: str) -> None:
        self.expect([rig.store.remove_prefix(f"{name}nothing")], [DONE])

    @pytest.mark.parametrize("odd", ODD_PREFIXES)
    def test_a_prefix_means_its_characters_whatever_they_are(
        self, rig: StoreRig, name: str, odd: str
    ) -> None:
        twins = {f"{name}{odd}1": pattern(1, 10), f"{name}aXb1": pattern(2, 10), f"{name}aab": pattern(3, 10)}
        self.expect(rig.put(twins), [DONE] * 3)
        self.expect(rig.fetch(twins), [DONE] * 3)
        self.expect([rig.store.remove_prefix(f"{name}{odd}")], [DONE])
        self.expect(rig.fetch(twins), [MISS, DONE, DONE])
        self.expect(rig.remove([f"{name}{odd}1"]), [DONE])

    def test_a_store_that_is_well_answers_its_probe(self, rig: StoreRig) -> None:
        assert rig.store.probe() or self.may_fail

    def test_a_description_is_words_by_name(self, rig: StoreRig) -> None:
        told = rig.store.describe()
        assert told
        assert all(isinstance(word, str) for pair in told.items() for word in pair)
