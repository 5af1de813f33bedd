"""What may go wrong and must not be noticed, on real engines: failing loads, refused stores, pools too small,
preemption. Right answers, no failed request, and accounts that are even after all has drained.
"""

from __future__ import annotations

import json

import pytest

from e2e.harness import (
    BLOCK_TOKENS,
    UMBP,
    EnginePool,
    EngineSpec,
    assert_close,
    random_prompt,
)
from e2e.rules import assert_even_accounts, assert_finished, assert_nothing_fails_while_evicting
from umbp.runtime.wrap.faulty import FAULTS_VARIABLE

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TINY_POOL = (("total_capacity_bytes", 600_000),)
POOL_BLOCKS = 8
"""So many blocks of the tiny model are in it, on one rank or on each of two."""


def faults(**shares: float) -> tuple[tuple[str, str], ...]:
    return ((FAULTS_VARIABLE, json.dumps({"seed": 7, **shares})),)


FAILING_LOADS = {
    "one rank, async": EngineSpec(connector=UMBP, environment=faults(load_keys=0.2)),
    "one process, sync": EngineSpec(
        connector=(*UMBP, ("load_async", False)), is_in_process=True, environment=faults(load_keys=0.2)
    ),
    "two ranks, async": EngineSpec(connector=UMBP, tensor_parallel=2, environment=faults(load_keys=0.2)),
}

# Prompts come in chunks, none of which the pool holds whole with the one before it.
CHUNKS = (("max_num_batched_tokens", 128),)
# By the plug-in's name, without a module path.
SMALL = EngineSpec(
    connector=TINY_POOL,
    is_in_process=True,
    blocks=24,
    max_model_tokens=512,
    arguments=CHUNKS,
    transfer=(("kv_connector", "UMBPConnector"), ("kv_connector_module_path", None)),
)
SMALL_ON_TWO = EngineSpec(
    connector=TINY_POOL, tensor_parallel=2, blocks=24, max_model_tokens=512, arguments=CHUNKS
)
REFUSED = {
    "one process": EngineSpec(connector=UMBP, is_in_process=True, environment=faults(store_keys=1.0)),
    "two ranks": EngineSpec(connector=UMBP, tensor_parallel=2, environment=faults(store_keys=1.0)),
}


@pytest.fixture(scope="module", params=[SMALL, SMALL_ON_TWO], ids=["one process", "two ranks"])
def small(request: pytest.FixtureRequest) -> EngineSpec:
    """Of module scope, so that all tests of one engine run before the next one starts."""
    found: EngineSpec = request.param
    return found


@pytest.mark.parametrize("spec", FAILING_LOADS.values(), ids=FAILING_LOADS.keys())
def test_with_a_fifth_of_loads_failing_every_answer_is_right(engines: EnginePool, spec: EngineSpec) -> None:
    engine = engines.get(spec)
    prompts = [random_prompt(100 + 45 * i, seed=2000 + i) for i in range(8)]
    cold = [engine.generate(prompt) for prompt in prompts]
    for _ in range(2):
        engine.poison()
        for prompt, reference in zip(prompts, cold, strict=True):
            result = engine.generate(prompt)
            assert_finished(result)
            assert_close(result, reference)
    engine.poison()
    for result, reference in zip(engine.generate_all(prompts), cold, strict=True):
        assert_finished(result)
        assert_close(result, reference)
    metrics = engine.metrics()
    assert metrics["vllm:umbp_failed_load_tokens"] > 0
    assert metrics["vllm:umbp_loaded_tokens"] > 0


def test_a_pool_smaller_than_a_prompt_keeps_its_head_and_never_fails_a_load(
    engines: EnginePool, small: EngineSpec
) -> None:
    engine = engines.get(small)
    prompt = random_prompt(400, seed=2100)
    cold = engine.generate(prompt)
    engine.poison()
    restored = engine.generate(prompt)
    assert restored.cached_tokens == POOL_BLOCKS * BLOCK_TOKENS
    assert_close(restored, cold)
    assert engine.metrics()["vllm:umbp_dropped_store_tokens"] > 0
    assert engine.metrics()["vllm:umbp_failed_load_tokens"] == 0


def test_a_pool_that_evicts_all_the_time_never_fails_a_load(engines: EnginePool, small: EngineSpec) -> None:
    engine = engines.get(small)
    prompts = [random_prompt(70 + 20 * i, seed=2200 + i) for i in range(6)]
    assert_nothing_fails_while_evicting(engine, prompts, rounds=4)


def test_preempted_requests_resume_and_are_answered_right(engines: EnginePool, small: EngineSpec) -> None:
    engine = engines.get(small)
    prompts = [random_prompt(200, seed=2300 + i, max_tokens=60) for i in range(4)]
    cold = [engine.generate(prompt) for prompt in prompts]
    before = engine.metrics()["vllm:num_preemptions"]
    # How loads and steps fall decides whether all of them want blocks at once.
    for _ in range(5):
        engine.poison()
        for result, reference in zip(engine.generate_all(prompts), cold, strict=True):
            assert_finished(result)
            assert_close(result, reference)
        if engine.metrics()["vllm:num_preemptions"] > before:
            break
    else:
        pytest.fail("nothing was preempted: the test shows nothing")
    assert engine.metrics()["vllm:umbp_failed_load_tokens"] == 0
    assert_even_accounts(engine)


@pytest.mark.parametrize("spec", REFUSED.values(), ids=REFUSED.keys())
def test_with_every_store_refused_the_engine_works_as_without(engines: EnginePool, spec: EngineSpec) -> None:
    engine = engines.get(spec)
    prompts = [random_prompt(150 + i, seed=2400 + i) for i in range(3)]
    cold = [engine.generate(prompt) for prompt in prompts]
    engine.poison()
    for prompt, reference in zip(prompts, cold, strict=True):
        result = engine.generate(prompt)
        assert result.cached_tokens == 0
        assert_close(result, reference)
    metrics = engine.metrics()
    assert metrics["vllm:umbp_stored_tokens"] == 0
    assert metrics["vllm:umbp_dropped_store_tokens"] > 0
    assert_even_accounts(engine)
