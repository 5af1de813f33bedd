"""Hits that end inside a block, on a real engine: where states are cut finer than blocks, as much is restored
as the engine's own prefix cache would have had, and answered as if it had been computed.

The first computation of a prompt ends a step where its last hash does, so what comes after is computed in the
same piece both times, and every bit is comparable. (vLLM's own hits in a prompt of less than a block give
other bits than either, also without a connector.)
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from e2e import models
from e2e.harness import (
    EnginePool,
    EngineProcess,
    assert_differs,
    assert_same,
    gained,
    random_prompt,
)
from e2e.kinds import MIB, _spec

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCK, HASH = 160, 32
SPEC = _spec(
    8 * MIB,
    model=models.DELTA,
    arguments=(("max_num_batched_tokens", 320), ("prefix_match_unit", HASH)),
)


@pytest.fixture
def engine(engines: EnginePool) -> EngineProcess:
    return engines.get(SPEC)


@pytest.mark.parametrize("length", [113, 368, 470])
def test_a_prompt_is_restored_up_to_its_last_hash_and_answered_as_if_it_had_been_computed(
    engine: EngineProcess, length: int
) -> None:
    prompt = random_prompt(length, seed=6000 + length)
    cold = engine.generate(prompt)
    hit = engine.generate(prompt)
    assert hit.cached_tokens == (length - 1) // HASH * HASH
    assert hit.cached_tokens % BLOCK, "or this test would be about whole blocks"
    before = engine.metrics()
    engine.poison()

    restored = engine.generate(prompt)

    assert restored.cached_tokens == hit.cached_tokens
    assert_same(replace(restored, cached_tokens=0), cold)
    after = engine.metrics()
    assert gained(after, before, "vllm:umbp_loaded_tokens") == hit.cached_tokens
    assert hit.cached_tokens % BLOCK, "or this test would be about whole blocks"


def test_a_token_that_differs_inside_the_last_block_is_a_miss_of_that_block(engine: EngineProcess) -> None:
    prompt = random_prompt(368, seed=6100)
    reference = engine.generate(prompt)
    engine.poison()
    other = engine.generate(prompt.changed_at(340))
    assert other.cached_tokens == 2 * BLOCK
    assert_differs(other, reference)
