"""Leaf-first LRU in the real pool, against a model that shares nothing with it, and against real traces."""

from __future__ import annotations

import json
import lzma
import os
import random
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from umbp.pool import Outcome, Pool

MakePool = Callable[..., Pool]
TINY = 100


class LeafFirst:
    """The model: an ordered dict, old to young; a victim with children gives way to its oldest leaf
    descendant."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.parent: OrderedDict[str, str | None] = OrderedDict()

    def victim(self, spared: set[str]) -> str | None:
        def below(top: str) -> list[str]:
            return [k for k, p in self.parent.items() if p == top]

        def leaves(top: str) -> list[str]:
            children = below(top)
            return [leaf for c in children for leaf in leaves(c)] if children else [top]

        for top in self.parent:
            may_go = [leaf for leaf in leaves(top) if leaf not in spared]
            if top not in spared and may_go:
                return min(may_go, key=list(self.parent).index)
        return None

    def request(self, chain: list[str]) -> int:
        hits = next((i for i, k in enumerate(chain) if k not in self.parent), len(chain))
        for i, key in enumerate(chain):
            if key not in self.parent:
                if len(self.parent) == self.capacity:
                    gone = self.victim(set(chain))
                    if gone is None:
                        break
                    del self.parent[gone]
                self.parent[key] = chain[i - 1] if i else None
        self.touch(chain)
        return hits

    def touch(self, keys: list[str]) -> None:
        for key in reversed(keys):
            if key in self.parent:
                self.parent.move_to_end(key)


def request(pool: Pool, ns: int, chain: list[str]) -> int:
    """What an engine does with a prompt: pin the stored prefix, store the rest, let go. Blocks hit."""
    hits = next((i for i, hit in enumerate(pool.lookup(chain)) if not hit), len(chain))
    pins, _ = pool.acquire(chain[:hits])
    tickets, outcomes = pool.reserve(ns, chain, TINY, [None, *chain[:-1]])
    pool.publish(tickets[outcomes == Outcome.RESERVED])
    pool.release(pins)
    pool.touch(chain)
    return hits


def made_trace(seed: int, requests: int) -> list[list[str]]:
    """Chains from a growing tree: shared trunks, conversations that continue, one-off prompts."""
    rng = random.Random(seed)
    chains: list[list[str]] = [[f"t{t}.{i}" for i in range(rng.randrange(2, 6))] for t in range(4)]
    trace = []
    for n in range(requests):
        chain = list(rng.choice(chains[-12:] if rng.random() < 0.6 else chains))
        chain = chain[: rng.randrange(1, len(chain) + 1)] + [f"b{n}.{i}" for i in range(rng.randrange(0, 5))]
        chains.append(chain[:20])
        trace.append(chains[-1])
    return trace


@pytest.mark.parametrize("capacity", [24, 48, 96])
def test_the_pool_is_leaf_first_lru_block_by_block(make_pool: MakePool, capacity: int) -> None:
    pool, model = make_pool(slots=capacity, object_bytes=TINY), LeafFirst(capacity)
    ns = pool.namespace("a")
    universe: set[str] = set()
    hits = 0
    for step, chain in enumerate(made_trace(7, 400)):
        universe |= set(chain)
        expected = model.request(chain)
        assert request(pool, ns, chain) == expected, step
        hits += expected
        if step % 10 == 0:
            keys = sorted(universe)
            stored = {k for k, hit in zip(keys, pool.lookup(keys).tolist(), strict=True) if hit}
            assert stored == set(model.parent), step
            pool.audit()
    assert hits > 0
    assert pool.stats()["evicted"] > 100
    assert pool.stats()["orphaned"] == 0


@pytest.mark.parametrize("seed", range(6))
def test_the_oldest_leaf_below_the_oldest_object_goes_first(make_pool: MakePool, seed: int) -> None:
    """Scenario: single blocks are touched out of order, so trunks grow older than what hangs on them."""
    pool, model = make_pool(slots=32, object_bytes=TINY), LeafFirst(32)
    ns = pool.namespace("a")
    rng = random.Random(seed)
    universe: list[str] = []
    for step, chain in enumerate(made_trace(seed, 150)):
        universe = list(dict.fromkeys([*universe, *chain]))
        assert request(pool, ns, chain) == model.request(chain), step
        for key in rng.sample(universe, min(8, len(universe))):
            pool.touch([key])
            model.touch([key])
        stored = {k for k, hit in zip(universe, pool.lookup(universe).tolist(), strict=True) if hit}
        assert stored == set(model.parent), step
    pool.audit()


@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_sizes_of_one_call_do_not_take_each_others_room(policy: str) -> None:
    slab = 16 * 4096
    with Pool.create_memfd(8 * slab, slab_bytes=slab, min_object_bytes=3000, eviction_policy=policy) as pool:
        ns = pool.namespace("a")

        def store(name: str, sizes: list[int]) -> list[int]:
            keys = [f"{name}-{i}" for i in range(len(sizes))]
            tickets, outcomes = pool.reserve(ns, keys, np.array(sizes, dtype=np.uint64))
            pool.publish(tickets[outcomes == Outcome.RESERVED])
            return outcomes.tolist()

        for i in range(6 * 16):
            store(f"small{i}", [3000])
        for i in range(2 * 4):
            store(f"large{i}", [16000])
        for i in range(50):
            assert store(f"both{i}", [3000] * 4 + [16000] * 4) == [Outcome.RESERVED] * 8
        pool.audit()


def test_stored_chains_stay_whole_under_pressure(make_pool: MakePool) -> None:
    """Whatever is stored has its parent stored: a prefix has no holes."""
    pool = make_pool(slots=60, object_bytes=TINY)
    ns = pool.namespace("a")
    parents: dict[str, str] = {}
    for chain in made_trace(3, 300):
        request(pool, ns, chain)
        parents |= dict(zip(chain[1:], chain[:-1], strict=True))
    children = sorted(parents)
    stored = pool.lookup(children)
    above = pool.lookup([parents[c] for c in children])
    assert stored.any()
    assert above[stored].all()


def test_a_parent_touched_last_of_all_still_outlives_its_children(make_pool: MakePool) -> None:
    """Scenario: stored and released one by one, root first, so the root is the oldest; its leaves go
    before it."""
    pool = make_pool(slots=12, object_bytes=TINY)
    ns = pool.namespace("a")
    chain = [f"c{i}" for i in range(12)]
    for i, key in enumerate(chain):
        pool.publish(pool.reserve(ns, [key], TINY, [chain[i - 1] if i else None])[0])
    for gone in range(1, 10):
        pool.publish(pool.reserve(ns, [f"n{gone}"], TINY)[0])
        assert pool.lookup(chain).tolist() == [True] * (12 - gone) + [False] * gone
        pool.audit()


def test_a_pinned_leaf_keeps_its_chain_and_others_go(make_pool: MakePool) -> None:
    pool = make_pool(slots=8, object_bytes=TINY)
    ns = pool.namespace("a")
    chain, other = ["a0", "a1", "a2", "a3"], ["b0", "b1", "b2", "b3"]
    for keys in (chain, other):
        pool.publish(pool.reserve(ns, keys, TINY, [None, *keys[:-1]])[0])
    pin, _ = pool.acquire(["a3"])
    pool.publish(pool.reserve(ns, [f"n{i}" for i in range(4)], TINY)[0])
    assert pool.lookup(chain).all()
    assert not pool.lookup(other).any()
    assert pool.reserve(ns, [f"m{i}" for i in range(5)], TINY)[1].tolist() == [Outcome.RESERVED] * 4 + [
        Outcome.FULL
    ]
    pool.audit()
    pool.release(pin)


TRACES = os.environ.get("UMBP_TRACES")


@pytest.mark.skipif(not TRACES, reason="UMBP_TRACES names no folder with request traces")
@pytest.mark.parametrize(("percent", "golden"), [(1, 0.05439), (5, 0.20221)])
def test_real_chat_gives_the_golden_hit_rates(percent: int, golden: float) -> None:
    """The conversation trace, full blocks only, through the real pool limited to an exact number of
    objects."""
    assert TRACES
    with lzma.open(Path(TRACES) / "conversation_trace.jsonl.xz", "rt") as file:
        rows = [json.loads(line) for line in file]
    chains = [[str(i) for i in row["hash_ids"][: row["input_length"] // 512]] for row in rows]
    slots = round(percent / 100 * len({block for chain in chains for block in chain}))
    pool = Pool.create_memfd(slots * 4096, slab_bytes=4096, min_object_bytes=TINY)
    ns = pool.namespace("trace")
    references = hits = 0
    for chain in chains:
        references += len(chain)
        hits += request(pool, ns, chain)
    pool.audit()
    pool.close()
    assert round(hits / references, 5) == golden
