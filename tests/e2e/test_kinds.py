"""Every kind of model on real engines: several cache groups, windows, chunks and states, speculation, ranks
and stages. A prompt whose KV has left the engine is answered from the pool exactly as the engine's own prefix
cache would have answered it; failing loads and a pool that evicts all the time are not noticed.
"""

from __future__ import annotations

import pytest

from e2e.harness import (
    EnginePool,
    EngineProcess,
    Prompt,
    Result,
    assert_close,
    assert_differs,
    gained,
    random_prompt,
)
from e2e.kinds import KINDS, NO_FAULTS, SOME_FAIL, Kind, set_faults
from e2e.rules import (
    assert_even_accounts,
    assert_finished,
    assert_nothing_fails_while_evicting,
    assert_restored_as_own_hit,
)
from umbp.runtime.wrap.faulty import FaultPlan

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LENGTHS = {"whole blocks": 480, "whole blocks + 1": 481, "whole blocks and a half": 368}
MANY = 6
"""So many prompts don't fit into the pool of any kind."""


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS.keys())
def kind(request: pytest.FixtureRequest) -> Kind:
    """Of module scope, so that all tests of one engine run before the next one starts."""
    found: Kind = request.param
    return found


@pytest.fixture
def engine(kind: Kind, engines: EnginePool) -> EngineProcess:
    found = engines.get(kind.spec)
    set_faults(found, FaultPlan.parse(dict(NO_FAULTS)["UMBP_INJECT_FAULTS"]))
    found.record_blocks()
    return found


def many_prompts(seed: int) -> list[Prompt]:
    return [random_prompt(350 + 30 * number, seed=seed + number) for number in range(MANY)]


def answers(engine: EngineProcess, prompts: list[Prompt]) -> list[Result]:
    return [engine.generate(prompt) for prompt in prompts]


def test_the_cache_has_the_groups_that_the_kind_is_about(engine: EngineProcess, kind: Kind) -> None:
    for groups in engine.call_workers("e2e.probes:cache_groups"):
        assert tuple(groups) == kind.groups


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS.keys())
def test_a_restored_prompt_is_answered_as_the_engines_own_hit_is(
    engine: EngineProcess, kind: Kind, length: int
) -> None:
    prompt = random_prompt(length, seed=4000 + length)
    assert_restored_as_own_hit(engine, prompt, kind.restorable(length))


def test_one_changed_early_token_is_a_miss_and_changes_the_answer(engine: EngineProcess) -> None:
    prompt = random_prompt(368, seed=4100)
    reference = engine.generate(prompt)
    engine.poison()
    other = engine.generate(prompt.changed_at(3))
    assert other.cached_tokens == 0
    assert_differs(other, reference)


def test_wrong_kv_in_any_one_cache_group_shows_in_the_answer(engine: EngineProcess, kind: Kind) -> None:
    """The control of this file's comparisons: the engine's own hits on blocks that were overwritten."""
    prompt = random_prompt(368, seed=4200)
    engine.generate(prompt)
    hit = engine.generate(prompt)
    for group_id in range(len(kind.groups)):
        poisoned = engine.call_workers("e2e.probes:poison_group", hit.request_id, hit.cached_tokens, group_id)
        assert all(count > 0 for count in poisoned)
        wrong = engine.generate(prompt)
        assert wrong.cached_tokens == hit.cached_tokens
        assert_differs(wrong, hit)
        engine.forget()
        engine.generate(prompt)
        hit = engine.generate(prompt)


def test_with_a_fifth_of_loads_failing_every_answer_is_right(engine: EngineProcess) -> None:
    before = engine.metrics()
    prompts = many_prompts(seed=4300)
    for number, prompt in enumerate(prompts):
        set_faults(engine, FaultPlan())
        cold = engine.generate(prompt)
        set_faults(engine, SOME_FAIL[number % 2])
        for _ in range(2):
            engine.poison()
            result = engine.generate(prompt)
            assert_finished(result)
            assert_close(result, cold)
    set_faults(engine, FaultPlan())
    prompts = [random_prompt(170 + 20 * number, seed=4320 + number) for number in range(3)]
    references = answers(engine, prompts)
    set_faults(engine, SOME_FAIL[0])
    engine.poison()
    for result, reference in zip(engine.generate_all(prompts), references, strict=True):
        assert_finished(result)
        assert_close(result, reference)
    after = engine.metrics()
    assert gained(after, before, "vllm:umbp_failed_load_tokens") > 0
    assert gained(after, before, "vllm:umbp_loaded_tokens") > 0
    assert_even_accounts(engine)


def test_a_pool_that_evicts_all_the_time_never_fails_a_load(engine: EngineProcess) -> None:
    assert_nothing_fails_while_evicting(engine, many_prompts(seed=4400), rounds=3)
