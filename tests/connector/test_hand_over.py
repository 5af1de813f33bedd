"""One engine prefills, another decodes: what the first stores the second waits for, but not long.

The engines check every byte in every step; the store is in memory and hangs when told to, so that what the
first has computed is on its way for as long as a test wants.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_shapes import SHAPES
from nodes import Node
from scripted import BLOCK, ScriptedEngine, tokens

from umbp.data import BlockTransferPlan, RankTopology, TransferJobState
from umbp.pool import Pool
from umbp.runtime.base import IUMBPRuntime, LookupState, UMBPWorkerHandle
from umbp.runtime.wrap.passing import NotesByJob, PassingRuntime, PassingWorkerHandle, mirror
from umbp.testing.engine.shape import Layers
from umbp.testing.reference import ReferenceRuntime
from umbp.testing.stores.memory import MemoryCluster

PROMPT = 10 * BLOCK + 3
LONG_MS = 60_000
"""Nobody waits so long: it is the test that would fail."""
ASKED = {"do_remote_decode": True}
NAME = "umbp.scripted"

Start = Callable[..., tuple[ScriptedEngine, Node]]
RUNNERS = pytest.mark.parametrize("runner", [1, 2])
WAYS = pytest.mark.parametrize("lookup_async", [True, False], ids=["beside", "within"])


class Unfinished(PassingRuntime):
    """Its stores are written and not published while `is_held`."""

    def __init__(self, inner: IUMBPRuntime) -> None:
        super().__init__(inner)
        self.capabilities = replace(self.capabilities, local=False)
        self.is_held = True

    def _around_worker(self, inner: UMBPWorkerHandle, topology: RankTopology) -> UMBPWorkerHandle:
        return UnfinishedWorkerHandle(inner, self)


class UnfinishedWorkerHandle(PassingWorkerHandle):
    def __init__(self, inner: UMBPWorkerHandle, runtime: Unfinished) -> None:
        super().__init__(inner)
        self._runtime = runtime

        self._jobs: NotesByJob[TransferJobState] = NotesByJob()

    def store(self, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        job = TransferJobState(plans)
        job.start()
        self._jobs[job] = super().store(plans)
        return job

    def poll(self, job: TransferJobState) -> TransferJobState | None:
        if (inner := self._jobs.get(job)) is None:
            return super().poll(job)
        if self._runtime.is_held or (inner := super().poll(inner)) is None:
            return None
        mirror(inner, job)
        return job

    def publish(self, job: TransferJobState) -> None:
        super().publish(self._jobs.get(job) or job)


def prefilled(engine: ScriptedEngine, length: int = PROMPT, **how: Any) -> dict[str, Any]:
    """What the engine tells of a prompt of so many tokens when it has answered it."""
    request = engine.run(tokens(length), **how)
    return engine.handed_over[request.request_id]


def drain(engine: ScriptedEngine, until: Callable[[], bool] | None = None) -> None:
    """Step until nothing is left, or as far as `until`, however many steps a wait takes."""
    deadline_s = time.monotonic() + 30
    while engine.scheduler.has_requests() or engine.is_in_flight:
        if until is not None and until():
            return
        assert time.monotonic() < deadline_s, "still busy"
        engine.step()


def steps(engine: ScriptedEngine, count: int) -> None:
    for _ in range(count):
        engine.step()


# The engine that prefills


@RUNNERS
def test_a_producer_tells_how_much_of_a_prompt_it_stores(make_engine: Any, runner: int) -> None:
    engine = make_engine(ReferenceRuntime(), role="kv_producer", runner=runner)
    request = engine.run(tokens(PROMPT))
    told = engine.handed_over[request.request_id]
    assert told == {
        NAME: {
            "stored_tokens": 10 * BLOCK,
            "prefix_hash": request.block_hashes[9].hex(),
            "namespace": str(engine.connector.scheduler_side._pool.codec.namespace),
        }
    }
    engine.check_drained()


def test_an_engine_that_also_loads_tells_it_where_it_is_asked_to(make_engine: Any) -> None:
    engine = make_engine(ReferenceRuntime())
    engine.run(tokens(PROMPT))
    engine.run(tokens(PROMPT, 1), transfer_params={"do_remote_decode": "yes"})
    assert not engine.handed_over
    told = prefilled(engine, transfer_params=ASKED)
    assert told[NAME]["stored_tokens"] == 10 * BLOCK


def test_who_stores_nothing_of_a_request_tells_nothing(make_engine: Any) -> None:
    consumer = make_engine(ReferenceRuntime(), role="kv_consumer")
    consumer.run(tokens(PROMPT), transfer_params=ASKED)
    lazy = make_engine(ReferenceRuntime(), {"write_policy": "lazy"})
    lazy.run(tokens(PROMPT), transfer_params=ASKED)
    short = make_engine(ReferenceRuntime(), role="kv_producer")
    short.run(tokens(BLOCK))
    request = short.add(tokens(PROMPT))
    short.step()
    short.abort(request.request_id)
    short.drain()
    full = make_engine(ReferenceRuntime(0), role="kv_producer")
    full.run(tokens(PROMPT), 4)
    for engine in (consumer, lazy, short, full):
        assert not engine.handed_over
        engine.check_drained()


# The engine that decodes


@WAYS
@RUNNERS
@pytest.mark.parametrize("ranks", [1, 2], ids=["tp1", "tp2"])
def test_a_consumer_that_comes_early_waits_for_what_is_stored(
    start: Start, cluster: MemoryCluster, runner: int, lookup_async: bool, ranks: int
) -> None:
    producer, node = start(role="kv_producer", runner=runner, ranks=ranks)
    consumer, _ = start(
        {"lookup_async": lookup_async, "lookup_timeout_ms": LONG_MS},
        role="kv_consumer",
        runner=runner,
        ranks=ranks,
    )
    cluster.hang("put")
    told = prefilled(producer)
    alone = producer.finished["r0"]
    request = consumer.add(tokens(PROMPT), 2, transfer_params=told)
    steps(consumer, 20)
    assert not consumer.restored_tokens()
    assert not request.num_computed_tokens
    cluster.go_on()
    node.flush()
    drain(consumer)
    assert consumer.restored_tokens() == 10 * BLOCK
    assert (consumer.count("awaited_requests"), consumer.count("awaited_in_vain_requests")) == (1, 0)
    assert list(request.output_token_ids)[:1] == list(alone.output_token_ids)
    for engine in (producer, consumer):
        engine.check_drained()


def test_who_waits_holds_nobody_up_and_asks_now_and_then(start: Start, cluster: MemoryCluster) -> None:
    producer, _ = start(role="kv_producer")
    cluster.hang("put")
    told = prefilled(producer)
    consumer, _ = start({"lookup_timeout_ms": LONG_MS}, role="kv_consumer")
    waiting = consumer.add(tokens(PROMPT), transfer_params=told)
    steps(consumer, 10)
    asked = cluster.stores[-2].calls.count("exists")
    begun_s = time.monotonic()
    others = [consumer.add(tokens(PROMPT, seed), 20) for seed in range(1, 4)]
    drain(consumer, lambda: all(other.request_id in consumer.finished for other in others))
    took_s = time.monotonic() - begun_s
    assert waiting.request_id not in consumer.finished
    assert cluster.stores[-2].calls.count("exists") - asked <= 3 + 8 + took_s / 0.05
    cluster.go_on()
    drain(consumer)
    assert consumer.restored_tokens() == 10 * BLOCK
    consumer.check_drained()


@WAYS
def test_who_has_waited_long_enough_takes_what_is_there(
    start: Start, cluster: MemoryCluster, lookup_async: bool
) -> None:
    producer, node = start(role="kv_producer")
    producer.run(tokens(4 * BLOCK + 1))
    node.flush()
    cluster.hang("put")
    told = prefilled(producer)
    consumer, _ = start({"lookup_async": lookup_async, "lookup_timeout_ms": 40}, role="kv_consumer")
    begun_s = time.monotonic()
    request = consumer.add(tokens(PROMPT), transfer_params=told)
    drain(consumer)
    assert time.monotonic() - begun_s >= 0.04
    assert consumer.restored_tokens() == 4 * BLOCK
    assert (consumer.count("awaited_requests"), consumer.count("awaited_in_vain_requests")) == (1, 1)
    assert list(request.output_token_ids) == list(producer.finished["r1"].output_token_ids)
    consumer.check_drained()


def test_nobody_waits_while_the_store_is_left_alone(start: Start, cluster: MemoryCluster) -> None:
    """Scenario: the store dies while one request waits for it, and another one comes; then it is back."""
    producer, node = start(role="kv_producer")
    consumer, _ = start({"lookup_timeout_ms": LONG_MS}, role="kv_consumer")
    cluster.hang("put")
    told, later = prefilled(producer), producer.handed_over[producer.run(tokens(PROMPT, 1)).request_id]
    consumer.add(tokens(PROMPT), transfer_params=told)
    drain(consumer, lambda: consumer.count("awaited_requests") == 1)
    assert consumer.scheduler.has_requests()
    cluster.is_down = True
    drain(consumer)
    consumer.run(tokens(PROMPT, 1), transfer_params=later)
    assert not consumer.restored_tokens()
    assert (consumer.count("awaited_requests"), consumer.count("awaited_in_vain_requests")) == (1, 1)
    cluster.is_down = False
    cluster.go_on()
    node.flush()
    consumer.connector.scheduler_side._pool._stages[0].handle.gate.open(30)
    consumer.forget_prefixes()
    consumer.run(tokens(PROMPT), transfer_params=told)
    assert consumer.restored_tokens() == 10 * BLOCK
    for engine in (producer, consumer):
        engine.check_drained()


def test_engines_that_share_a_pool_wait_also_while_the_store_is_left_alone(
    start: Start, cluster: MemoryCluster, tmp_path: Path
) -> None:
    shared = {"lookup_timeout_ms": 100, "pool": "p", "pool_dir": str(tmp_path)}
    producer, _ = start(shared, role="kv_producer")
    consumer, _ = start(shared, role="kv_consumer")
    told = prefilled(producer)
    cluster.is_down = True
    consumer.run(tokens(PROMPT, 1))
    with Pool.attach(next(tmp_path.iterdir())) as pool:
        pool.clear_all()
    consumer.run(tokens(PROMPT), transfer_params=told)
    assert (consumer.count("awaited_requests"), consumer.count("awaited_in_vain_requests")) == (1, 1)


def test_it_is_waited_for_once_a_request(start: Start, cluster: MemoryCluster) -> None:
    """Scenario: a request that has waited in vain is preempted, and asks anew."""
    producer, _ = start(role="kv_producer")
    cluster.hang("put")
    told = prefilled(producer)
    consumer, _ = start({"lookup_timeout_ms": 20}, role="kv_consumer")
    request = consumer.add(tokens(PROMPT), 30, transfer_params=told)
    drain(consumer, lambda: request.num_output_tokens > 3)
    side = consumer.connector.scheduler_side
    side._matcher._timeout_s = LONG_MS
    assert consumer.scheduler.reset_prefix_cache(reset_running_requests=True)
    drain(consumer)
    assert request.request_id in consumer.finished
    consumer.check_drained()


def test_a_request_that_is_aborted_while_it_waits_leaves_nothing_behind(
    start: Start, cluster: MemoryCluster
) -> None:
    producer, _ = start(role="kv_producer")
    cluster.hang("put")
    told = prefilled(producer)
    consumer, _ = start({"lookup_timeout_ms": LONG_MS}, role="kv_consumer")
    request = consumer.add(tokens(PROMPT), transfer_params=told)
    steps(consumer, 10)
    consumer.abort(request.request_id)
    drain(consumer)
    (stage,) = consumer.connector.scheduler_side._pool._stages
    assert not stage.handle._lookups._asks
    consumer.check_drained()


def test_who_waits_while_there_are_no_free_blocks_waits_for_both(
    start: Start, cluster: MemoryCluster
) -> None:
    producer, node = start(role="kv_producer")
    cluster.hang("put")
    told = prefilled(producer)
    consumer, _ = start({"lookup_timeout_ms": LONG_MS}, role="kv_consumer", blocks=18)
    other = consumer.add(tokens(PROMPT, 1), 60)
    steps(consumer, 4)
    consumer.add(tokens(PROMPT), transfer_params=told)
    steps(consumer, 10)
    cluster.go_on()
    node.flush()
    drain(consumer, lambda: other.request_id in consumer.finished)
    drain(consumer)
    assert consumer.restored_tokens() == 10 * BLOCK
    consumer.check_drained()


@pytest.mark.parametrize(
    "value",
    [
        None,
        7,
        [],
        {},
        {"stored_tokens": 160},
        {"stored_tokens": -1, "prefix_hash": "", "namespace": ""},
        {"stored_tokens": True, "prefix_hash": "ab", "namespace": "n"},
        {"stored_tokens": 1e3, "prefix_hash": "ab", "namespace": "n"},
        {"stored_tokens": 2**80, "prefix_hash": "ab", "namespace": "n"},
        {"stored_tokens": 160, "prefix_hash": 3, "namespace": "n"},
        {"stored_tokens": 160, "prefix_hash": "ab", "namespace": "another's"},
    ],
    ids=str,
)
def test_rubbish_from_a_client_is_one_sentence_and_nothing_else(
    start: Start, cluster: MemoryCluster, caplog: pytest.LogCaptureFixture, value: object
) -> None:
    consumer, _ = start({"lookup_timeout_ms": LONG_MS}, role="kv_consumer")
    for seed in range(3):
        consumer.run(tokens(PROMPT, seed), transfer_params={NAME: value})
    lines = [record.getMessage() for record in caplog.records if "UMBP" in record.getMessage()]
    assert len(lines) == 1, lines
    assert "\n" not in lines[0]
    consumer.check_drained()


@pytest.mark.parametrize("params", [{}, {"umbp": 3}, {NAME + "x": None}], ids=str)
def test_what_is_meant_for_others_is_left_alone(
    start: Start, cluster: MemoryCluster, caplog: pytest.LogCaptureFixture, params: object
) -> None:
    consumer, _ = start({"lookup_timeout_ms": LONG_MS}, role="kv_consumer")
    consumer.run(tokens(PROMPT), transfer_params=params)
    assert not [record for record in caplog.records if "UMBP" in record.getMessage()]


def test_nobody_waits_for_another_prompt_or_for_what_is_not_worth_loading(
    start: Start, cluster: MemoryCluster
) -> None:
    producer, _ = start(role="kv_producer")
    cluster.hang("put")
    told = prefilled(producer)
    consumer, _ = start({"lookup_timeout_ms": LONG_MS}, role="kv_consumer")
    consumer.run(tokens(PROMPT, 1), transfer_params=told)
    consumer.run(tokens(5 * BLOCK), transfer_params=told)
    told[NAME]["stored_tokens"] = 0
    consumer.run(tokens(PROMPT), transfer_params=told)
    consumer.forget_prefixes()
    told[NAME]["stored_tokens"] = 10 * BLOCK
    consumer.connector.scheduler_side._worth._fixed_tokens = 11 * BLOCK
    consumer.run(tokens(PROMPT), transfer_params=told)
    consumer.check_drained()


# Both on one node


def test_a_consumer_waits_for_what_is_being_written_also_without_being_told(make_engine: Any) -> None:
    pool = ReferenceRuntime()
    producer = make_engine(runtime := Unfinished(pool), role="kv_producer")
    consumer = make_engine(pool, {"lookup_timeout_ms": LONG_MS}, role="kv_consumer")
    producer.add(tokens(3 * BLOCK + 1))
    producer.step()
    assert pool.shelf.written
    request = consumer.add(tokens(3 * BLOCK + 1))
    steps(consumer, 10)
    assert not request.num_computed_tokens
    runtime.is_held = False
    producer.drain()
    drain(consumer)
    assert consumer.restored_tokens() == 3 * BLOCK
    for engine in (producer, consumer):
        engine.check_drained()


def test_an_engine_that_stores_as_well_does_not_wait_for_writers(make_engine: Any) -> None:
    pool = ReferenceRuntime()
    producer = make_engine(runtime := Unfinished(pool), role="kv_producer")
    other = make_engine(pool, {"lookup_timeout_ms": LONG_MS})
    producer.add(tokens(3 * BLOCK + 1))
    producer.step()
    other.run(tokens(3 * BLOCK + 1))
    assert not other.restored_tokens()
    runtime.is_held = False
    producer.drain()


def test_a_writer_that_gives_up_is_waited_for_no_longer(make_engine: Any) -> None:
    pool = ReferenceRuntime()
    producer = make_engine(runtime := Unfinished(pool), role="kv_producer")
    consumer = make_engine(pool, {"lookup_timeout_ms": LONG_MS}, role="kv_consumer")
    producer.add(tokens(3 * BLOCK + 1))
    producer.step()
    assert pool.shelf.written
    consumer.add(tokens(3 * BLOCK + 1))
    steps(consumer, 10)
    pool.shelf.written.clear()
    drain(consumer)
    assert not consumer.restored_tokens()
    runtime.is_held = False
    producer.drain()


@pytest.mark.parametrize("is_told", [True, False], ids=["told", "untold"])
def test_engines_of_one_node_hand_over_in_the_pool_that_they_share(
    shared_pool: Any, make_engine: Any, is_told: bool
) -> None:
    runtime = Unfinished(shared_pool(1000, "node"))
    producer = make_engine(runtime, role="kv_producer")
    consumer = make_engine(shared_pool(1000, "node"), {"lookup_timeout_ms": LONG_MS}, role="kv_consumer")
    request = producer.add(tokens(3 * BLOCK + 1))
    producer.step()
    told = producer.handed_over[request.request_id]
    pool = consumer.connector.scheduler_side._pool
    (stage,) = pool._stages
    names = pool.codec.keys(request.block_hashes)
    deadline_s = time.monotonic() + 30
    while stage.handle.lookup_states(names)[0] is LookupState.MISS:
        assert time.monotonic() < deadline_s, "its copies, on a thread of their own, are never begun"
        time.sleep(0)
    early = consumer.add(tokens(3 * BLOCK + 1), transfer_params=told if is_told else None)
    steps(consumer, 10)
    assert not early.num_computed_tokens
    runtime.is_held = False
    producer.drain()
    drain(consumer)
    assert consumer.restored_tokens() == 3 * BLOCK
    for engine in (producer, consumer):
        engine.check_drained()


# What is told is what can be found


def found_as_told(make_engine: Any, **shape: Any) -> None:
    pool = ReferenceRuntime()
    producer = make_engine(pool, role="kv_producer", **shape)
    consumer = make_engine(pool, {"lookup_timeout_ms": LONG_MS}, role="kv_consumer", **shape)
    # Some pools are open only after a first step.
    consumer.run(tokens(BLOCK, 99))
    dropped = 4 * BLOCK if consumer.shape.has_draft_layer else 0
    for seed, length in enumerate((PROMPT, 8 * BLOCK, 8 * BLOCK + 1, 3 * BLOCK + 5)):
        request = producer.run(tokens(length, seed))
        told = producer.handed_over.get(request.request_id)
        before = consumer.restored_tokens()
        consumer.add(tokens(length, seed), transfer_params=told)
        drain(consumer)
        if told is not None:
            restored = consumer.restored_tokens() - before
            assert restored >= told[NAME]["stored_tokens"] - dropped
    assert any("stored_tokens" in each[NAME] for each in producer.handed_over.values())
    consumer.check_drained()


@pytest.mark.parametrize(
    "layers",
    [(Layers("full", 1), Layers("sliding", 2, 40)), (Layers("full", 1), Layers("mamba", 2))],
    ids=["windows", "states"],
)
def test_windows_and_states_are_handed_over(make_engine: Any, layers: tuple[Layers, ...]) -> None:
    found_as_told(make_engine, layers=layers)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHAPES)
def test_engines_of_every_kind_hand_over(make_engine: Any, kind: str) -> None:
    shape = SHAPES[kind]
    found_as_told(
        make_engine,
        **{name: getattr(shape, name) for name in shape.__slots__ if name not in ("extra", "role")},
    )
