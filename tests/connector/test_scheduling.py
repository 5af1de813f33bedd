"""Whatever is done to a request, at whatever moment: nothing asserts, nothing leaks, no byte is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from scripted import BLOCK, ScriptedEngine, tokens
from scripted_runtime import CountingRuntime, slowly
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from umbp.testing.clock import TickClock
from umbp.testing.reference import ReferenceRuntime
from umbp.testing.runtimes import PickyRuntime, plain

WAYS = pytest.mark.parametrize("load_async", [True, False], ids=["async", "sync"])
RANKS = pytest.mark.parametrize("ranks", [1, 2], ids=["tp1", "tp2"])


def loading(engine: ScriptedEngine, prompt: list[int], max_tokens: int = 2) -> Request:
    """A request whose asynchronous load is under way."""
    request = engine.add(prompt, max_tokens)
    engine.step()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    return request


@RANKS
@pytest.mark.parametrize(
    ("load_async", "depth"), [(True, 1), (False, 1), (True, 2)], ids=["async", "sync", "ahead"]
)
def test_preempted_requests_resume_and_end_as_if_nothing_had_been(
    make_pool: Any, make_engine: Any, load_async: bool, ranks: int, depth: int
) -> None:
    pool = make_pool()
    options = {"load_async": load_async, "save_decode_cache": True}
    engine = make_engine(pool, options, blocks=20, ranks=ranks, depth=depth)
    alone = [list(engine.run(tokens(80, seed), 60).output_token_ids) for seed in range(3)]
    engine.forget_prefixes()
    together = [engine.add(tokens(80, seed), 60) for seed in range(3)]
    engine.drain()
    assert sum(request.num_preemptions for request in together) > 0
    assert [list(request.output_token_ids) for request in together] == alone
    assert engine.restored_tokens() > 0
    engine.check_drained()
    pool.check_unpinned()


def test_a_preempted_request_gets_back_what_it_stored_itself(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(make_pool(), prefix_caching=False)
    request = engine.add(tokens(100), 20)
    for _ in range(4):
        engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.drain()
    assert request.num_preemptions == 1
    assert engine.restored_tokens() == 96
    assert engine.count("hit_tokens") == 0, "counted at the first admission alone"
    engine.check_drained()


@pytest.mark.parametrize("moment", ["waiting", "loading", "landed", "promoted", "running", "in_the_step"])
@RANKS
def test_a_request_may_be_aborted_at_any_moment(
    make_pool: Any, make_engine: Any, ranks: int, moment: str
) -> None:
    clock = TickClock()
    pool = make_pool()
    engine = make_engine(slowly(pool, clock, load=1.0), ranks=ranks)
    engine.run(tokens(100))
    engine.forget_prefixes()
    if moment == "waiting":
        request = engine.add(tokens(100), 5)
        engine.abort(request.request_id)
        assert engine.drain() <= 2
    else:
        request = loading(engine, tokens(100), 5)
        if moment == "landed":
            engine.between = lambda: clock.advance(1.0)
            engine.step()
            engine.between = lambda: engine.abort(request.request_id)
        elif moment != "loading":
            clock.advance(1.0)
            engine.step()
            steps = {"promoted": 1, "running": 2, "in_the_step": 1}[moment]
            for _ in range(steps):
                engine.step()
            if moment == "in_the_step":
                engine.between = lambda: engine.abort(request.request_id)
        if moment != "in_the_step" and moment != "landed":
            engine.abort(request.request_id)
        engine.step()
        engine.between = lambda: None
        clock.advance(1.0)
        engine.drain()
    assert request.status == RequestStatus.FINISHED_ABORTED
    engine.check_drained()
    pool.check_unpinned()
    engine.between = lambda: clock.advance(1.0)
    engine.run(tokens(100))
    engine.check_drained()


def test_an_aborted_load_keeps_its_blocks_until_it_is_over(make_pool: Any, make_engine: Any) -> None:
    clock = TickClock()
    engine = make_engine(slowly(make_pool(), clock, load=1.0), blocks=20)
    engine.run(tokens(100))
    engine.forget_prefixes()
    request = loading(engine, tokens(100))
    engine.abort(request.request_id)
    for _ in range(3):
        engine.step()
    assert engine.pool.get_num_free_blocks() < 19
    other = engine.add(tokens(150, 5), 2)
    engine.step()
    clock.advance(1.0)
    engine.drain()
    assert other.request_id in engine.finished
    engine.check_drained()


def test_a_slow_store_pins_its_blocks_until_every_rank_has_reported(make_pool: Any, make_engine: Any) -> None:
    clock = TickClock()
    pool = make_pool()
    engine = make_engine(slowly(pool, clock, store=1.0), blocks=20, ranks=2)
    engine.add(tokens(100))
    engine.step()
    engine.step()
    assert engine.finished
    assert engine.connector.has_pending_push_work()
    assert engine.scheduler.has_requests(), "the engine core goes on stepping"
    assert engine.pool.get_num_free_blocks() == 19 - 6
    engine.add(tokens(120, 5), 3)
    engine.step()
    clock.advance(1.0)
    engine.between = lambda: clock.advance(1.0)
    engine.drain()
    engine.check_drained()
    pool.check_unpinned()
    engine.forget_prefixes()
    engine.run(tokens(100))
    assert engine.restored_tokens() == 96


def test_a_slow_load_serialises_nobody_else(make_pool: Any, make_engine: Any) -> None:
    clock = TickClock()
    engine = make_engine(slowly(make_pool(), clock, load=1.0))
    engine.run(tokens(100))
    engine.forget_prefixes()
    slow = loading(engine, tokens(100))
    unrelated = engine.add(tokens(50, 7))
    same_prefix = engine.add(tokens(100), 2)
    for _ in range(3):
        engine.step()
    assert unrelated.request_id in engine.finished
    assert same_prefix.status == RequestStatus.WAITING_FOR_REMOTE_KVS, "it has a load of its own"
    clock.advance(1.0)
    engine.drain()
    assert {slow.request_id, same_prefix.request_id} <= engine.finished.keys()
    engine.check_drained()


@pytest.mark.parametrize("runner", [1, 2])
def test_a_step_that_computes_waits_for_no_load(make_pool: Any, make_engine: Any, runner: int) -> None:
    # The second model runner begins loads when it has left its forward's context, as if there had been none.
    clock = TickClock()
    engine = make_engine(plain(slowly(make_pool(), clock, load=1.0), local=True), runner=runner)
    engine.run(tokens(100))
    engine.forget_prefixes()
    engine.add(tokens(50, 7), 5)
    request = engine.add(tokens(100), 2)
    start_s = clock()
    for _ in range(3):
        engine.step()
        assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    assert clock() == start_s
    engine.drain()
    assert clock() > start_s, "a step that has nothing to compute waits"
    engine.check_drained()


def test_a_transfer_that_never_ends_by_itself_is_cancelled_after_the_timeout(make_engine: Any) -> None:
    clock = TickClock()
    engine = make_engine(slowly(ReferenceRuntime(), clock, load=60.0), {"timeout_ms": 1})
    engine.run(tokens(100))
    engine.forget_prefixes()
    request = engine.add(tokens(100), 2)
    engine.drain()
    assert request.request_id in engine.finished
    assert clock.now_s < 60
    engine.check_drained()


@WAYS
def test_a_request_that_does_not_read_caches_is_computed(
    make_pool: Any, make_engine: Any, load_async: bool
) -> None:
    runtime = CountingRuntime(make_pool())
    engine = make_engine(runtime, {"load_async": load_async})
    engine.run(tokens(100))
    engine.forget_prefixes()
    runtime.asked.clear()
    engine.run(tokens(100), reads_cache=False)
    assert engine.restored_tokens() == 0
    assert runtime.asked["hold"] == 0
    engine.check_drained()


@pytest.mark.parametrize("is_stored", [True, False], ids=["hit", "miss"])
def test_a_repeated_question_does_not_touch_the_pool(
    make_pool: Any, make_engine: Any, is_stored: bool
) -> None:
    runtime = CountingRuntime(make_pool())
    engine = make_engine(runtime, blocks=20)
    if is_stored:
        engine.run(tokens(150))
        engine.forget_prefixes()
    hog = engine.add(tokens(200, 3), 40)
    for _ in range(5):
        engine.step()
    runtime.asked.clear()
    waiting = engine.add(tokens(150), 2)
    for _ in range(20):
        engine.step()
    assert waiting.status == RequestStatus.WAITING, "the engine has no blocks for it"
    assert not hog.is_finished()
    assert runtime.asked["hold"] == 1
    engine.drain()
    assert engine.restored_tokens() == (144 if is_stored else 0)
    engine.check_drained()


def test_a_promise_survives_eviction_for_as_long_as_the_request_waits(
    make_pool: Any, make_engine: Any
) -> None:
    pool = make_pool(16)
    engine = make_engine(pool, {"save_decode_cache": True}, blocks=20, max_batched_tokens=200)
    engine.run(tokens(150))
    engine.forget_prefixes()
    hog = engine.add(tokens(170, 3), 100)
    waiting = engine.add(tokens(150), 2)
    engine.step()
    assert waiting.status == RequestStatus.WAITING, "there are no blocks for it"
    while not hog.is_finished():
        engine.step()
    assert engine.count("dropped_store_tokens") > 0, "there was no room but what is promised"
    engine.drain()
    assert engine.restored_tokens() == 144
    assert engine.invalid_blocks == []
    engine.check_drained()
    pool.check_unpinned()


@pytest.mark.parametrize("local_blocks", [0, 3, 5, 6, 9])
def test_the_answer_is_what_lies_beyond_the_engines_own_hit_and_never_negative(
    make_pool: Any, make_engine: Any, local_blocks: int
) -> None:
    pool = make_pool()
    engine = make_engine(pool)
    engine.run(tokens(5 * BLOCK + 1))
    request = engine.make_request(tokens(10 * BLOCK))
    expected = max(5 - local_blocks, 0) * BLOCK
    for _ in range(2):
        answer = engine.connector.get_num_new_matched_tokens(request, local_blocks * BLOCK)
        assert answer == (expected, expected > 0)
    request.status = RequestStatus.FINISHED_ABORTED
    assert engine.connector.request_finished(request, []) == (False, None)
    engine.check_drained()
    pool.check_unpinned()


def test_an_answer_follows_the_engines_own_hit(make_pool: Any, make_engine: Any) -> None:
    pool = make_pool()
    engine = make_engine(pool)
    engine.run(tokens(8 * BLOCK + 1))
    request = engine.make_request(tokens(8 * BLOCK + 1))
    for local, beyond in ((2, 6), (4, 4), (8, 0), (0, 8), (2, 6)):
        assert engine.connector.get_num_new_matched_tokens(request, local * BLOCK)[0] == beyond * BLOCK
    request.status = RequestStatus.FINISHED_ABORTED
    engine.connector.request_finished(request, [])
    pool.check_unpinned()


def test_the_second_question_after_a_load_has_landed_finds_nothing_more(
    make_pool: Any, make_engine: Any
) -> None:
    clock = TickClock()
    engine = make_engine(slowly(make_pool(), clock, load=1.0))
    engine.run(tokens(100))
    engine.forget_prefixes()
    request = loading(engine, tokens(100))
    assert engine.connector.get_num_new_matched_tokens(request, 0) == (0, False)
    clock.advance(1.0)
    engine.drain()
    assert engine.restored_tokens() == 96


def test_the_end_of_a_request_that_was_only_asked_about_leaves_nothing(
    make_pool: Any, make_engine: Any
) -> None:
    pool = make_pool()
    engine = make_engine(pool)
    engine.run(tokens(100))
    stranger = engine.make_request(tokens(100))
    stranger.status = RequestStatus.FINISHED_ABORTED
    assert engine.connector.request_finished(stranger, []) == (False, None)
    asked = engine.make_request(tokens(100))
    assert engine.connector.get_num_new_matched_tokens(asked, 0)[0] == 96
    asked.status = RequestStatus.FINISHED_ABORTED
    assert engine.connector.request_finished(asked, []) == (False, None)
    engine.check_drained()
    pool.check_unpinned()


def test_blocks_are_given_back_in_the_step_that_stored_them(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(make_pool())
    assert engine.run(tokens(60)).request_id in engine.finished
    assert engine.steps <= 2, "no step is added to wait for a store on this host"


def test_the_engine_goes_to_sleep_when_all_is_done(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(make_pool())
    engine.run(tokens(100), 3)
    engine.forget_prefixes()
    engine.run(tokens(100), 3)
    assert not engine.scheduler.has_requests()
    assert not engine.connector.has_pending_push_work()


def test_a_cache_never_asks_to_be_delivered_to(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(make_pool())
    assert isinstance(engine.scheduler, Scheduler)
    assert engine.scheduler.requires_kv_delivery is False


def test_clearing_the_connector_removes_all(make_pool: Any, make_engine: Any) -> None:
    pool = make_pool()
    engine = make_engine(pool)
    engine.run(tokens(100))
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.run(tokens(100))
    assert engine.restored_tokens() == 0
    engine.forget_prefixes()
    engine.run(tokens(100))
    assert engine.restored_tokens() == 96
    pool.check_unpinned()


@RANKS
def test_after_a_change_of_weights_no_old_byte_comes_back(
    make_pool: Any, make_engine: Any, ranks: int
) -> None:
    engine = make_engine(make_pool(), {"save_decode_cache": True}, ranks=ranks)
    engine.run(tokens(100))
    running = engine.add(tokens(100, 4), 50)
    for _ in range(10):
        engine.step()
    assert engine.change_weights()
    engine.run(tokens(100))
    engine.drain()
    assert running.request_id in engine.finished
    engine.forget_prefixes()
    before = engine.restored_tokens()
    engine.run(tokens(100))
    engine.run(tokens(100, 4))
    assert engine.restored_tokens() == before + 2 * 96
    engine.check_drained()


def test_what_a_running_request_computed_before_a_clear_is_not_stored_after_it(
    make_pool: Any, make_engine: Any
) -> None:
    engine = make_engine(make_pool(), {"save_decode_cache": True})
    request = engine.add(tokens(100), 40)
    for _ in range(5):
        engine.step()
    stored = engine.count("stored_tokens")
    engine.scheduler.reset_connector_cache()
    engine.drain()
    assert request.request_id in engine.finished
    assert engine.count("stored_tokens") == stored == 96
    engine.forget_prefixes()
    engine.run(tokens(100))
    assert engine.restored_tokens() == 0


def test_a_store_under_way_when_the_pool_is_cleared_leaves_nothing_there(
    make_pool: Any, make_engine: Any
) -> None:
    clock = TickClock()
    pool = make_pool()
    engine = make_engine(slowly(pool, clock, store=1.0))
    engine.add(tokens(100))
    engine.step()
    engine.step()
    assert engine.connector.has_pending_push_work()
    engine.scheduler.reset_connector_cache()
    engine.between = lambda: clock.advance(1.0)
    engine.drain()
    engine.forget_prefixes()
    engine.run(tokens(100))
    assert engine.restored_tokens() == 0
    pool.check_unpinned()


def test_a_load_under_way_when_the_pool_is_cleared_ends_as_a_recomputation(
    make_pool: Any, make_engine: Any
) -> None:
    clock = TickClock()
    pool = make_pool()
    engine = make_engine(slowly(pool, clock, load=1.0))
    engine.run(tokens(100))
    engine.forget_prefixes()
    request = loading(engine, tokens(100))
    engine.scheduler.reset_connector_cache()
    clock.advance(1.0)
    engine.drain()
    assert request.request_id in engine.finished
    engine.check_drained()
    pool.check_unpinned()


def test_what_was_lost_is_found_again_once_it_is_stored_anew(make_pool: Any, make_engine: Any) -> None:
    # A block that was lost once hid the whole prompt for half a minute, though it was there again at once.
    pool = PickyRuntime(make_pool(), lambda rank, index, key: index == 0)
    engine = make_engine(pool)
    engine.run(tokens(100))
    engine.forget_prefixes()
    engine.run(tokens(100))
    pool.loses = lambda rank, index, key: False
    before = engine.restored_tokens()
    engine.forget_prefixes()
    engine.run(tokens(100))
    assert engine.restored_tokens() == before, "it is there, and can't be loaded"
    assert engine.scheduler.reset_connector_cache()
    engine.forget_prefixes()
    for _ in range(2):
        engine.run(tokens(100))
        engine.forget_prefixes()
    assert engine.restored_tokens() == before + 96
    engine.check_drained()


def test_what_a_clear_took_from_a_load_is_found_again_once_it_is_stored_anew(
    make_pool: Any, make_engine: Any
) -> None:
    # A system prompt was being loaded when new weights came: nobody found it for the next half minute.
    clock = TickClock()
    engine = make_engine(slowly(make_pool(), clock, load=1.0))
    engine.run(tokens(100))
    engine.forget_prefixes()
    loading(engine, tokens(100))
    engine.scheduler.reset_connector_cache()
    engine.between = lambda: clock.advance(1.0)
    engine.drain()
    engine.run(tokens(100, 1))
    engine.forget_prefixes()
    engine.run(tokens(100))
    engine.forget_prefixes()
    engine.run(tokens(100))
    assert engine.restored_tokens() == 96
    engine.check_drained()
