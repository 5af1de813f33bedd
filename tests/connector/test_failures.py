"""What can't be loaded or stored costs a recomputation: never a wrong byte nor a request, and only once."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from scripted import BLOCK, tokens
from scripted_runtime import PickyRuntime
from vllm.v1.request import RequestStatus

from seeds import seeds
from umbp.connector.scheduler.account import Quarantine
from umbp.connector.scheduler.write import STORE_TRIES
from umbp.runtime.null import NullRuntime
from umbp.runtime.wrap.faulty import FaultPlan, FaultyRuntime
from umbp.testing.clock import TickClock
from umbp.testing.reference import ReferenceRuntime

WAYS = pytest.mark.parametrize("load_async", [True, False], ids=["async", "sync"])
RANKS = pytest.mark.parametrize("ranks", [1, 2], ids=["tp1", "tp2"])
STEPS_ENOUGH = 30


@WAYS
@RANKS
@pytest.mark.parametrize("place", [0, 1, 5])
def test_a_block_that_is_lost_on_one_rank_is_recomputed_once(
    make_pool: Any, make_engine: Any, load_async: bool, ranks: int, place: int
) -> None:
    runtime = PickyRuntime(make_pool(), lambda rank, index, key: rank == ranks - 1 and index == place)
    engine = make_engine(runtime, {"load_async": load_async}, ranks=ranks)
    first = engine.run(tokens(100), 6)
    engine.forget_prefixes()
    again = engine.add(tokens(100), 6)
    assert engine.drain() < STEPS_ENOUGH
    assert list(again.output_token_ids) == list(first.output_token_ids)
    assert runtime.loads == [6], "a load that failed is not tried again for its request"
    assert engine.count("failed_load_requests") == 1
    assert engine.count("failed_load_tokens") == BLOCK
    assert engine.restored_tokens() == 5 * BLOCK
    engine.check_drained()


@WAYS
@pytest.mark.parametrize("seed", seeds(6))
def test_with_a_fifth_of_all_loads_failing_every_request_ends_right(
    make_pool: Any, make_engine: Any, load_async: bool, seed: int
) -> None:
    plan = FaultPlan(seed=seed, load_keys=0.2)
    engine = make_engine(FaultyRuntime(make_pool(), plan), {"load_async": load_async}, ranks=1 + seed % 2)
    prompts = [tokens(3 * BLOCK, 1) + tokens(2 * BLOCK + index, index) for index in range(8)]
    alone = [list(engine.run(prompt, 4).output_token_ids) for prompt in prompts]
    engine.forget_prefixes()
    together = [engine.add(prompt, 4) for prompt in prompts]
    assert engine.drain() < 100
    assert [list(request.output_token_ids) for request in together] == alone
    assert engine.invalid_blocks
    engine.check_drained()


@WAYS
def test_with_all_loads_failing_all_is_computed(make_pool: Any, make_engine: Any, load_async: bool) -> None:
    engine = make_engine(
        FaultyRuntime(make_pool(), FaultPlan(load_jobs=1.0)), {"load_async": load_async}, ranks=2
    )
    for _ in range(3):
        engine.run(tokens(100), 3)
        engine.forget_prefixes()
    assert engine.restored_tokens() == 0
    assert engine.steps < 3 * STEPS_ENOUGH
    engine.check_drained()


@pytest.mark.parametrize("loser", [0, 1])
@pytest.mark.parametrize("place", [0, 2])
def test_no_rank_keeps_what_was_computed_from_a_load_that_failed_on_another(
    make_engine: Any, loser: int, place: int
) -> None:
    """Scenario: the load of a step fails on one rank, and the forward of that step computes garbage on all
    of them. The other rank has nothing to complain of; had it stored its blocks, a later engine would load
    them.
    """
    pool = ReferenceRuntime()
    prompt = tokens(4 * BLOCK) + tokens(4 * BLOCK + 1, 3)
    healthy = make_engine(pool, {"load_async": False}, ranks=2)
    healthy.run(tokens(4 * BLOCK + 1))
    losing = PickyRuntime(pool, lambda rank, index, key: rank == loser and index == place)
    unlucky = make_engine(losing, {"load_async": False}, ranks=2, max_batched_tokens=200)
    unlucky.run(prompt, 4)
    assert unlucky.count("failed_load_requests") == 1
    later = make_engine(pool, {"load_async": False}, ranks=2)
    later.run(prompt, 4)
    assert later.restored_tokens() == 8 * BLOCK
    for engine in (healthy, unlucky, later):
        engine.check_drained()


def test_what_a_failed_synchronous_load_left_unfilled_is_not_served_to_others(
    make_pool: Any, make_engine: Any
) -> None:
    """Scenario: the engine offers a synchronous load's blocks to others from admission on. One request
    arrives in the same step; the loading one is aborted before it could compute its blocks anew; one arrives
    then.
    """
    runtime = PickyRuntime(make_pool(), lambda rank, index, key: index == 1)
    engine = make_engine(runtime, {"load_async": False}, max_batched_tokens=3 * BLOCK)
    engine.run(tokens(10 * BLOCK + 1))
    engine.forget_prefixes()
    loading = engine.add(tokens(10 * BLOCK + 1), 3)
    same_step = engine.add(tokens(10 * BLOCK + 1), 3)
    engine.step()
    assert engine.invalid_blocks
    engine.abort(loading.request_id)
    later = engine.add(tokens(10 * BLOCK + 1), 3)
    engine.drain()
    assert {same_step.request_id, later.request_id} <= engine.finished.keys()
    engine.check_drained()


def test_with_the_policy_fail_a_request_fails_and_the_engine_goes_on(
    make_pool: Any, make_engine: Any
) -> None:
    pool = make_pool()
    runtime = PickyRuntime(pool, lambda rank, index, key: index == 0)
    engine = make_engine(runtime, policy="fail")
    engine.run(tokens(100))
    engine.forget_prefixes()
    request = engine.add(tokens(100))
    engine.drain()
    assert request.status == RequestStatus.FINISHED_ERROR
    engine.run(tokens(60, 5))
    engine.check_drained()
    pool.check_unpinned()


def test_a_lost_block_is_not_promised_to_anyone_for_a_while(make_pool: Any, make_engine: Any) -> None:
    runtime = PickyRuntime(make_pool(), lambda rank, index, key: index == 2)
    engine = make_engine(runtime)
    engine.run(tokens(100))
    for _ in range(4):
        engine.forget_prefixes()
        engine.run(tokens(100))
    assert runtime.loads == [6, 2, 2, 2], "blocks before the lost one serve on"
    assert engine.count("failed_load_requests") == 1


def test_a_request_that_lost_a_load_is_not_promised_anything_again(make_pool: Any, make_engine: Any) -> None:
    """Scenario: the first block is lost, so the engine starts the request anew and asks for it again."""
    runtime = PickyRuntime(make_pool(), lambda rank, index, key: index == 0)
    engine = make_engine(runtime)
    engine.connector.scheduler_side._quarantine._seconds = 0.0
    engine.run(tokens(100))
    engine.forget_prefixes()
    engine.add(tokens(100), 2)
    assert engine.drain() < STEPS_ENOUGH
    assert runtime.loads == [6]


def test_quarantine_ends_after_its_time_and_is_bounded() -> None:
    clock = TickClock()
    quarantine = Quarantine(clock, seconds=30, limit=3)
    for name in b"abcd":
        quarantine.add((0, bytes([name])))
    assert len(quarantine) == 3
    chain = [b"x", b"c", b"y"]
    assert quarantine.healthy_prefix(0, chain) == 1
    assert quarantine.healthy_prefix(0, [b"a"]) == 1, "the oldest left for the newest"
    assert quarantine.healthy_prefix(1, chain) == 3, "another group's blocks are other blocks"
    assert (quarantine.has(0, b"c"), quarantine.has(1, b"c"), quarantine.has(0, b"a")) == (True, False, False)
    clock.advance(29.9)
    assert quarantine.healthy_prefix(0, chain) == 1
    clock.advance(0.1)
    assert quarantine.healthy_prefix(0, chain) == 3
    assert len(quarantine) == 0


@RANKS
def test_a_pool_that_refuses_all_harms_nothing(make_engine: Any, ranks: int) -> None:
    engine = make_engine(NullRuntime(), {"save_decode_cache": True}, ranks=ranks, blocks=20)
    for seed in range(4):
        engine.add(tokens(80, seed), 20)
    engine.drain()
    assert len(engine.finished) == 4
    assert engine.count("stored_tokens") == 0
    assert engine.count("dropped_store_tokens") > 0
    engine.check_drained()


@RANKS
def test_a_full_pool_refuses_partly_and_counts_what_it_drops(
    make_pool: Any, make_engine: Any, ranks: int
) -> None:
    random = Random(3)
    pool = PickyRuntime(make_pool(), error="full: no room")
    pool.refuses = lambda rank, index, key: random.random() < 0.4
    engine = make_engine(pool, ranks=ranks)
    engine.run(tokens(30 * 8, 2))
    assert engine.count("dropped_store_tokens") > 0
    assert engine.count("stored_tokens") + engine.count("dropped_store_tokens") == 15 * BLOCK
    engine.forget_prefixes()
    engine.run(tokens(30 * 8, 2))
    engine.check_drained()


def test_a_publish_that_raises_is_a_store_that_failed_and_is_complained_of_once(
    make_pool: Any, make_engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(FaultyRuntime(make_pool(), FaultPlan(publishes=1.0)), max_batched_tokens=2 * BLOCK)
    engine.run(tokens(100), 3)
    assert sum("failed to publish" in record.getMessage() for record in caplog.records) == 1
    assert engine.count("stored_tokens") == 0
    assert engine.count("dropped_store_tokens") == 32 + 64 + 96, "tried three times"
    engine.check_drained()


@RANKS
@pytest.mark.parametrize("chunk_blocks", [2, 8], ids=["chunks", "whole"])
def test_a_block_that_was_lost_in_passing_is_stored_by_the_next_step(
    make_pool: Any, make_engine: Any, chunk_blocks: int, ranks: int
) -> None:
    """What follows it can only be found with it, and the request still has it."""
    pool = PickyRuntime(make_pool(), error="busy: for a moment")
    lost: list[str] = []

    def refuses(rank: int, index: int, key: str) -> bool:
        is_lost = index == 1 and not lost
        lost.extend([key] * is_lost)
        return is_lost

    pool.refuses = refuses
    engine = make_engine(pool, max_batched_tokens=chunk_blocks * BLOCK, ranks=ranks)
    engine.run(tokens(6 * BLOCK + 1), 4)
    assert len(lost) == 1
    assert engine.count("stored_tokens") == 6 * BLOCK
    assert engine.count("dropped_store_tokens") == BLOCK
    engine.forget_prefixes()
    engine.run(tokens(6 * BLOCK + 1))
    assert engine.restored_tokens() == 6 * BLOCK
    engine.check_drained()


def test_a_block_that_no_step_can_store_is_given_up_with_all_after_it(
    make_pool: Any, make_engine: Any
) -> None:
    pool = PickyRuntime(make_pool(), error="busy: always")
    tried: list[str] = []

    def refuses(rank: int, index: int, key: str) -> bool:
        tried.append(key)
        return tried.index(key) == 1

    pool.refuses = refuses
    engine = make_engine(pool, {"save_decode_cache": True}, max_batched_tokens=2 * BLOCK)
    engine.run(tokens(6 * BLOCK + 1), 40)
    assert tried.count(tried[1]) == STORE_TRIES
    assert engine.count("stored_tokens") == 5 * BLOCK
    engine.forget_prefixes()
    engine.run(tokens(6 * BLOCK + 1))
    assert engine.restored_tokens() == BLOCK
    engine.check_drained()


def test_a_request_that_is_cleared_away_or_preempted_meanwhile_stores_nothing_old_again(
    make_pool: Any, make_engine: Any
) -> None:
    pool = PickyRuntime(make_pool(), error="busy: always")
    pool.refuses = lambda rank, index, key: index == 1
    engine = make_engine(pool, max_batched_tokens=2 * BLOCK)
    request = engine.add(tokens(6 * BLOCK + 1), 4)
    engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    pool.refuses = lambda rank, index, key: False
    engine.drain()
    assert request.num_preemptions == 1
    engine.forget_prefixes()
    engine.run(tokens(6 * BLOCK + 1))
    assert engine.restored_tokens() == 6 * BLOCK
    engine.check_drained()


def test_a_backend_that_dies_is_a_miss_and_hits_come_back_with_it(make_engine: Any) -> None:
    pool = ReferenceRuntime()
    engine = make_engine(pool, ranks=2)
    engine.run(tokens(100))
    engine.forget_prefixes()
    pool.die()
    engine.run(tokens(100))
    assert engine.restored_tokens() == 0
    pool.shelf.is_dead = False
    engine.forget_prefixes()
    engine.run(tokens(100))
    assert engine.restored_tokens() == 96
    engine.check_drained()


def test_a_backend_that_dies_under_a_promise_is_a_recomputation(make_engine: Any) -> None:
    pool = ReferenceRuntime()
    engine = make_engine(pool)
    engine.run(tokens(100))
    engine.forget_prefixes()
    request = engine.add(tokens(100), 2)
    schedule = engine.scheduler.schedule

    def die_after_the_promise(*arguments: Any) -> Any:
        output = schedule(*arguments)
        pool.die()
        return output

    engine.scheduler.schedule = die_after_the_promise
    assert engine.drain() < STEPS_ENOUGH
    assert request.request_id in engine.finished
    assert engine.count("failed_load_tokens") == 96
    engine.check_drained()


class RaisingRuntime(ReferenceRuntime):
    """A runtime whose every verb raises once it is told to."""

    raises = False

    def create_scheduler_handle(self, *arguments: Any) -> Any:
        return Raising(self, super().create_scheduler_handle(*arguments))

    def create_worker_handle(self, *arguments: Any) -> Any:
        return Raising(self, super().create_worker_handle(*arguments))


class Raising:
    def __init__(self, runtime: RaisingRuntime, inner: Any) -> None:
        self._runtime = runtime
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._inner, name)

        def call(*arguments: Any) -> Any:
            if self._runtime.raises and name not in ("close", "wait", "poll", "usage"):
                raise OSError(f"{name}: the cable is out")
            return verb(*arguments)

        return call


@WAYS
def test_a_runtime_that_raises_is_a_miss(make_engine: Any, load_async: bool) -> None:
    runtime = RaisingRuntime()
    engine = make_engine(runtime, {"load_async": load_async})
    engine.run(tokens(100))
    engine.forget_prefixes()
    runtime.raises = True
    engine.run(tokens(100))
    assert engine.scheduler.reset_connector_cache() is False
    runtime.raises = False
    engine.forget_prefixes()
    engine.run(tokens(100))
    assert engine.restored_tokens() == 96
    engine.check_drained()
