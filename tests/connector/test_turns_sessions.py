"""Sessions whose input comes in parts: vLLM puts what comes next in the place of the last token sampled, so
that what a request has computed, hashed and stored may be taken back.
"""

from __future__ import annotations

from typing import Any

import pytest
from scripted import BLOCK, ScriptedEngine, tokens
from scripted_runtime import WatchedRuntime, slowly
from vllm.v1.request import Request, RequestStatus

from umbp.testing.clock import TickClock
from umbp.testing.engine.shape import Layers
from umbp.testing.reference import ReferenceRuntime

FULL = Layers("full", 1)
LAYERS = {
    "one group": (Layers(),),
    "windows": (FULL, Layers("sliding", 2, 40)),
    "states": (FULL, Layers("mamba", 2)),
}
KINDS = pytest.mark.parametrize("kind", LAYERS)
PARTS = [tokens(30, 1), tokens(BLOCK, 2), tokens(BLOCK - 1, 3), tokens(40, 4)]


def part(engine: ScriptedEngine, more: list[int], max_tokens: int = 2) -> Request:
    engine.add(more, max_tokens, request_id="s", resumable=True)
    return engine.scheduler.requests["s"]


def answer(engine: ScriptedEngine, session: Request) -> None:
    """Step until the session waits for more."""
    for _ in range(60):
        if session.status is RequestStatus.WAITING_FOR_STREAMING_REQ:
            return
        engine.step()
    raise AssertionError(f"still {session.status.name}")


def end(engine: ScriptedEngine) -> None:
    engine.add([7], request_id="s")
    engine.drain()


def reused_by(engine: ScriptedEngine, prompt: list[int]) -> int:
    engine.forget_prefixes()
    before = engine.reused_tokens
    engine.run(prompt)
    return engine.reused_tokens - before


@KINDS
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("saves", [False, True], ids=["prompt", "output"])
def test_all_parts_of_a_session_are_stored_and_found_again(
    make_engine: Any, kind: str, depth: int, saves: bool
) -> None:
    pool = WatchedRuntime(ReferenceRuntime())
    engine = make_engine(pool, {"save_decode_cache": saves}, layers=LAYERS[kind], depth=depth)
    for more in PARTS:
        session = part(engine, more, 2)
        answer(engine, session)
    engine.land()
    said = list(session.all_token_ids)
    computed = session.num_prompt_tokens if kind == "states" or not saves else len(said) - 1
    end(engine)
    assert reused_by(engine, [*said, *tokens(30, 9)]) == computed // BLOCK * BLOCK
    assert engine.count("failed_load_tokens") == 0
    engine.check_drained()
    pool.check_unpinned()


@KINDS
@pytest.mark.parametrize("depth", [1, 2])
def test_parts_that_come_while_the_session_is_answered_wait_their_turn(
    make_engine: Any, kind: str, depth: int
) -> None:
    engine = make_engine(ReferenceRuntime(), {"save_decode_cache": True}, layers=LAYERS[kind], depth=depth)
    for more in PARTS:
        session = part(engine, more, 3)
        engine.step()
    answer(engine, session)
    assert session.num_prompt_tokens >= sum(map(len, PARTS))
    end(engine)
    engine.check_drained()


@KINDS
def test_a_session_restores_what_another_has_left(make_engine: Any, kind: str) -> None:
    clock = TickClock()
    engine = make_engine(slowly(ReferenceRuntime(), clock, load=1.0), layers=LAYERS[kind])
    engine.run(tokens(100))
    engine.forget_prefixes()
    session = part(engine, tokens(100), 5)
    engine.step()
    assert session.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    part(engine, tokens(50, 5), 2)
    clock.advance(1.0)
    answer(engine, session)
    assert engine.restored_tokens() == 96
    end(engine)
    engine.check_drained()


@KINDS
@pytest.mark.parametrize("moment", ["loading", "running", "between parts", "with a part to come"])
def test_a_session_may_be_aborted_at_any_moment(make_engine: Any, kind: str, moment: str) -> None:
    clock = TickClock()
    pool = WatchedRuntime(ReferenceRuntime())
    engine = make_engine(slowly(pool, clock, load=1.0), layers=LAYERS[kind])
    engine.run(tokens(60))
    engine.forget_prefixes()
    session = part(engine, tokens(60), 5)
    engine.step()
    if moment != "loading":
        clock.advance(1.0)
        engine.step()
        engine.step()
    if moment == "with a part to come":
        part(engine, tokens(50, 5))
    if moment == "between parts":
        answer(engine, session)
    engine.abort("s")
    clock.advance(1.0)
    engine.drain()
    engine.check_drained()
    pool.check_unpinned()


@pytest.mark.parametrize("kind", ["one group", "windows"])
def test_a_preempted_session_goes_on_with_all_it_had(make_engine: Any, kind: str) -> None:
    engine = make_engine(ReferenceRuntime(), {"save_decode_cache": True}, layers=LAYERS[kind])
    session = part(engine, tokens(60, 1), 3)
    answer(engine, session)
    part(engine, tokens(60, 2), 20)
    for _ in range(4):
        engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    answer(engine, session)
    assert session.num_preemptions == 1
    assert engine.restored_tokens() >= 7 * BLOCK
    said = list(session.all_token_ids)
    end(engine)
    assert reused_by(engine, said) == (len(said) - 1) // BLOCK * BLOCK
    engine.check_drained()


def test_what_took_the_place_of_stored_tokens_is_stored_anew(make_engine: Any) -> None:
    """Scenario: a session is set back to before blocks that are stored already, and goes on with other
    tokens. What is stored of it must not be taken for the new ones.
    """
    pool = ReferenceRuntime()
    engine = make_engine(pool, {"save_decode_cache": True})
    session = part(engine, tokens(2 * BLOCK), 3 * BLOCK + 2)
    answer(engine, session)
    assert engine.connector.scheduler_side._requests["s"].tracker.saved_tokens == 5 * BLOCK
    del session._all_token_ids[2 * BLOCK + 1 :]
    session.num_computed_tokens = 2 * BLOCK
    part(engine, tokens(80, 8), 5)
    answer(engine, session)
    said = list(session.all_token_ids)
    assert said[: 3 * BLOCK] == tokens(2 * BLOCK) + tokens(BLOCK, 8)
    end(engine)
    alone = make_engine(pool)
    assert reused_by(alone, said) == (len(said) - 1) // BLOCK * BLOCK
    for each in (engine, alone):
        each.check_drained()
