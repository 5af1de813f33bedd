"""A pipeline of two stages on a real engine: each keeps its own layers, in a namespace of its own, while two
batches are under way. Two engines for all tests of this file.
"""

from __future__ import annotations

import json

import pytest

from e2e.harness import (
    BLOCK_TOKENS,
    UMBP,
    EnginePool,
    EngineProcess,
    EngineSpec,
    assert_close,
    assert_differs,
    assert_same,
    random_prompt,
    restorable,
)
from e2e.rules import assert_restored_as_own_hit
from umbp.runtime.wrap.faulty import FAULTS_VARIABLE

pytestmark = [pytest.mark.engine, pytest.mark.slow]

CHUNKS = (("max_num_batched_tokens", 128),)
SPEC = EngineSpec(connector=UMBP, pipeline_parallel=2, blocks=32, max_model_tokens=512, arguments=CHUNKS)
FAILING = EngineSpec(
    connector=UMBP,
    pipeline_parallel=2,
    blocks=100,
    environment=((FAULTS_VARIABLE, json.dumps({"seed": 7, "load_keys": 0.2})),),
)


@pytest.fixture
def engine(engines: EnginePool) -> EngineProcess:
    found = engines.get(SPEC)
    found.record_blocks()
    return found


@pytest.mark.parametrize("length", [5 * BLOCK_TOKENS, 300])
def test_every_stage_restores_what_the_engines_own_hit_has(engine: EngineProcess, length: int) -> None:
    restored = assert_restored_as_own_hit(engine, random_prompt(length, seed=length), restorable(length))
    assert [len(layers) for layers in restored.digests] == [2, 2], "half of the layers on each stage"


def test_one_changed_early_token_is_a_miss_and_changes_the_answer(engine: EngineProcess) -> None:
    prompt = random_prompt(200, seed=5001)
    reference = engine.generate(prompt)
    engine.poison()
    other = engine.generate(prompt.changed_at(3))
    assert other.cached_tokens == 0
    assert_differs(other, reference)


def test_resetting_with_the_connector_forgets_on_every_stage(engine: EngineProcess) -> None:
    prompt = random_prompt(150, seed=5002)
    first = engine.generate(prompt)
    assert engine.reset_prefix_cache(with_connector=True)
    assert engine.generate(prompt).cached_tokens == 0
    assert engine.shows("vllm:umbp_pool_objects", 2 * restorable(150) // BLOCK_TOKENS)
    engine.poison()
    again = engine.generate(prompt)
    assert again.cached_tokens == restorable(150)
    assert_close(again, first)


def test_batches_that_follow_each_other_through_the_stages_are_restored_right(engine: EngineProcess) -> None:
    """More requests than fit at once: some wait, and some are aborted while they load."""
    prompts = [random_prompt(120 + 30 * i, seed=5100 + i, max_tokens=40) for i in range(6)]
    cold = [engine.generate(prompt) for prompt in prompts]
    for round_ in range(3):
        engine.poison()
        requests = [engine.submit(prompt) for prompt in prompts]
        engine.step(round_)
        engine.abort(requests[:round_])
        for result, reference in zip(engine.take(requests[round_:]), cold[round_:], strict=True):
            assert_close(result, reference)
    hit = engine.generate(prompts[0])
    engine.poison()
    assert_same(engine.generate(prompts[0]), hit)
    assert engine.metrics()["vllm:umbp_failed_load_tokens"] == 0


def test_with_a_fifth_of_loads_failing_every_answer_is_right(engines: EnginePool) -> None:
    engine = engines.get(FAILING)
    prompts = [random_prompt(100 + 45 * i, seed=5200 + i) for i in range(6)]
    cold = [engine.generate(prompt) for prompt in prompts]
    for _ in range(2):
        engine.poison()
        for result, reference in zip(engine.generate_all(prompts), cold, strict=True):
            assert result.finish_reason == "length"
            assert_close(result, reference)
    metrics = engine.metrics()
    assert metrics["vllm:umbp_failed_load_tokens"] > 0
    assert metrics["vllm:umbp_loaded_tokens"] > 0
