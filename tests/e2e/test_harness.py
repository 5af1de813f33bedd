"""The tools themselves, on an engine without a connector: what they call equal is, what they call different
is.
"""

from __future__ import annotations

import pytest

from e2e import models
from e2e.harness import (
    EngineError,
    EnginePool,
    EngineSpec,
    assert_close,
    assert_differs,
    assert_same,
    random_prompt,
)
from umbp.testing.groups import is_running, shared_memory_of

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SPEC = EngineSpec()
IN_PROCESS = EngineSpec(is_in_process=True)
TWO_RANKS = EngineSpec(tensor_parallel=2)
PROMPT_TOKENS = 300
SEEDS = range(4)


@pytest.mark.parametrize("position", [0, 40, 150])
def test_one_early_token_changes_the_first_answer(engines: EnginePool, position: int) -> None:
    engine = engines.get(SPEC)
    for seed in SEEDS:
        prompt = random_prompt(PROMPT_TOKENS, seed=seed)
        reference = engine.generate(prompt)
        assert_differs(engine.generate(prompt.changed_at(position)), reference)


def test_the_kv_of_a_prompt_is_the_same_bytes_when_computed_again_and_others_when_poisoned(
    engines: EnginePool,
) -> None:
    engine = engines.get(SPEC)
    engine.record_blocks()
    prompt = random_prompt(PROMPT_TOKENS, seed=1)
    first = engine.generate(prompt)
    digests = engine.kv_digests(first, PROMPT_TOKENS)
    (layers,) = digests
    assert len(layers) == models.TINY.layers
    assert all(len(set(blocks)) == PROMPT_TOKENS // 32 for blocks in layers.values())
    engine.call_workers("e2e.probes:poison_blocks")
    assert engine.kv_digests(first, PROMPT_TOKENS) != digests
    engine.forget()
    again = engine.generate(prompt)
    assert engine.kv_digests(again, PROMPT_TOKENS) == digests
    assert_same(again, first)


def test_wrong_kv_shows_in_the_answer(engines: EnginePool) -> None:
    """A hit on poisoned blocks, which the engine takes for its own."""
    engine = engines.get(SPEC)
    prompt = random_prompt(PROMPT_TOKENS, seed=1)
    engine.generate(prompt)
    hit = engine.generate(prompt)
    engine.call_workers("e2e.probes:poison_blocks")
    assert_differs(engine.generate(prompt), hit)
    engine.forget()


def test_an_aborted_request_leaves_the_engine_working(engines: EnginePool) -> None:
    engine = engines.get(SPEC)
    victim = engine.submit(random_prompt(PROMPT_TOKENS, seed=1, max_tokens=500))
    engine.step(2)
    engine.abort([victim])
    assert engine.generate(random_prompt(PROMPT_TOKENS, seed=2)).finish_reason == "length"


@pytest.mark.parametrize("spec", [SPEC, IN_PROCESS, TWO_RANKS], ids=["one rank", "in process", "two ranks"])
def test_an_engines_own_hit_is_close_to_cold_and_two_hits_are_the_same(
    engines: EnginePool, spec: EngineSpec
) -> None:
    engine = engines.get(spec)
    for seed in SEEDS:
        prompt = random_prompt(PROMPT_TOKENS, seed=seed)
        cold, hit, again = (engine.generate(prompt) for _ in range(3))
        assert (cold.cached_tokens, hit.cached_tokens) == (0, PROMPT_TOKENS // 32 * 32)
        assert_close(hit, cold)
        assert_same(again, hit)


def test_a_missed_deadline_ends_every_process_of_the_engine_and_what_it_had(engines: EnginePool) -> None:
    engine = engines.get(TWO_RANKS)
    pids = engine.pids()
    assert len(pids) > 3, "child, engine core and two workers"
    memory = shared_memory_of(pids)
    assert memory, "vLLM's queues of messages"
    # More than a busy machine could have computed when it is asked for.
    many = [engine.submit(random_prompt(100, seed=n, max_tokens=900)) for n in range(24)]
    with pytest.raises(EngineError, match="in time"):
        engine.take(many, timeout_s=0.05)
    assert not engine.is_alive
    assert not [pid for pid in pids if is_running(pid)]
    assert not [each for each in memory if each.exists()]
