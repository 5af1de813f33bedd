"""What happens to an engine as a whole: resets, new weights, sleep, its role, and other engines beside it."""

from __future__ import annotations

from typing import Any

import pytest
from scripted import BLOCK, ScriptedEngine, tokens
from scripted_runtime import WatchedRuntime, slowly
from vllm.v1.request import RequestStatus

from umbp.options import parse_options
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
HYBRIDS = pytest.mark.parametrize("kind", ["windows", "states"])


def restored_by(engine: ScriptedEngine, prompt: list[int]) -> int:
    before = engine.restored_tokens()
    engine.run(prompt)
    return engine.restored_tokens() - before


# Resets


@HYBRIDS
def test_a_load_under_way_at_a_reset_ends_and_nothing_old_is_found_after_it(
    make_engine: Any, kind: str
) -> None:
    clock = TickClock()
    pool = WatchedRuntime(ReferenceRuntime())
    engine = make_engine(slowly(pool, clock, load=1.0), layers=LAYERS[kind])
    engine.run(tokens(100))
    engine.forget_prefixes()
    request = engine.add(tokens(100))
    engine.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert engine.scheduler.reset_connector_cache()
    engine.between = lambda: clock.advance(0.5)
    engine.drain()
    assert request.request_id in engine.finished
    engine.forget_prefixes()
    assert restored_by(engine, tokens(100)) == 0
    engine.check_drained()
    pool.check_unpinned()


@HYBRIDS
def test_a_store_under_way_at_a_reset_leaves_nothing_in_the_pool(make_engine: Any, kind: str) -> None:
    clock = TickClock()
    pool = WatchedRuntime(ReferenceRuntime())
    engine = make_engine(slowly(pool, clock, store=1.0), layers=LAYERS[kind])
    request = engine.add(tokens(100))
    while not request.is_finished():
        engine.step()
    assert engine.connector.has_pending_push_work()
    engine.scheduler.reset_connector_cache()
    engine.between = lambda: clock.advance(0.5)
    engine.drain()
    engine.forget_prefixes()
    assert restored_by(engine, tokens(100)) == 0
    engine.check_drained()
    pool.check_unpinned()


@HYBRIDS
def test_what_was_computed_before_a_reset_is_not_stored_after_it(make_engine: Any, kind: str) -> None:
    engine = make_engine(ReferenceRuntime(), {"save_decode_cache": True}, layers=LAYERS[kind])
    request = engine.add(tokens(150), 30)
    engine.step()
    engine.scheduler.reset_connector_cache()
    engine.drain()
    assert request.request_id in engine.finished
    engine.forget_prefixes()
    assert restored_by(engine, tokens(150)) == 0
    engine.check_drained()


@HYBRIDS
@pytest.mark.parametrize("depth", [1, 2])
def test_after_a_change_of_weights_no_old_byte_comes_back(make_engine: Any, kind: str, depth: int) -> None:
    engine = make_engine(ReferenceRuntime(), {"save_decode_cache": True}, layers=LAYERS[kind], depth=depth)
    engine.run(tokens(100))
    running = engine.add(tokens(100, 4), 50)
    for _ in range(6):
        engine.step()
    engine.land()
    assert engine.change_weights()
    assert restored_by(engine, tokens(100)) == 0
    engine.drain()
    assert running.request_id in engine.finished
    engine.forget_prefixes()
    assert restored_by(engine, tokens(100)) == 96
    assert restored_by(engine, tokens(100, 4)) == 96
    engine.check_drained()


# Sleep


def sleep(engine: ScriptedEngine) -> None:
    """The workers' part, before and after which vLLM takes their memory and gives it back."""
    for rank in engine.ranks:
        assert rank.connector is not None
        rank.connector.unregister_kv_caches()
        rank.memory.spoil(range(1, engine.shape.blocks))


def wake(engine: ScriptedEngine) -> None:
    for rank in engine.ranks:
        assert rank.connector is not None
        rank.memory.spoil(range(1, engine.shape.blocks))
        rank.connector.restore_kv_caches()
    engine.shake_hands()


@pytest.mark.parametrize(("kind", "ranks"), [("one group", 2), ("windows", 1), ("states", 1)])
def test_an_engine_that_has_slept_stores_and_restores_as_before(
    make_pool: Any, make_engine: Any, kind: str, ranks: int
) -> None:
    pool = make_pool()
    engine = make_engine(pool, layers=LAYERS[kind], ranks=ranks)
    engine.run(tokens(100))
    for _ in range(2):
        assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        sleep(engine)
        wake(engine)
        assert restored_by(engine, tokens(100)) == 0, "vLLM has the pool cleared before it sleeps"
        engine.forget_prefixes()
        assert restored_by(engine, tokens(100)) == 96
    engine.check_drained()
    pool.check_unpinned()


@KINDS
def test_transfers_under_way_end_before_the_memory_goes(make_engine: Any, kind: str) -> None:
    clock = TickClock()
    engine = make_engine(slowly(ReferenceRuntime(), clock, store=1.0, load=1.0), layers=LAYERS[kind])
    request = engine.add(tokens(100))
    while not request.is_finished():
        engine.step()
    assert engine.connector.has_pending_push_work()
    sleep(engine)
    wake(engine)
    engine.drain()
    engine.forget_prefixes()
    aborted = engine.add(tokens(100))
    engine.step()
    assert aborted.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    engine.abort(aborted.request_id)
    sleep(engine)
    wake(engine)
    engine.drain()
    engine.between = lambda: clock.advance(1.0)
    before = engine.restored_tokens()
    assert restored_by(engine, tokens(100)) == 96
    assert before == 96, "the aborted one's"
    engine.check_drained()


# Roles


@HYBRIDS
def test_a_consumer_restores_what_a_producer_stored_and_stores_nothing(make_engine: Any, kind: str) -> None:
    pool = ReferenceRuntime()
    producer, consumer, both = (
        make_engine(pool, layers=LAYERS[kind], role=role)
        for role in ("kv_producer", "kv_consumer", "kv_both")
    )
    producer.run(tokens(100))
    producer.forget_prefixes()
    assert restored_by(producer, tokens(100)) == 0
    assert restored_by(consumer, tokens(100)) == 96
    consumer.run(tokens(100, 2))
    assert consumer.count("stored_tokens") == 0
    assert restored_by(both, tokens(100)) == 96
    both.run(tokens(100, 2))
    assert both.count("stored_tokens") == 96
    for engine in (producer, consumer, both):
        engine.check_drained()


# Data-parallel engines


@KINDS
def test_data_parallel_engines_share_one_pool(shared_pool: Any, make_engine: Any, kind: str) -> None:
    first, second = (
        make_engine(shared_pool(1000, "dp"), layers=LAYERS[kind], dp_rank=rank) for rank in (0, 1)
    )
    first.run(tokens(100))
    assert restored_by(second, tokens(100)) == 96
    second.run(tokens(100, 2))
    assert restored_by(first, tokens(100, 2)) == 96
    for engine in (first, second):
        engine.check_drained()


def test_data_parallel_engines_with_pools_of_their_own_never_meet(make_engine: Any) -> None:
    embedded = pytest.importorskip("umbp.runtime.embedded", reason="the native core isn't built")
    options = parse_options({"capacity_bytes": 1000 * 4096, "num_workers": 1})
    engines = [make_engine(embedded.EmbeddedRuntime(options), dp_rank=rank) for rank in (0, 1)]
    for engine in engines:
        assert restored_by(engine, tokens(100)) == 0
        engine.forget_prefixes()
    for engine in engines:
        assert restored_by(engine, tokens(100)) == 6 * BLOCK
    assert engines[0].scheduler.reset_connector_cache()
    for engine, restored in zip(engines, (0, 6 * BLOCK), strict=True):
        engine.forget_prefixes()
        assert restored_by(engine, tokens(100)) == restored
        engine.check_drained()
