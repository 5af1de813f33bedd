"""Hits that end inside a block: the engine has them where a state is cut finer than blocks, and the pool has
them too.

With `prefix_match_unit` below the block, or with tokens dealt out among ranks beside states, vLLM keeps what
its prompts end inside of under a hash of its own.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from scripted import BLOCK, ScriptedEngine, tokens
from scripted_runtime import WatchedRuntime

from umbp.data import BlockIdentityCodec
from umbp.testing.engine.shape import Layers
from umbp.testing.reference import ReferenceRuntime

WIDE = 2 * BLOCK
LAYERS = (Layers("full", 1, block_tokens=WIDE), Layers("mamba", 2, block_tokens=WIDE))
FAMILIES: dict[str, dict[str, Any]] = {
    "finer hashes": {"layers": LAYERS, "match_tokens": BLOCK},
    "dealt tokens": {"layers": (Layers("full", 1), Layers("mamba", 2)), "ranks": 2, "kv_heads": 1, "dcp": 2},
}
BOTH = pytest.mark.parametrize("how", FAMILIES.values(), ids=FAMILIES.keys())


def reused_by(engine: ScriptedEngine, prompt: list[int], max_tokens: int = 1, **how: Any) -> int:
    before = engine.reused_tokens
    engine.run(prompt, max_tokens, **how)
    return engine.reused_tokens - before


def stored_ends(engine: ScriptedEngine, prompt: list[int]) -> dict[str, list[int]]:
    """Where what is stored of a prompt ends, by kind of group."""
    side = engine.connector.scheduler_side
    hashes = engine.make_request(prompt).block_hashes
    found: dict[str, list[int]] = {}
    for group in side._shape.groups:
        there = side._pool.stored(group.group_id, hashes)
        ends = [(place + 1) * side._shape.hash_tokens for place, is_there in enumerate(there) if is_there]
        assert found.setdefault(group.kind.name, ends) == ends
    return found


@BOTH
def test_a_prompt_is_restored_up_to_its_last_hash(make_engine: Any, make_pool: Any, how: Any) -> None:
    pool = make_pool()
    engine = make_engine(pool, **how)
    engine.run(tokens(113))
    engine.forget_prefixes()
    assert reused_by(engine, tokens(113)) == 112
    engine.forget_prefixes()
    assert reused_by(engine, tokens(150)) == 112, "a prompt that goes on from there"
    assert engine.count("failed_load_tokens") == 0
    engine.check_drained()
    pool.check_unpinned()


@BOTH
def test_an_unfinished_block_is_stored_once_and_the_whole_one_under_its_own_name(
    make_engine: Any, how: Any
) -> None:
    engine = make_engine(ReferenceRuntime(), extra={"save_decode_cache": True}, **how)
    engine.run(tokens(113), 1)
    assert stored_ends(engine, tokens(113))["FULL"] == [32, 64, 96, 112]
    answer = list(engine.run(tokens(113), 20).all_token_ids)
    assert stored_ends(engine, answer)["FULL"] == [32, 64, 96, 112, 128]
    before = engine.count("stored_tokens")
    engine.forget_prefixes()
    assert reused_by(engine, tokens(113), 10) == 112
    assert engine.count("stored_tokens") == before, "all of it was there"
    engine.check_drained()


@BOTH
def test_a_whole_block_serves_hits_that_end_inside_it(make_engine: Any, how: Any) -> None:
    """Of attention what comes after may be anything; the state must be that of the very place."""
    pool = ReferenceRuntime()
    engine = make_engine(pool, max_model_len=512, **how)
    engine.run(tokens(113))
    engine.run(tokens(200))
    hashes = engine.make_request(tokens(113)).block_hashes
    group_id = engine.connector.scheduler_side._shape.counted.group_id
    unfinished = [key for key in pool.shelf.objects if key.endswith(f":g{group_id}:{hashes[6].hex()}")]
    assert unfinished
    for key in unfinished:
        pool.shelf.remove(key)
    engine.forget_prefixes()
    assert reused_by(engine, tokens(150)) == 112
    engine.forget_prefixes()
    assert reused_by(engine, tokens(113)) < 112, "its own hashes don't reach the whole block's name"
    engine.check_drained()


@BOTH
def test_a_longer_hit_of_the_pool_takes_the_place_of_the_engines_own_inside_the_same_block(
    make_engine: Any, how: Any
) -> None:
    how = how | {"layers": tuple(Layers(each.kind, each.count, block_tokens=64) for each in how["layers"])}
    how = how | {"match_tokens": BLOCK, "max_batched_tokens": 128}
    engine = make_engine(ReferenceRuntime(), **how)
    for length in (129 + 16, 129 + 48):
        engine.run(tokens(length))
    engine.forget_prefixes()
    own = engine.run(tokens(129 + 16), reads_cache=False)
    assert own.num_computed_tokens
    loaded = engine.restored_tokens()
    assert reused_by(engine, tokens(129 + 16)) == 128 + 16
    assert engine.restored_tokens() == loaded, "no more than the engine has itself is not loaded"
    assert reused_by(engine, tokens(129 + 48)) == 128 + 48
    assert engine.restored_tokens() > loaded
    engine.check_drained()


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_state_that_a_request_leaves_in_its_own_block_is_stored_when_it_ends(
    make_engine: Any, make_pool: Any, in_flight: int
) -> None:
    """Aborted before the step that would have made way for the next state."""
    pool = make_pool()
    engine = make_engine(pool, max_batched_tokens=200, depth=in_flight, **FAMILIES["finer hashes"])
    request = engine.add(tokens(113))
    while request.num_computed_tokens < 112:
        engine.step()
    engine.land()
    assert stored_ends(engine, tokens(113))["STATE"] == [96]
    assert request.num_computed_tokens == 112
    engine.abort(request.request_id)
    assert engine.connector.has_pending_push_work()
    engine.drain()
    assert stored_ends(engine, tokens(113))["STATE"][-1] == 112
    engine.forget_prefixes()
    assert reused_by(engine, tokens(113)) == 112
    engine.check_drained()
    pool.check_unpinned()


def test_a_reset_forgets_the_states_that_wait_to_be_stored(make_engine: Any) -> None:
    pool = WatchedRuntime(ReferenceRuntime())
    engine = make_engine(pool, max_batched_tokens=200, **FAMILIES["finer hashes"])
    request = engine.add(tokens(113))
    while request.num_computed_tokens < 112:
        engine.step()
    engine.abort(request.request_id)
    assert engine.connector.has_pending_push_work()
    engine.connector.reset_cache()
    assert not engine.connector.has_pending_push_work()
    engine.drain()
    assert stored_ends(engine, tokens(113)) == {"FULL": [], "STATE": []}
    engine.check_drained()


@BOTH
def test_requests_of_one_step_that_take_the_same_unfinished_block_all_get_what_it_holds(
    make_engine: Any, how: Any
) -> None:
    """The first one's copy is the second one's hit, and vLLM's workers copy all at once."""
    engine = make_engine(ReferenceRuntime(), max_batched_tokens=200, **how)
    running = engine.add(tokens(20), 30)
    while running.num_output_tokens < 2:
        engine.step()
    sources: Counter[int] = Counter()
    for _ in range(3):
        engine.add(tokens(20), 2)
    while engine.scheduler.get_num_unfinished_requests() > 1:
        output = engine.step()
        copies = output.kv_cache_block_copies or []
        assert {copy.src_block_id for copy in copies}.isdisjoint(copy.dst_block_id for copy in copies)
        sources.update(copy.src_block_id for copy in copies)
    assert max(sources.values()) == 3
    engine.drain()
    engine.check_drained()


def test_a_copy_of_a_block_that_is_a_copy_itself_is_made_of_what_that_is_made_of(make_engine: Any) -> None:
    """The first request fills the rest of its copy, and vLLM finds that for the second in the same step."""
    engine = make_engine(ReferenceRuntime(), max_batched_tokens=200, **FAMILIES["finer hashes"])
    engine.run(tokens(17))
    for _ in range(2):
        engine.add(tokens(80))
    output = engine.step()
    assert len(output.num_scheduled_tokens) == 2
    copies = output.kv_cache_block_copies or []
    assert {copy.src_block_id for copy in copies}.isdisjoint(copy.dst_block_id for copy in copies)
    engine.drain()
    engine.check_drained()


@pytest.mark.parametrize("in_flight", [1, 2])
@BOTH
def test_a_request_waits_a_step_rather_than_get_a_copy_of_a_block_that_is_computed_in_it(
    make_engine: Any, how: Any, in_flight: int
) -> None:
    """vLLM's workers copy before they compute."""
    engine = make_engine(ReferenceRuntime(), max_batched_tokens=200, depth=in_flight, **how)
    engine.run(tokens(17))
    computing = engine.add(tokens(100), reads_cache=False)
    copying = engine.add(tokens(80))
    assert engine.step().num_scheduled_tokens.keys() == {computing.request_id}
    later = engine.step()
    assert copying.request_id in later.num_scheduled_tokens
    assert later.kv_cache_block_copies
    engine.drain()
    engine.check_drained()


@BOTH
def test_a_request_gets_its_copy_of_a_block_at_once_if_what_it_hits_is_computed(
    make_engine: Any, how: Any
) -> None:
    engine = make_engine(ReferenceRuntime(), max_batched_tokens=128, **how)
    engine.run(tokens(17))
    computing = engine.add(tokens(150), 3, reads_cache=False)
    engine.step()
    assert 80 < computing.num_computed_tokens < 150
    copying = engine.add(tokens(80))
    output = engine.step()
    assert output.num_scheduled_tokens.keys() == {computing.request_id, copying.request_id}
    assert output.kv_cache_block_copies
    engine.drain()
    engine.check_drained()


def test_a_hit_without_states_ends_with_a_whole_block(make_engine: Any) -> None:
    """As the engine's own does, whatever the hashes."""
    layers = (Layers("full", 1, block_tokens=WIDE), Layers("sliding", 2, 40, block_tokens=WIDE))
    engine = make_engine(ReferenceRuntime(), layers=layers, match_tokens=BLOCK)
    engine.run(tokens(113))
    assert stored_ends(engine, tokens(113))["FULL"] == [32, 64, 96]
    assert reused_by(engine, tokens(113)) == 96
    engine.forget_prefixes()
    assert reused_by(engine, tokens(113)) == 96


def test_keys_of_unfinished_blocks_are_made_like_all_others(make_engine: Any) -> None:
    pool = ReferenceRuntime()
    engine = make_engine(pool, **FAMILIES["finer hashes"])
    engine.run(tokens(113))
    (stage,) = engine.connector.scheduler_side._pool._stages
    hashes = engine.make_request(tokens(113)).block_hashes
    codec: BlockIdentityCodec = stage.codec
    assert (
        codec.keys([hashes[6]], engine.connector.scheduler_side._shape.counted.group_id)[0]
        in pool.shelf.objects
    )
