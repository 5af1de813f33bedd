"""`write_policy: lazy` on a real engine: nothing is stored before the engine needs the room, and what it has
evicted comes back exactly.
"""

from __future__ import annotations

import pytest

from e2e.harness import BLOCK_TOKENS, UMBP, EnginePool, EngineSpec, assert_close, assert_same, random_prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow]

BLOCKS = 40
SPEC = EngineSpec(
    connector=(*UMBP, ("write_policy", "lazy")),
    blocks=BLOCKS,
    max_model_tokens=512,
    arguments=(("max_num_batched_tokens", 128),),
)
LENGTH = 8 * BLOCK_TOKENS + 9


def test_evicted_prompts_are_restored_exactly_and_kept_ones_are_not_stored(engines: EnginePool) -> None:
    engine = engines.get(SPEC)
    prompts = [random_prompt(LENGTH, seed=6000 + i) for i in range(8)]
    cold = [engine.generate(prompts[0])]
    hit = engine.generate(prompts[0])
    assert engine.metrics()["vllm:umbp_stored_tokens"] == 0, "the engine still has it all"

    cold += [engine.generate(prompt) for prompt in prompts[1:]]
    stored = engine.metrics()["vllm:umbp_stored_tokens"]
    assert 0 < stored < 8 * 8 * BLOCK_TOKENS, "the last prompts are in the engine alone"

    before = engine.metrics()["vllm:umbp_loaded_tokens"]
    restored = engine.generate(prompts[0])
    assert engine.metrics()["vllm:umbp_loaded_tokens"] - before == 8 * BLOCK_TOKENS
    assert_same(restored, hit)
    for prompt, reference in zip(prompts, cold, strict=True):
        again = engine.generate(prompt)
        assert again.cached_tokens == 8 * BLOCK_TOKENS, "from the engine, from the pool, or a part from each"
        assert_close(again, reference)
    assert engine.metrics()["vllm:umbp_failed_load_tokens"] == 0
    assert engine.metrics()["vllm:umbp_dropped_store_tokens"] == 0
