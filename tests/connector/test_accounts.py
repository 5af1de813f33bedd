"""What is counted is counted once; what is opened is closed once; messages survive their journey."""

from __future__ import annotations

import itertools
import json
import pickle
import time
from typing import Any

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scripted import BLOCK, ScriptedEngine, tokens
from scripted_runtime import CountingRuntime
from vllm.v1.request import RequestStatus

from umbp.connector.connector import UMBPStoreConnector
from umbp.connector.scheduler.account import Ledger, LoadEntry, StoreEntry
from umbp.connector.stats import (
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    LABEL_VALUES,
    LABELS,
    OBSERVATIONS_LIMIT,
    UMBPPromMetrics,
    UMBPStats,
)
from umbp.connector.wire import (
    UMBPConnectorMetadata,
    UMBPConnectorWorkerMetadata,
    UMBPHandshakeMetadata,
    UMBPPoolHandshakeMetadata,
)
from umbp.data import BlockLoadBatch, BlockStoreBatch, BlockTransferPlan, StoreEventResult
from umbp.errors import InvariantError
from umbp.testing.engine.shape import Layers
from umbp.testing.reference import ReferenceRuntime

TOKEN_COUNTERS = ("asked_tokens", "hit_tokens", "loaded_tokens", "failed_load_tokens", "stored_tokens")


def counts(engine: ScriptedEngine) -> tuple[int, ...]:
    return tuple(engine.count(name) for name in TOKEN_COUNTERS)


# Statistics


@pytest.mark.parametrize("load_async", [True, False], ids=["async", "sync"])
@pytest.mark.parametrize("ranks", [1, 2], ids=["tp1", "tp2"])
def test_tokens_are_counted_once_for_the_engine_and_bytes_once_for_each_rank(
    make_pool: Any, make_engine: Any, load_async: bool, ranks: int
) -> None:
    engine = make_engine(make_pool(), {"load_async": load_async}, ranks=ranks)
    engine.run(tokens(100), 3)
    assert counts(engine) == (96, 0, 0, 0, 96)
    stored_bytes = engine.count("stored_bytes")
    engine.forget_prefixes()
    engine.run(tokens(100), 3)
    assert counts(engine) == (192, 96, 96, 0, 96)
    assert engine.count("loaded_bytes") == stored_bytes == 6 * ranks * 2 * 512
    assert engine.count("stored_bytes") == stored_bytes


def test_a_question_that_is_repeated_while_there_are_no_blocks_counts_once(
    make_pool: Any, make_engine: Any
) -> None:
    engine = make_engine(make_pool(), blocks=20)
    engine.run(tokens(150))
    engine.forget_prefixes()
    engine.add(tokens(200, 3), 40)
    for _ in range(5):
        engine.step()
    asked = engine.count("asked_tokens")
    engine.add(tokens(150), 2)
    engine.drain()
    assert engine.count("asked_tokens") == asked + 144
    assert engine.count("hit_tokens") == 144
    assert engine.count("loaded_tokens") == 144


def test_the_policy_is_told_of_a_request_once_at_its_admission_and_once_at_its_end(
    make_pool: Any, make_engine: Any
) -> None:
    runtime = CountingRuntime(make_pool())
    engine = make_engine(runtime)
    request = engine.add(tokens(100), 20, request_id="a")
    for _ in range(5):
        engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.drain()
    assert request.num_preemptions == 1
    assert runtime.notes == [(0, "a", "admit", 6, 0, ""), (0, "a", "end", 7, 20, "length")]
    runtime.notes.clear()
    engine.add(tokens(100), request_id="b")
    engine.abort("b")
    engine.add(tokens(60), 9, request_id="c")
    engine.step()
    engine.abort("c")
    engine.drain()
    assert runtime.notes == [(0, "c", "admit", 3, 0, ""), (0, "c", "end", 3, 1, "abort")]


def test_requests_are_noted_in_every_cache_group_by_its_own_blocks(make_engine: Any) -> None:
    """Scenario: only the first group was noted, the others' blocks grew old and left the pool, and nothing
    could be restored with what was left.
    """
    runtime = CountingRuntime(ReferenceRuntime())
    wide = Layers("sliding", 2, 40, head_size=2)
    engine = make_engine(runtime, layers=(Layers("full", 1), wide))
    engine.run(tokens(6 * BLOCK + 3), request_id="a")
    sizes = [group.block_tokens for group in engine.connector.scheduler_side._shape.groups]
    assert len(set(sizes)) == 2, "the groups' blocks are of different sizes"
    for phase in ("admit", "end"):
        noted = {group: count for group, _, when, count, _, _ in runtime.notes if when == phase}
        assert noted == {group: 6 * BLOCK // size for group, size in enumerate(sizes)}


def test_asking_again_is_cheap_for_the_longest_prompts(make_engine: Any) -> None:
    runtime = CountingRuntime(ReferenceRuntime())
    engine = make_engine(runtime)
    engine.run(tokens(100))
    prompt = tokens(100) + [7] * 600_000
    request = engine.make_request(prompt)
    assert engine.connector.get_num_new_matched_tokens(request, 0)[0] == 96
    runtime.asked.clear()
    best_s = 1.0
    for _ in range(200):
        begun = time.perf_counter()
        engine.connector.get_num_new_matched_tokens(request, 0)
        best_s = min(best_s, time.perf_counter() - begun)
    assert best_s < 100e-6
    assert not runtime.asked
    request.status = RequestStatus.FINISHED_ABORTED
    engine.connector.request_finished(request, [])


def test_the_pools_size_is_shown_as_gauges_of_each_rank(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(make_pool(100), ranks=2)
    engine.run(tokens(100))
    assert set(engine.stats.data["gauges"]) == {"0", "1"}
    assert set(engine.stats.gauges) == {name for name in GAUGES if name.startswith("pool_")}


def test_evictions_are_counted_before_the_engine_falls_silent(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(make_pool(8))
    for seed in range(4):
        engine.run(tokens(100, seed))
    assert engine.stats.counters["evicted_objects"] >= 16


def test_stats_that_reach_the_front_end_are_plain_values(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(make_pool(), ranks=2)
    engine.run(tokens(100))
    data = json.loads(json.dumps(engine.stats.data))
    rebuilt = UMBPStoreConnector.build_kv_connector_stats(data)
    assert isinstance(rebuilt, UMBPStats)
    assert rebuilt.counters == engine.stats.counters


AMOUNTS = st.dictionaries(st.sampled_from(sorted(COUNTERS)), st.integers(0, 1000))


def add(stats: UMBPStats, name: str, amount: float) -> None:
    """Count under the first value of each label."""
    stats.add(name, amount, *(LABEL_VALUES[label][0] for label in LABELS.get(name, ())))


@given(st.lists(AMOUNTS, max_size=5))
def test_aggregation_adds_whatever_is_there_also_nothing(parts: list[dict[str, int]]) -> None:
    total = UMBPStats()
    for part in parts:
        stats = UMBPStats()
        for name, amount in part.items():
            add(stats, name, amount)
        total = total.aggregate(stats)
    expected = {name: sum(part.get(name, 0) for part in parts) for name in COUNTERS}
    assert {name: total.counters.get(name, 0) for name in COUNTERS} == expected
    total.reduce()
    assert total.is_empty() == (not any(expected.values()))


def test_empty_stats_are_none_and_never_raise() -> None:
    stats = UMBPStats()
    assert stats.take() is None
    assert stats.is_empty()
    assert stats.reduce() == {}
    assert stats.aggregate(UMBPStats()).is_empty()
    built = UMBPStoreConnector.build_kv_connector_stats(None)
    assert built is not None
    assert built.is_empty()
    stats.add("asked_tokens", 0)
    assert stats.take() is None


def test_a_counter_has_the_labels_that_are_its_own() -> None:
    stats = UMBPStats()
    stats.add("failed_load_tokens", 16, "dram", "absent")
    stats.add("failed_load_tokens", 32, "dram", "damaged")
    assert stats.counters == {"failed_load_tokens": 48}
    with pytest.raises(ValueError, match="labels"):
        stats.add("failed_load_tokens", 1)
    with pytest.raises(ValueError, match="labels"):
        stats.add("asked_tokens", 1, "dram")


def test_what_is_observed_is_bounded_and_the_log_shows_its_middle_and_its_end() -> None:
    stats = UMBPStats()
    for number in range(OBSERVATIONS_LIMIT):
        stats.observe("load_job_seconds", number / 1000)
    other = UMBPStats()
    other.observe("load_job_seconds", 5.0)
    total = UMBPStats().aggregate(stats).aggregate(other)
    assert len(total.seconds["load_job_seconds"]) == OBSERVATIONS_LIMIT
    assert not total.is_empty()
    shown = other.aggregate(UMBPStats(data={"seconds": {"load_job_seconds": [0.001, 0.002]}})).reduce()
    assert shown == {"load_job_median_ms": 2.0, "load_job_max_ms": 5000.0}
    assert UMBPStats(data={"seconds": {"load_job_seconds": []}}).reduce() == {}


def test_taken_stats_start_anew() -> None:
    stats = UMBPStats()
    stats.add("asked_tokens", 5)
    taken = stats.take()
    assert taken is not None
    assert taken.counters == {"asked_tokens": 5}
    assert stats.take() is None


def test_gauges_of_ranks_are_summed_and_the_latest_counts() -> None:
    stats = UMBPStats()
    stats.set_gauges(0, {"pool_objects": 5.0})
    later = UMBPStats()
    later.set_gauges(0, {"pool_objects": 7.0})
    later.set_gauges(1, {"pool_objects": 1.0})
    assert stats.aggregate(later).gauges == {"pool_objects": 8.0}
    assert stats.reduce() == {"pool_objects": 8.0}


def test_prometheus_is_given_every_counter_and_gauge(make_engine: Any) -> None:
    config = make_engine(ReferenceRuntime()).config
    kinds = {
        kind: kind
        for kind in (prometheus_client.Gauge, prometheus_client.Counter, prometheus_client.Histogram)
    }
    before = set(prometheus_client.REGISTRY._collector_to_names)
    metrics = UMBPPromMetrics(config, kinds, ["model_name", "engine"], {0: ["m", "0"]})
    try:
        stats = UMBPStats()
        stats.add("loaded_tokens", 96, "dram")
        stats.add("failed_load_tokens", 16, "dram", "absent")
        stats.add("failed_load_tokens", 32, "shelf", "absent")
        stats.observe("load_job_seconds", 0.003)
        stats.observe("load_job_seconds", 0.2)
        stats.set_gauges(0, {"pool_objects": 5.0})
        metrics.observe({})
        metrics.observe(stats.data)
        metrics.observe(stats.data)
        text = prometheus_client.generate_latest().decode()
    finally:
        for collector in set(prometheus_client.REGISTRY._collector_to_names) - before:
            prometheus_client.REGISTRY.unregister(collector)
    assert 'vllm:umbp_loaded_tokens_total{engine="0",model_name="m",tier="dram"} 192.0' in text
    failed = 'vllm:umbp_failed_load_tokens_total{engine="0",model_name="m",reason="%s",tier="%s"} %s'
    assert failed % ("absent", "dram", 32.0) in text
    assert failed % ("absent", "shelf", 64.0) in text, "a tier that nobody knew of"
    assert failed % ("damaged", "dram", 0.0) in text, "rates need a beginning"
    assert 'vllm:umbp_load_job_seconds_bucket{engine="0",le="0.005",model_name="m"} 2.0' in text
    assert 'vllm:umbp_load_job_seconds_count{engine="0",model_name="m"} 4.0' in text
    assert 'vllm:umbp_pool_objects{engine="0",model_name="m"} 5.0' in text
    for name in COUNTERS:
        assert f"vllm:umbp_{name}_total" in text
    for name in HISTOGRAMS:
        assert f"vllm:umbp_{name}_bucket" in text


# Ledgers


def test_an_entry_closes_once_when_every_rank_has_reported() -> None:
    closed: list[tuple[Any, set[tuple[int, bytes]]]] = []
    ledger: Ledger[StoreEntry] = Ledger(
        2, lambda entry, result, reason: closed.append((entry, result.failed_objects))
    )
    entry = StoreEntry({})
    event = ledger.open(entry)
    ledger.report(event, StoreEventResult(0, {(0, b"a")}))
    ledger.report(event, StoreEventResult(1, {(0, b"b")}))
    ledger.audit()
    assert (len(ledger), closed) == (1, [])
    ledger.report(event, StoreEventResult(1))
    assert closed == [(entry, {(0, b"a"), (0, b"b")})]
    ledger.report(event, StoreEventResult(1))
    ledger.report(99, StoreEventResult(1))
    assert (len(ledger), len(closed)) == (0, 1)
    ledger.audit()


def test_an_audit_finds_an_entry_that_should_be_closed() -> None:
    ledger: Ledger[LoadEntry] = Ledger(1, lambda entry, result, reason: None)
    event = ledger.open(LoadEntry("r", "r#0", (1,), ((0, b"a"),), BLOCK, 0.0))
    assert [entry.request_id for entry in ledger.entries()] == ["r"]
    ledger._open[event].result.completed_workers = 1
    with pytest.raises(InvariantError, match="has all reports"):
        ledger.audit()


def test_event_numbers_are_never_used_again() -> None:
    ledger: Ledger[StoreEntry] = Ledger(1, lambda entry, result, reason: None)
    events = []
    for _ in range(5):
        events.append(ledger.open(StoreEntry({})))
        ledger.report(events[-1], StoreEventResult(1))
    assert len(set(events)) == 5


# Messages


def test_the_metadata_survive_pickle() -> None:
    plan = BlockTransferPlan("k", 4, group_id=0)
    meta = UMBPConnectorMetadata(
        async_load=True,
        store_plans=[plan],
        load_requests={"a": BlockLoadBatch(["k"], [3], [0], "a")},
        store_requests={"b": BlockStoreBatch(["k"], [3], [0], [b"h"], [None], [()], [16], "b")},
        preempted_request_ids={"c"},
        store_event=7,
        load_events={"a": 2},
    )
    assert pickle.loads(pickle.dumps(meta)) == meta
    assert [one.block_id for one in meta.iter_store_plans()] == [4, 3]
    assert [len(group) for group in meta.store_plan_groups()] == [1, 1]
    report = UMBPConnectorWorkerMetadata({1: StoreEventResult(1, {(0, b"h")})}, {2: StoreEventResult(1)})
    assert pickle.loads(pickle.dumps(report)) == report
    for handshake in (UMBPHandshakeMetadata("n"), UMBPPoolHandshakeMetadata("n", {"pid": 1, "boot_id": "x"})):
        assert pickle.loads(pickle.dumps(handshake)) == handshake


def test_a_steps_metadata_of_a_real_schedule_survive_pickle(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(make_pool())
    engine.run(tokens(100))
    engine.forget_prefixes()
    engine.add(tokens(100), 3)
    engine.add(tokens(100, 5), 3)
    seen = 0
    while engine.scheduler.has_requests():
        meta = engine.step().kv_connector_metadata
        assert pickle.loads(pickle.dumps(meta)) == meta
        seen += len(meta.load_requests) + len(meta.store_requests)
    assert seen >= 2


def test_each_stored_blocks_parent_is_the_block_before_it(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(make_pool(), max_batched_tokens=2 * BLOCK)
    engine.run(tokens(3 * BLOCK + 1))
    engine.forget_prefixes()
    request = engine.add(tokens(3 * BLOCK) + tokens(3 * BLOCK, 2))
    stored: list[tuple[bytes | None, bytes]] = []
    while engine.scheduler.has_requests():
        for batch in engine.step().kv_connector_metadata.store_requests.values():
            stored += zip(batch.parent_block_hashes, batch.block_hashes, strict=True)
    assert stored == list(itertools.pairwise(request.block_hashes[2:6]))


def test_reports_of_ranks_merge_event_by_event() -> None:
    mine = UMBPConnectorWorkerMetadata({1: StoreEventResult(1)}, {5: StoreEventResult(1)})
    theirs = UMBPConnectorWorkerMetadata(
        {1: StoreEventResult(1, {(0, b"x")}), 2: StoreEventResult(1)}, {5: StoreEventResult(1)}
    )
    assert mine.aggregate(theirs) is mine
    assert mine.store_events == {1: StoreEventResult(2, {(0, b"x")}), 2: StoreEventResult(1)}
    assert mine.load_events == {5: StoreEventResult(2)}
    theirs.store_events[2].completed_workers = 9
    assert mine.store_events[2].completed_workers == 1


def test_reports_have_no_truth_of_their_own() -> None:
    """The engine's aggregation drops what is false."""
    for message in (UMBPConnectorWorkerMetadata(), UMBPStats(), UMBPConnectorMetadata()):
        assert bool(message)


def test_a_step_without_news_reports_nothing(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(make_pool())
    worker = engine.ranks[0].connector
    assert worker.build_connector_worker_meta() is None
    assert worker.get_finished(set()) == (None, set())
    assert worker.get_block_ids_with_load_errors() == set()


def test_the_audit_finds_a_request_that_loads_and_is_promised_more(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(make_pool())
    engine.run(tokens(100))
    request = engine.make_request(tokens(100))
    engine.connector.get_num_new_matched_tokens(request, 0)
    side = engine.connector.scheduler_side
    side._requests[request.request_id].is_loading = True
    with pytest.raises(InvariantError, match="loads and is promised more"):
        side.audit()
    side._requests[request.request_id].is_loading = False
    request.status = RequestStatus.FINISHED_ABORTED
    engine.connector.request_finished(request, [])
