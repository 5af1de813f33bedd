"""What is restored is exact, whatever the prompt's length, the engine's settings and the way of loading.

`ScriptedEngine` checks every byte of every request in every step; a test here says what must be restored.
"""

from __future__ import annotations

from typing import Any

import pytest
from scripted import BLOCK, tokens
from scripted_runtime import plain

from umbp.testing.reference import ReferenceRuntime

WAYS = pytest.mark.parametrize("load_async", [True, False], ids=["async", "sync"])
RANKS = pytest.mark.parametrize("ranks", [1, 2], ids=["tp1", "tp2"])


@WAYS
@RANKS
@pytest.mark.parametrize(
    ("length", "restored"),
    [
        (5 * BLOCK + 3, 5 * BLOCK),
        (5 * BLOCK, 4 * BLOCK),
        (5 * BLOCK + 1, 5 * BLOCK),
        (BLOCK, 0),
        (BLOCK + 1, BLOCK),
        (BLOCK - 1, 0),
        (1, 0),
        (12 * BLOCK + 5, 12 * BLOCK),
    ],
)
def test_all_whole_blocks_but_the_last_token_are_restored(
    make_pool: Any, make_engine: Any, load_async: bool, ranks: int, length: int, restored: int
) -> None:
    pool = make_pool()
    engine = make_engine(pool, {"load_async": load_async}, ranks=ranks)
    first = engine.run(tokens(length), 2)
    engine.forget_prefixes()
    again = engine.run(tokens(length), 2)
    assert engine.restored_tokens() == restored
    assert list(again.output_token_ids) == list(first.output_token_ids)
    engine.check_drained()
    pool.check_unpinned()


@WAYS
def test_a_prompt_restores_without_the_engines_own_prefix_cache(
    make_pool: Any, make_engine: Any, load_async: bool
) -> None:
    engine = make_engine(make_pool(), {"load_async": load_async}, prefix_caching=False)
    engine.run(tokens(100))
    engine.run(tokens(100))
    assert engine.restored_tokens() == 96
    engine.check_drained()


@WAYS
def test_what_the_engine_still_has_is_not_loaded(make_pool: Any, make_engine: Any, load_async: bool) -> None:
    engine = make_engine(make_pool(), {"load_async": load_async})
    engine.run(tokens(10 * BLOCK + 1))
    engine.forget_prefixes()
    engine.run(tokens(4 * BLOCK + 1))
    assert engine.restored_tokens() == 4 * BLOCK
    engine.run(tokens(10 * BLOCK + 1))
    assert engine.restored_tokens() == 10 * BLOCK


@WAYS
@pytest.mark.parametrize("chunk", [BLOCK, BLOCK + 3, 3 * BLOCK])
def test_chunked_prefill_stores_and_restores_all(
    make_pool: Any, make_engine: Any, load_async: bool, chunk: int
) -> None:
    engine = make_engine(make_pool(), {"load_async": load_async}, max_batched_tokens=chunk)
    for length in (9 * BLOCK + 2, 12 * BLOCK + 9):
        engine.run(tokens(length))
        engine.forget_prefixes()
    assert engine.restored_tokens() == 9 * BLOCK
    engine.run(tokens(12 * BLOCK + 9))
    assert engine.restored_tokens() == 9 * BLOCK + 12 * BLOCK


def test_every_chunk_is_in_the_pool_before_the_prompt_is_over(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(make_pool(), max_batched_tokens=2 * BLOCK)
    request = engine.add(tokens(6 * BLOCK + 1))
    engine.step()
    engine.step()
    assert engine.count("stored_tokens") == 4 * BLOCK
    engine.abort(request.request_id)
    engine.drain()
    engine.forget_prefixes()
    engine.run(tokens(6 * BLOCK + 1))
    assert engine.restored_tokens() == 4 * BLOCK


@WAYS
def test_prompts_that_share_a_beginning_share_its_objects(
    make_pool: Any, make_engine: Any, load_async: bool
) -> None:
    engine = make_engine(make_pool(), {"load_async": load_async})
    shared = tokens(4 * BLOCK)
    engine.run(shared + tokens(40, 1))
    engine.forget_prefixes()
    first = engine.add(shared + tokens(40, 2), 3)
    second = engine.add(shared + tokens(40, 3), 3)
    engine.drain()
    assert {first.request_id, second.request_id} <= engine.finished.keys()
    assert engine.count("failed_load_tokens") == 0
    assert 4 * BLOCK <= engine.restored_tokens() <= 8 * BLOCK
    stored = (6 + 2 + 2) * BLOCK
    assert engine.count("stored_tokens") == stored
    engine.check_drained()


def test_another_cache_salt_restores_nothing(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(make_pool())
    engine.run(tokens(100), salt="a")
    engine.forget_prefixes()
    engine.run(tokens(100), salt="b")
    engine.run(tokens(100))
    assert engine.restored_tokens() == 0
    engine.forget_prefixes()
    engine.run(tokens(100), salt="a")
    assert engine.restored_tokens() == 96


def test_generated_tokens_are_stored_only_with_save_decode_cache(make_pool: Any, make_engine: Any) -> None:
    for saves, restored in ((False, BLOCK), (True, 4 * BLOCK)):
        engine = make_engine(make_pool(), {"save_decode_cache": saves})
        request = engine.run(tokens(BLOCK + 1), 3 * BLOCK)
        engine.forget_prefixes()
        engine.run([*request.all_token_ids])
        assert engine.restored_tokens() == restored


@RANKS
def test_an_engine_that_plans_a_step_ahead_stores_and_restores_the_same(
    make_pool: Any, make_engine: Any, ranks: int
) -> None:
    engine = make_engine(make_pool(), {"save_decode_cache": True}, ranks=ranks, depth=2)
    first = engine.run(tokens(100), 40)
    assert engine.count("stored_tokens") == 8 * BLOCK
    engine.forget_prefixes()
    again = engine.run(tokens(100), 40)
    assert list(again.output_token_ids) == list(first.output_token_ids)
    assert engine.restored_tokens() == 96
    engine.forget_prefixes()
    engine.run(list(first.all_token_ids))
    assert engine.restored_tokens() == 96 + 8 * BLOCK
    engine.check_drained()


def test_a_token_that_was_sampled_but_not_computed_is_never_stored(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(make_pool(), {"save_decode_cache": True})
    request = engine.run(tokens(BLOCK), BLOCK)
    assert request.num_tokens == 2 * BLOCK
    assert engine.count("stored_tokens") == BLOCK


@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "BLNHC", "BLHNC", "LHBNC", "BHLNC"])
def test_every_layout_of_the_kv_cache_round_trips(
    make_pool: Any, make_engine: Any, request: Any, layout: str
) -> None:
    if "reference" in request.node.name and layout in ("LHBNC", "BHLNC"):
        pytest.skip("the reference runtime moves blocks that are one run a layer")
    engine = make_engine(make_pool(), layout=layout, ranks=2)
    engine.run(tokens(7 * BLOCK + 1))
    engine.forget_prefixes()
    engine.run(tokens(5 * BLOCK + 1) + tokens(40, 2))
    engine.run(tokens(7 * BLOCK + 1))
    assert engine.restored_tokens() == 7 * BLOCK
    engine.check_drained()


@pytest.mark.parametrize(
    "bare", [{"hold": False}, {"lookup_raw": False}, {"hold": False, "lookup_raw": False}]
)
@RANKS
def test_a_runtime_without_the_extras_serves_as_well(
    make_pool: Any, make_engine: Any, bare: dict[str, bool], ranks: int
) -> None:
    runtime = plain(make_pool(), **bare, note=False, usage=False)
    engine = make_engine(runtime, ranks=ranks)
    engine.run(tokens(100))
    engine.forget_prefixes()
    engine.run(tokens(100))
    assert engine.restored_tokens() == 96
    engine.check_drained()


def test_a_prefix_counts_as_far_as_every_rank_has_it(make_engine: Any) -> None:
    pool = ReferenceRuntime()
    engine = make_engine(pool, ranks=2)
    engine.run(tokens(100))
    engine.forget_prefixes()
    lost = [key for key in pool.shelf.objects if ":tp1:" in key][3]
    pool.shelf.remove(lost)
    engine.run(tokens(100))
    assert engine.restored_tokens() == 3 * BLOCK
    assert engine.invalid_blocks == []
    engine.forget_prefixes()
    engine.run(tokens(100))
    assert engine.restored_tokens() == 3 * BLOCK + 96, "what a rank lacked is stored again"


def test_a_pool_that_evicts_all_the_time_never_breaks_a_promise(make_pool: Any, make_engine: Any) -> None:
    pool = make_pool(24)
    engine = make_engine(pool, blocks=40)
    for turn in range(30):
        for seed in (turn // 2, turn // 3, 100 + turn):
            engine.add(tokens(5 * BLOCK + 1, seed) + tokens(BLOCK, turn), 2)
        engine.drain()
        engine.forget_prefixes()
    assert engine.restored_tokens() > 0
    assert engine.count("failed_load_tokens") == 0
    assert engine.invalid_blocks == []
    engine.check_drained()
    pool.check_unpinned()


def test_a_pool_too_small_for_one_prompt_keeps_its_beginning(
    make_pool: Any, make_engine: Any, request: pytest.FixtureRequest
) -> None:
    """A prompt of two chunks, the first of which is larger than the pool: the second must not push it out."""
    engine = make_engine(make_pool(3))
    told = []
    for _ in range(4):
        engine.run(tokens(8 * BLOCK + 1))
        engine.forget_prefixes()
        told.append(engine.restored_tokens() // BLOCK)
    assert engine.count("failed_load_tokens") == 0
    assert told[:2] == [0, 3]
    if request.node.callspec.params["make_pool"] == "embedded":
        # The reference evicts by age alone; the pool never a block that others build on.
        assert told == [0, 3, 6, 9]
    engine.check_drained()


@pytest.mark.parametrize(("role", "stored", "restored"), [("kv_producer", 96, 0), ("kv_consumer", 0, 0)])
def test_a_producer_only_stores_and_a_consumer_only_loads(
    make_pool: Any, make_engine: Any, role: str, stored: int, restored: int
) -> None:
    engine = make_engine(make_pool(), role=role)
    engine.run(tokens(100))
    engine.forget_prefixes()
    engine.run(tokens(100))
    assert (engine.count("stored_tokens"), engine.restored_tokens()) == (stored, restored)


def test_a_consumer_restores_what_a_producer_stored(make_engine: Any) -> None:
    pool = ReferenceRuntime()
    producer, consumer = make_engine(pool, role="kv_producer"), make_engine(pool, role="kv_consumer")
    producer.run(tokens(100))
    consumer.run(tokens(100))
    assert consumer.restored_tokens() == 96


def test_a_hit_that_is_too_small_to_pay_is_computed(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(make_pool(), {"min_load_tokens": 4 * BLOCK})
    for length in (3 * BLOCK + 1, 4 * BLOCK + 1):
        engine.run(tokens(length, length))
        engine.forget_prefixes()
        engine.run(tokens(length, length))
    assert engine.restored_tokens() == 4 * BLOCK


@RANKS
def test_what_hits_are_worth_is_learned_from_steps_and_loads(
    make_pool: Any, make_engine: Any, ranks: int
) -> None:
    engine = make_engine(make_pool(), {"min_load_tokens": "measured"}, ranks=ranks)
    for seed in range(6):
        engine.run(tokens(100, seed), 40)
        engine.forget_prefixes()
        engine.run(tokens(100, seed), 40)
    worth = engine.connector.scheduler_side._worth
    assert worth._loads[False].count == 6
    assert worth._steps.count >= 12
    assert worth._steps.slope > 0
    engine.check_drained()


def test_without_lookup_nothing_is_restored_and_all_is_stored(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(make_pool(), {"enable_lookup": False})
    engine.run(tokens(100))
    engine.forget_prefixes()
    engine.run(tokens(100))
    assert (engine.count("stored_tokens"), engine.restored_tokens()) == (96, 0)
