"""Any sequence of calls, held against a dictionary that shares no code with a store."""

from __future__ import annotations

from random import Random

import pytest

from umbp.store.base import Outcome
from umbp.testing.stores.rig import StoreRig
from umbp.testing.stores.rules.support import DONE, MISS, StoreRules, pattern

STEPS = 60
KEYS = 12


class ModelRules(StoreRules):
    """Random walks over two connections."""

    @pytest.mark.parametrize("seed", [1, 2])
    def test_any_sequence_of_calls_does_what_a_dictionary_would(
        self, rigs: list[StoreRig], name: str, seed: int
    ) -> None:
        random = Random(seed)
        known: dict[str, bytes] = {}
        keys = [f"{name}{'even' if number % 2 else 'odd'}:{number}" for number in range(KEYS)]
        for _ in range(STEPS):
            rig = random.choice(rigs)
            some = random.sample(keys, random.randint(1, 6))
            verb = random.choices(["put", "fetch", "exists", "remove", "prefix"], [6, 6, 3, 2, 1])[0]
            if verb == "put":
                # Which bytes there are depends on the key alone, as it does in a cache.
                objects = {key: pattern(keys.index(key), 100 + keys.index(key)) for key in some}
                self.expect(rig.put(objects), [DONE] * len(some))
                known |= objects
            elif verb == "fetch":
                whole = {key: pattern(keys.index(key), 100 + keys.index(key)) for key in some}
                self.hold(rig.fetch(whole), some, known)
            elif verb == "exists":
                self.hold(rig.exists(some), some, known, may_lie=self.may_fail)
            elif verb == "remove":
                outcomes = rig.remove(some)
                self.expect(outcomes, [DONE] * len(some))
                for key, outcome in zip(some, outcomes, strict=True):
                    if outcome is DONE:
                        known.pop(key, None)
            else:
                outcome = rig.store.remove_prefix(f"{name}even:")
                self.expect([outcome], [DONE])
                if outcome is DONE:
                    known = {key: value for key, value in known.items() if f"{name}odd:" in key}

    def hold(
        self, outcomes: list[Outcome], keys: list[str], known: dict[str, bytes], *, may_lie: bool = False
    ) -> None:
        self.expect(outcomes, [DONE if key in known else MISS for key in keys])
        if not may_lie:
            assert not [
                key for key, each in zip(keys, outcomes, strict=True) if each is DONE and key not in known
            ]
