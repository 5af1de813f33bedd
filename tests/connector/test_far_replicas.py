"""Ranks that hold the same KV, with a cluster store behind their pools: the store has one object of what they
have alike, whether they share a pool or have one each, and every rank is given it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nodes import Node
from scripted import BLOCK, ScriptedEngine, tokens

from umbp.testing.engine.shape import Layers
from umbp.testing.stores.memory import MemoryCluster

PROMPT = 10 * BLOCK + 3
LATENT: dict[str, Any] = {"ranks": 2, "layers": (Layers("mla", 2),)}

Start = Callable[..., tuple[ScriptedEngine, Node]]


@pytest.fixture
def named(tmp_path: Path) -> dict[str, object]:
    """The options of an engine whose ranks share a pool."""
    return {"pool": "p", "pool_dir": str(tmp_path)}


@pytest.mark.parametrize("kind", ["own to own", "own to named", "named to own"])
@pytest.mark.parametrize(
    ("shape", "copies"),
    [
        (LATENT, 1),
        ({"ranks": 4, "kv_heads": 2}, 2),
        ({"pcp": 2, "layers": (Layers("mla", 2),)}, 1),
        ({"ranks": 2, "stages": 2, "depth": 2, "layers": (Layers("mla", 2),)}, 2),
    ],
    ids=["latent", "two heads for four ranks", "prefill shared out", "latent on two stages"],
)
def test_what_ranks_with_pools_of_their_own_hold_alike_is_what_those_of_a_shared_pool_do(
    start: Start, cluster: MemoryCluster, named: dict[str, object], shape: Any, copies: int, kind: str
) -> None:
    of_kind = {"own": {}, "named": named}
    one, other = (of_kind[each] for each in kind.split(" to "))
    first, node = start(one, **shape)
    told = first.run(tokens(PROMPT), 2)
    node.flush()
    assert len(cluster.objects) == 10 * copies
    second, _ = start(other, **shape)
    second.run(tokens(1))  # by then prefill ranks have told of their pools
    again = second.run(tokens(PROMPT), 2)
    assert second.restored_tokens() == 10 * BLOCK
    assert list(again.output_token_ids) == list(told.output_token_ids)
    second.forget_prefixes()
    second.run(tokens(PROMPT), 2)
    assert second.restored_tokens() == 20 * BLOCK
    second.check_drained()


def test_the_store_is_sent_and_asked_for_one_rank_and_gives_to_each(
    start: Start, cluster: MemoryCluster
) -> None:
    first, node = start(**LATENT)
    first.run(tokens(PROMPT))
    node.flush()
    first.run(tokens(1))
    assert first.count("sent_objects") == len(cluster.objects) == 10
    assert first.count("dropped_send_objects") == 0
    assert sum("put" in store.calls for store in cluster.stores) == 1, "one rank alone puts"
    second, _ = start(**LATENT)
    second.run(tokens(4 * BLOCK + 1))
    second.forget_prefixes()
    second.run(tokens(PROMPT))
    second.run(tokens(1))
    series = second.stats.series
    assert series["store_lookup_objects|memory"] == 4 + 6
    assert series["store_lookup_batches|memory"] == 2
    assert series["fetched_objects|memory"] == 2 * 10
    assert series["hit_tokens|memory"] == series["loaded_tokens|memory"] == (4 + 6) * BLOCK
    assert series["hit_tokens|dram"] == series["loaded_tokens|dram"] == 4 * BLOCK


def test_evicted_tokens_are_those_of_one_rank_s_pool(start: Start) -> None:
    engine, node = start({"capacity_bytes": 14 * 4096}, **LATENT)
    for seed in range(4):
        engine.run(tokens(PROMPT, seed=seed))
    usages = [worker.usage() for worker in node.workers]
    assert usages[0]["evicted_objects"] > 0
    assert usages[0]["evicted_tokens"] == BLOCK * usages[0]["evicted_objects"]
    assert usages[1]["evicted_tokens"] == 0
