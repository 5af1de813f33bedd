"""Engines of every parallel shape, with their pools: pipelines with several batches under way, heads and
latent vectors that several ranks hold, tokens that ranks deal out. Each restores what it has stored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from scripted import BLOCK, tokens
from scripted_runtime import PickyRuntime, WatchedRuntime

from umbp.testing.engine.shape import Layers
from umbp.testing.reference import ReferenceRuntime

FULL = Layers("full", 2)
WINDOW = Layers("sliding", 2, 40)
STATE = Layers("mamba", 2)
LATENT = Layers("mla", 2)


@dataclass(frozen=True)
class Case:
    """A shape; how many tokens its blocks span; how many different objects it makes of a block in a pool that
    all ranks share, where every group has one at each place.
    """

    shape: dict[str, Any] = field(default_factory=dict)
    block_tokens: int = BLOCK
    objects: int | None = None


CASES = {
    "two stages": Case({"stages": 2, "depth": 2}, objects=2),
    "two stages of two ranks": Case({"stages": 2, "depth": 2, "ranks": 2}, objects=4),
    "stages that run alone": Case({"stages": 2, "depth": 1}, objects=2),
    "windows on two stages": Case({"stages": 2, "depth": 2, "layers": (FULL, Layers("sliding", 4, 40))}),
    "a window on one stage": Case(
        {"stages": 2, "depth": 2, "layers": (Layers("full", 1), Layers("sliding", 1, 40))}
    ),
    "a state on one stage": Case(
        {"stages": 2, "depth": 2, "layers": (Layers("full", 1), Layers("mamba", 1))}
    ),
    "latent": Case({"ranks": 2, "layers": (LATENT,)}, objects=1),
    "latent on two stages": Case({"ranks": 2, "stages": 2, "depth": 2, "layers": (LATENT,)}, objects=2),
    "one head for two ranks": Case({"ranks": 2, "kv_heads": 1}, objects=1),
    "two heads for four ranks": Case({"ranks": 4, "kv_heads": 2}, objects=2),
    "dealt tokens": Case({"ranks": 2, "kv_heads": 1, "dcp": 2}, 2 * BLOCK, objects=2),
    "dealt tokens of two heads": Case({"ranks": 4, "kv_heads": 2, "dcp": 2}, 2 * BLOCK, objects=4),
    "dealt latent tokens": Case({"ranks": 2, "dcp": 2, "layers": (LATENT,)}, 2 * BLOCK, objects=2),
    "dealt tokens on two stages": Case(
        {"ranks": 2, "stages": 2, "depth": 2, "kv_heads": 1, "dcp": 2}, 2 * BLOCK, objects=4
    ),
    "prefill shared out": Case({"ranks": 2, "pcp": 2, "layers": (LATENT,)}, objects=1),
    "prefill shared out on two stages": Case(
        {"pcp": 2, "stages": 2, "depth": 2, "layers": (LATENT,)}, objects=2
    ),
    "tokens dealt among prefill ranks": Case({"pcp": 2, "dcp": 2, "layers": (LATENT,)}, 2 * BLOCK, objects=2),
    "tokens dealt among all ranks": Case(
        {"ranks": 2, "pcp": 2, "dcp": 4, "layers": (LATENT,)}, 4 * BLOCK, objects=4
    ),
    "dealt tokens beside states": Case({"ranks": 2, "kv_heads": 1, "dcp": 2, "layers": (FULL, STATE)}),
}


@pytest.fixture(params=CASES.values(), ids=CASES.keys())
def case(request: pytest.FixtureRequest) -> Case:
    found: Case = request.param
    return found


def test_a_prompt_is_restored_to_the_last_whole_block(make_pool: Any, make_engine: Any, case: Case) -> None:
    pool = make_pool()
    engine = make_engine(pool, **case.shape)
    engine.run(tokens(10 * BLOCK + 5))
    engine.forget_prefixes()
    engine.run(tokens(10 * BLOCK + 5))
    restored = 10 * BLOCK // case.block_tokens * case.block_tokens
    assert engine.restored_tokens() == restored
    assert engine.count("failed_load_tokens") == 0
    engine.check_drained()
    pool.check_unpinned()


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.objects is not None])
def test_ranks_that_share_a_pool_store_what_they_hold_alike_once(
    shared_pool: Any, make_engine: Any, name: str
) -> None:
    case = CASES[name]
    pool: WatchedRuntime = shared_pool(1000, "alike")
    engine = make_engine(pool, **case.shape)
    engine.run(tokens(8 * BLOCK + 1))
    (found,) = {id(one): one for one in pools_of(pool)}.values()
    assert found.stats()["objects"] == case.objects * 8 * BLOCK // case.block_tokens


def pools_of(runtime: WatchedRuntime) -> list[Any]:
    """The pools that the workers are attached to."""
    keepers = [handle._keeper for handle in runtime.handles if hasattr(handle, "_keeper")]
    return [keeper.current()[0] for keeper in keepers][:1]


@pytest.mark.parametrize("last", [False, True], ids=["first rank", "last rank"])
def test_what_one_rank_of_one_stage_can_t_load_is_computed_on_all(
    make_engine: Any, case: Case, last: bool
) -> None:
    tp, pp = (case.shape.get("ranks", 1) - 1, case.shape.get("stages", 1) - 1) if last else (0, 0)

    def loses(rank: int, index: int, key: str) -> bool:
        return index % 3 == 0 and f":tp{tp}:" in key and f":pp{pp}:" in key

    pool = WatchedRuntime(PickyRuntime(ReferenceRuntime(1000), loses))
    engine = make_engine(pool, **case.shape)
    for seed in range(3):
        engine.run(tokens(7 * BLOCK, seed), 3)
    engine.forget_prefixes()
    for seed in range(3):
        engine.run(tokens(9 * BLOCK, seed), 3)
    assert engine.count("failed_load_requests") > 0
    engine.check_drained()
