"""Beside another connector, under vLLM's MultiConnector and in both orders: one of the two loads a request,
both store it, and neither's trouble is the other's.

Who restores wrong bytes from what was stored beside a sibling is found by an engine without one.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest
from scripted import BLOCK, ScriptedEngine, tokens
from scripted_runtime import PickyRuntime, WatchedRuntime, slowly
from sibling import SHELVES, Shelf, beside
from vllm.v1.request import RequestStatus

from seeds import seeds
from umbp.testing.clock import TickClock
from umbp.testing.engine.shape import Layers
from umbp.testing.reference import ReferenceRuntime

FULL = Layers("full", 1)
WINDOWS = (FULL, Layers("sliding", 2, 40))
ONE_GROUP = (Layers(),)
ORDERS = pytest.mark.parametrize("order", ["before", "after"])
KINDS = pytest.mark.parametrize("layers", [ONE_GROUP, WINDOWS], ids=["one group", "windows"])


@pytest.fixture(autouse=True)
def _clear_table() -> Iterator[None]:
    yield
    SHELVES.clear()


def filled(make_engine: Any, prompts: list[list[int]], **shape: Any) -> tuple[Shelf, dict[str, object]]:
    """A sibling that has these prompts, which no pool of ours has."""
    shelf, config = beside("s")
    engine = make_engine(ReferenceRuntime(), before=(config,), **shape)
    for prompt in prompts:
        engine.run(prompt)
    engine.check_drained()
    return shelf, config


def served(engine: ScriptedEngine, prompt: list[int], max_tokens: int = 4) -> list[int]:
    return list(engine.run(prompt, max_tokens).output_token_ids)


@ORDERS
@pytest.mark.parametrize(
    ("layers", "ranks"), [(ONE_GROUP, 1), (WINDOWS, 1), (WINDOWS, 2)], ids=["one group", "windows", "ranks"]
)
def test_both_store_and_whoever_is_asked_first_loads(
    make_engine: Any, order: str, layers: Any, ranks: int
) -> None:
    shelf, config = beside("s")
    engine = make_engine(ReferenceRuntime(), layers=layers, ranks=ranks, **{order: (config,)})
    cold = served(engine, tokens(100))
    engine.forget_prefixes()
    assert served(engine, tokens(100)) == cold
    assert (shelf.loads, engine.restored_tokens()) == ((ranks, 0) if order == "before" else (0, 96))
    assert engine.count("stored_tokens") == 96
    engine.check_drained()


@ORDERS
@KINDS
@pytest.mark.parametrize("load_async", [True, False], ids=["async", "sync"])
def test_what_a_sibling_loads_is_stored_too(
    make_engine: Any, order: str, layers: Any, load_async: bool
) -> None:
    shelf, config = filled(make_engine, [tokens(100)], layers=layers)
    shelf.load_async = load_async
    pool = ReferenceRuntime()
    engine = make_engine(pool, layers=layers, **{order: (config,)})
    restored = served(engine, tokens(150))
    assert shelf.loads == 1
    alone = make_engine(pool, layers=layers)
    assert served(alone, tokens(150)) == restored
    assert alone.restored_tokens() == 144
    for each in (engine, alone):
        each.check_drained()


@ORDERS
@pytest.mark.parametrize("load_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize(("ranks", "place"), [(1, 0), (2, 3)])
def test_what_a_sibling_failed_to_load_is_never_stored(
    make_engine: Any, order: str, ranks: int, load_async: bool, place: int
) -> None:
    """Another request begins in the same step, with the blocks that the sibling is about to fill."""
    shelf, config = filled(make_engine, [tokens(100)], ranks=ranks)
    shelf.load_async = load_async
    shelf.loses = lambda rank, row: rank == ranks - 1 and row == place
    pool = ReferenceRuntime()
    engine = make_engine(pool, ranks=ranks, max_batched_tokens=200, **{order: (config,)})
    together = [engine.add(tokens(150), 3), engine.add(tokens(130) + tokens(30, 7), 3)]
    engine.drain()
    assert engine.invalid_blocks
    assert engine.count("failed_load_requests") == 0, "it was not ours"
    alone = make_engine(pool, ranks=ranks)
    for request in together:
        alone.run(list(request.prompt_token_ids))
        alone.forget_prefixes()
    assert alone.restored_tokens() == 2 * 144
    for each in (engine, alone):
        each.check_drained()


@ORDERS
def test_what_a_sibling_failed_to_load_in_windows_is_computed_and_stored(
    make_engine: Any, order: str
) -> None:
    shelf, config = filled(make_engine, [tokens(100)], layers=WINDOWS)
    shelf.loses = lambda rank, row: row == 1
    pool = ReferenceRuntime()
    engine = make_engine(pool, layers=WINDOWS, **{order: (config,)})
    served(engine, tokens(150))
    assert engine.count("failed_load_requests") == 0
    alone = make_engine(pool, layers=WINDOWS)
    alone.run(tokens(150))
    assert alone.restored_tokens() == 144
    for each in (engine, alone):
        each.check_drained()


@KINDS
def test_a_siblings_failed_load_marks_none_of_our_requests(make_engine: Any, layers: Any) -> None:
    """Both load at once, each another request: theirs fails, ours goes on, and later ones are promised as
    ever.
    """
    shelf, config = filled(make_engine, [tokens(100, 1)], layers=layers)
    clock = TickClock()
    pool = ReferenceRuntime()
    make_engine(pool, layers=layers).run(tokens(100, 2))
    shelf.loses = lambda rank, row: True
    shelf.holds_back = True
    engine = make_engine(slowly(pool, clock, load=1.0), layers=layers, before=(config,))
    theirs, ours = engine.add(tokens(100, 1), 3), engine.add(tokens(100, 2), 3)
    engine.step()
    for request in (theirs, ours):
        assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    shelf.holds_back = False
    engine.step()
    clock.advance(1.0)
    engine.drain()
    assert engine.count("failed_load_requests") == 0
    assert engine.restored_tokens() == 96
    engine.forget_prefixes()
    shelf.ends.clear()
    engine.between = lambda: clock.advance(1.0)
    engine.run(tokens(100, 1))
    assert engine.restored_tokens() == 2 * 96, "what theirs has lost was computed and stored"
    engine.check_drained()


@ORDERS
@KINDS
def test_our_failed_load_is_recomputed_beside_a_sibling(make_engine: Any, order: str, layers: Any) -> None:
    shelf, config = beside("s")
    runtime = PickyRuntime(ReferenceRuntime(), lambda rank, index, key: index == 1)
    engine = make_engine(runtime, layers=layers, **{order: (config,)})
    cold = served(engine, tokens(100))
    engine.forget_prefixes()
    shelf.ends.clear()
    assert served(engine, tokens(100)) == cold
    assert engine.count("failed_load_requests") == 1
    engine.check_drained()


@ORDERS
@KINDS
def test_a_sibling_that_asks_for_time_is_waited_for(make_engine: Any, order: str, layers: Any) -> None:
    shelf, config = beside("s")
    pool = WatchedRuntime(ReferenceRuntime())
    engine = make_engine(pool, layers=layers, **{order: (config,)})
    engine.run(tokens(100))
    engine.forget_prefixes()
    shelf.ends.clear()
    shelf.thinks_for = 3
    request = engine.add(tokens(100))
    for _ in range(3):
        engine.step()
        assert request.status == RequestStatus.WAITING
    engine.drain()
    assert engine.restored_tokens() == 96
    shelf.thinks_for = 10
    aborted = engine.add([*tokens(100), 5])
    engine.step()
    engine.abort(aborted.request_id)
    engine.drain()
    engine.check_drained()
    pool.check_unpinned()


@pytest.mark.parametrize(("layers", "ranks"), [(ONE_GROUP, 2), (WINDOWS, 1)], ids=["ranks", "windows"])
def test_where_a_siblings_handshake_comes_instead_the_pool_is_opened_with_the_first_step(
    make_pool: Any, make_engine: Any, layers: Any, ranks: int
) -> None:
    _, config = beside("s", greets=True)
    pool = make_pool()
    _, silent = beside("t")
    engine = make_engine(pool, layers=layers, ranks=ranks, before=(config,), after=(silent,))
    assert not engine.connector.scheduler_side._pool.is_open
    engine.run(tokens(50, 3))
    assert engine.connector.scheduler_side._pool.is_open
    engine.run(tokens(100))
    engine.forget_prefixes()
    for each in SHELVES.values():
        each.ends.clear()
    engine.run(tokens(100))
    assert engine.restored_tokens() == 96
    engine.check_drained()
    pool.check_unpinned()


def test_a_pool_that_was_opened_late_stays_open_over_a_sleep(make_pool: Any, make_engine: Any) -> None:
    _, config = beside("s", greets=True)
    pool = make_pool()
    engine = make_engine(pool, before=(config,))
    engine.run(tokens(100))
    SHELVES["s"].ends.clear()
    for rank in engine.ranks:
        rank.connector.unregister_kv_caches()
        rank.connector.restore_kv_caches()
    engine.shake_hands()
    engine.forget_prefixes()
    engine.run(tokens(130))
    assert engine.restored_tokens() == 96
    engine.check_drained()
    pool.check_unpinned()


@ORDERS
@KINDS
def test_a_sibling_may_keep_a_requests_blocks_after_its_end(
    make_engine: Any, order: str, layers: Any
) -> None:
    shelf, config = beside("s", keeps_blocks=True, holds_back=True)
    engine = make_engine(ReferenceRuntime(), layers=layers, **{order: (config,)})
    request = engine.add(tokens(100))
    for _ in range(6):
        engine.step()
    assert request.is_finished()
    assert engine.scheduler.requests, "its blocks are the sibling's still"
    assert engine.connector.scheduler_side._requests == {}
    shelf.holds_back = False
    engine.drain()
    assert engine.count("stored_tokens") == 96
    engine.check_drained()


@ORDERS
@KINDS
def test_a_reset_clears_the_pool_beside_a_sibling(make_engine: Any, order: str, layers: Any) -> None:
    shelf, config = beside("s")
    engine = make_engine(ReferenceRuntime(), layers=layers, **{order: (config,)})
    engine.run(tokens(100))
    shelf.ends.clear()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.run(tokens(100))
    assert engine.restored_tokens() == 0
    engine.check_drained()


@ORDERS
@pytest.mark.parametrize("load_async", [True, False], ids=["async", "sync"])
def test_a_request_may_be_aborted_while_a_sibling_loads_it(
    make_engine: Any, order: str, load_async: bool
) -> None:
    shelf, config = filled(make_engine, [tokens(100)])
    shelf.load_async = load_async
    shelf.holds_back = load_async
    engine = make_engine(ReferenceRuntime(), **{order: (config,)})
    request = engine.add(tokens(130), 3)
    if not load_async:
        engine.between = lambda: engine.abort(request.request_id)
    engine.step()
    engine.abort(request.request_id)
    shelf.holds_back = False
    engine.drain()
    assert request.status == RequestStatus.FINISHED_ABORTED
    engine.check_drained()


@ORDERS
def test_requests_that_a_sibling_loads_are_preempted_and_resume(make_engine: Any, order: str) -> None:
    _, config = filled(make_engine, [tokens(80, seed) for seed in range(3)])
    pool = ReferenceRuntime()
    engine = make_engine(pool, {"save_decode_cache": True}, blocks=20, **{order: (config,)})
    together = [engine.add(tokens(80, seed), 60) for seed in range(3)]
    engine.drain(1000)
    assert sum(request.num_preemptions for request in together) > 0
    alone = make_engine(pool)
    for request in together:
        alone.run(list(request.all_token_ids))
    assert alone.restored_tokens() == 3 * 8 * BLOCK
    for each in (engine, alone):
        each.check_drained()


@pytest.mark.parametrize("seed", seeds(8))
def test_beside_a_sibling_that_fails_and_waits_at_random_all_is_right_and_even(
    make_engine: Any, seed: int
) -> None:
    """What was stored meanwhile is checked by an engine without the sibling."""
    random = Random(seed)
    layers = random.choice([ONE_GROUP, ONE_GROUP, WINDOWS])
    shelf, config = beside(
        "s",
        load_async=random.random() < 0.6 or layers is WINDOWS,
        greets=random.random() < 0.5,
        keeps_blocks=random.random() < 0.3,
        loses=lambda rank, row: random.random() < 0.1,
    )
    clock = TickClock()
    pool = WatchedRuntime(ReferenceRuntime(random.choice([20, 60, 1000])))
    shape = {"layers": layers, "ranks": random.choice([1, 2]), "blocks": random.choice([40, 60])}
    shape["max_model_len"] = 192
    load_async = layers is WINDOWS or random.random() < 0.5
    engine = make_engine(
        slowly(pool, clock, load=1.0, store=1.0) if random.random() < 0.5 else pool,
        {"save_decode_cache": random.random() < 0.5, "load_async": load_async},
        max_batched_tokens=random.choice([40, 64, 200]),
        **{random.choice(["before", "after"]): (config,)},
        **shape,
    )
    lengths = (BLOCK, 40, 64, 65, 97, 130)
    asked = []
    for _ in range(120):
        live = [request for request in asked if not request.is_finished()]
        if len(live) < 6 and random.random() < 0.6:
            prompt = tokens(random.choice(lengths), random.randrange(3)) + tokens(random.randrange(30), 9)
            asked.append(engine.add(prompt, random.randint(1, 12)))
        if live and random.random() < 0.06:
            engine.abort(random.choice(live).request_id)
        if random.random() < 0.1:
            shelf.thinks_for = random.randrange(3)
        shelf.holds_back = random.random() < 0.5
        if random.random() < 0.1:
            engine.scheduler.reset_connector_cache()
        clock.advance(random.choice([0.0, 0.5]))
        engine.step()
    shelf.holds_back = False
    engine.between = lambda: clock.advance(0.5)
    engine.drain(1000)
    engine.check_drained()
    alone = make_engine(pool, **shape)
    for request in asked:
        alone.run(list(request.prompt_token_ids))
        alone.forget_prefixes()
    alone.check_drained()
    pool.check_unpinned()
