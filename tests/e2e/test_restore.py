"""What the product is for, on real engines: a prompt whose KV has left the engine is answered from the pool
exactly as the engine's own prefix cache would have answered it.

Every test poisons the engine's KV memory first, so that only what was restored can make the answer right.
"""

from __future__ import annotations

import pytest

from e2e.harness import (
    BLOCK_TOKENS,
    UMBP,
    EnginePool,
    EngineProcess,
    EngineSpec,
    Prompt,
    assert_close,
    assert_differs,
    assert_same,
    random_prompt,
    restorable,
)
from e2e.rules import assert_restored_as_own_hit

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SMALL_CHUNKS = (("max_num_batched_tokens", 128),)

# Two are started as an operator starts them: afresh in every process.
SPECS = {
    "one rank, async": EngineSpec(connector=UMBP, is_fresh=True),
    "one process, sync, chunked": EngineSpec(
        connector=(*UMBP, ("load_async", False)), is_in_process=True, arguments=SMALL_CHUNKS
    ),
    "two ranks, async, chunked": EngineSpec(
        connector=UMBP, tensor_parallel=2, arguments=SMALL_CHUNKS, is_fresh=True
    ),
    "two ranks, sync, no prefix cache": EngineSpec(
        connector=(*UMBP, ("load_async", False), ("verify", "always")),
        tensor_parallel=2,
        arguments=(("enable_prefix_caching", False),),
    ),
}

LENGTHS = {
    "k blocks": 8 * BLOCK_TOKENS,
    "k blocks + 1": 8 * BLOCK_TOKENS + 1,
    "k blocks and a half": 8 * BLOCK_TOKENS + BLOCK_TOKENS // 2,
    "one block": BLOCK_TOKENS,
    "one block + 1": BLOCK_TOKENS + 1,
    "less than one block": BLOCK_TOKENS - 12,
}


@pytest.fixture(scope="module", params=SPECS.values(), ids=SPECS.keys())
def spec(request: pytest.FixtureRequest) -> EngineSpec:
    """Of module scope, so that all tests of one engine run before the next one starts."""
    found: EngineSpec = request.param
    return found


@pytest.fixture
def engine(spec: EngineSpec, engines: EnginePool) -> EngineProcess:
    found = engines.get(spec)
    found.record_blocks()
    return found


def has_own_cache(engine: EngineProcess) -> bool:
    return dict(engine.spec.arguments).get("enable_prefix_caching", True)


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS.keys())
def test_a_restored_prompt_is_answered_as_the_engines_own_hit_is(engine: EngineProcess, length: int) -> None:
    restored = assert_restored_as_own_hit(engine, random_prompt(length, seed=length), restorable(length))
    assert restored.gained("load_job_seconds_count") == engine.spec.tensor_parallel * (restorable(length) > 0)
    assert restored.gained("store_job_seconds_count") == 0


def test_one_changed_early_token_is_a_miss_and_changes_the_answer(engine: EngineProcess) -> None:
    prompt = random_prompt(200, seed=1001)
    reference = engine.generate(prompt)
    engine.poison()
    other = engine.generate(prompt.changed_at(3))
    assert other.cached_tokens == 0
    assert_differs(other, reference)


def test_only_the_shared_prefix_of_two_prompts_is_restored(engine: EngineProcess) -> None:
    prompt = random_prompt(300, seed=1002)
    engine.generate(prompt)
    forked = prompt.changed_at(5 * BLOCK_TOKENS + 7)
    engine.poison()
    cold = engine.generate(forked)
    assert cold.cached_tokens == 5 * BLOCK_TOKENS
    engine.poison()
    restored = engine.generate(forked)
    assert restored.cached_tokens == restorable(300)
    assert_close(restored, cold)


def test_a_salted_prompt_is_never_served_from_another_salt(engine: EngineProcess) -> None:
    plain = random_prompt(100, seed=1003)
    engine.generate(Prompt(plain.tokens, cache_salt="a"))
    engine.poison()
    assert engine.generate(Prompt(plain.tokens, cache_salt="b")).cached_tokens == 0
    assert engine.generate(Prompt(plain.tokens, cache_salt="a")).cached_tokens == restorable(100)


def test_a_request_that_skips_the_prefix_cache_is_computed_in_full(engine: EngineProcess) -> None:
    prompt = random_prompt(100, seed=1004)
    engine.generate(prompt)
    engine.poison()
    asking = Prompt(prompt.tokens, params=(("prompt_logprobs", 1),))
    assert engine.generate(asking).cached_tokens == 0


def test_resetting_with_the_connector_forgets_and_new_bytes_are_stored_again(engine: EngineProcess) -> None:
    prompt = random_prompt(150, seed=1005)
    first = engine.generate(prompt)
    assert engine.reset_prefix_cache(with_connector=True)
    assert engine.generate(prompt).cached_tokens == 0
    objects = restorable(150) // BLOCK_TOKENS * engine.spec.tensor_parallel
    assert engine.shows("vllm:umbp_pool_objects", objects), "only the new ones"
    engine.poison()
    again = engine.generate(prompt)
    assert again.cached_tokens == restorable(150)
    assert_close(again, first)


def test_many_prompts_at_once_are_restored_beside_each_other(engine: EngineProcess) -> None:
    prompts = [random_prompt(120 + 30 * i, seed=1100 + i) for i in range(5)]
    cold = [engine.generate(prompt) for prompt in prompts]
    engine.poison()
    restored = engine.generate_all(prompts)
    for prompt, result, reference in zip(prompts, restored, cold, strict=True):
        assert result.cached_tokens == restorable(len(prompt.tokens))
        assert_close(result, reference)


def test_aborting_at_any_moment_leaves_the_engine_right(engine: EngineProcess) -> None:
    prompts = [random_prompt(250, seed=1200 + i) for i in range(6)]
    cold = [engine.generate(prompt) for prompt in prompts]
    for round_ in range(3):
        engine.poison()
        requests = [engine.submit(prompt) for prompt in prompts]
        if round_:
            engine.step(round_)
        engine.abort(requests[::2])
        kept = engine.take(requests[1::2])
        for result, reference in zip(kept, cold[1::2], strict=True):
            assert_close(result, reference)
    if has_own_cache(engine):
        hit = engine.generate(prompts[0])
        engine.poison()
        assert_same(engine.generate(prompts[0]), hit)
    assert engine.metrics()["vllm:umbp_failed_load_tokens"] == 0
