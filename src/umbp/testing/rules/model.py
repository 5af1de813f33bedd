"""Any sequence of calls, held against a dictionary that shares no code with a runtime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import cast

import pytest

from umbp.data import TransferJobState
from umbp.errors import UMBPError
from umbp.runtime import base
from umbp.testing.rig import KINDS, RankRig, Rig, hashes
from umbp.testing.rules.support import ContractSupport

BLOCKS = 16
STEPS = 120


@dataclass(slots=True)
class Store:
    """A store on its way, and the bytes its blocks had when it began."""

    rig: Rig
    rank: RankRig
    job: TransferJobState
    content: dict[str, bytes]


class Model:
    """What must be true after each call: `published` holds all that may be seen, with its bytes."""

    def __init__(self, test: ContractSupport, rigs: list[Rig], random: Random) -> None:
        self.test = test
        self.rigs = rigs
        self.random = random
        self.chain = hashes(10)
        self.published: dict[str, bytes] = {}
        self.stores: list[Store] = []
        self.is_lossy = test.may_fail or test.capacity_objects is not None

    def step(self) -> None:
        rig = self.random.choice(self.rigs)
        rank = self.random.choice(rig.ranks)
        doing = self.random.choices(
            [self.store, self.publish, self.load, self.lookup, self.hold, self.clear], [6, 6, 6, 4, 3, 1]
        )[0]
        doing(rig, rank)

    def _some(self) -> tuple[str, list[bytes], list[int]]:
        count = self.random.randint(1, 6)
        kind = self.random.choice(KINDS)
        return kind, self.random.sample(self.chain, count), self.random.sample(range(BLOCKS), count)

    def store(self, rig: Rig, rank: RankRig) -> None:
        """Equal keys promise equal bytes, so a block is filled with its hash's own before it is stored."""
        kind, blocks, block_ids = self._some()
        keys = rank.keys(blocks)
        for key, block_id in zip(keys, block_ids, strict=True):
            rank.fill(block_id, min(rig.alike([key])))
        content = {key: rank.read(block_id) for key, block_id in zip(keys, block_ids, strict=True)}
        job = rank.worker.store(rank.store_plans(kind, blocks, block_ids))
        self.test.finished(rank, job)
        self.stores.append(Store(rig, rank, job, content))

    def publish(self, rig: Rig, rank: RankRig) -> None:
        """All that waits, in order: a later store may have relied on an earlier one's copy."""
        for store in self.stores:
            try:
                store.rank.worker.publish(store.job)
            except UMBPError:
                assert self.test.may_fail
                # What a later store left to this one may now be missing; what is there is right all the same.
                self.is_lossy = True
                continue
            self.published.update({key: store.content[key] for key in store.job.completed_keys})
        self.stores.clear()

    def load(self, rig: Rig, rank: RankRig) -> None:
        kind, blocks, block_ids = self._some()
        rank.scrub(block_ids)
        job = self.test.finished(rank, rank.worker.load(rank.load_plans(kind, blocks, block_ids)))
        for key, block_id in zip(rank.keys(blocks), block_ids, strict=True):
            if key in job.completed_keys:
                assert rank.read(block_id) in [self.published.get(one) for one in rig.alike([key])]
            else:
                assert self.is_lossy or key not in self.published

    def lookup(self, rig: Rig, rank: RankRig) -> None:
        for one in self.rigs:
            keys = one.keys(self.chain)
            for key, hit in zip(keys, one.scheduler.lookup(keys), strict=True):
                assert not hit or self._may_be_there(one, key)
                assert self.is_lossy or hit or key not in self.published

    def _may_be_there(self, rig: Rig, key: str) -> bool:
        """It was published, by its own rank or by another that has the same."""
        return not self.published.keys().isdisjoint(rig.alike([key]))

    def hold(self, rig: Rig, rank: RankRig) -> None:
        """What is held can be loaded until it is given back."""
        if not rig.capabilities.hold:
            return
        holder = cast(base.SupportsHold, rig.scheduler)
        blocks = self.random.sample(self.chain, 3)
        keys = rank.keys(blocks)
        held = holder.hold("r", keys)
        assert all(self._may_be_there(rig, key) for key in keys[:held])
        job = self.test.finished(rank, rank.worker.load(rank.load_plans("batch", blocks[:held], range(held))))
        assert self.test.may_fail or job.completed_keys == set(keys[:held])
        holder.unhold("r")

    def clear(self, rig: Rig, rank: RankRig) -> None:
        assert rig.scheduler.clear()
        for key in rig.keys(self.chain):
            self.published.pop(key, None)
        for store in [store for store in self.stores if store.rig is rig]:
            # What was stored before a clear can't be published after it.
            store.content.clear()
            self.stores.remove(store)


class ModelContract(ContractSupport):
    """Random calls on two namespaces."""

    @pytest.mark.parametrize("seed", range(4))
    def test_any_sequence_of_calls_agrees_with_a_dictionary(
        self, make_rig: Callable[..., Rig], seed: int
    ) -> None:
        rigs = [make_rig(max(self.tp_sizes)), make_rig(1)]
        model = Model(self, rigs, Random(seed))
        for _ in range(STEPS):
            model.step()
        model.publish(rigs[0], rigs[0].ranks[0])
        model.lookup(rigs[0], rigs[0].ranks[0])
