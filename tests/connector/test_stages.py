"""Engines whose ranks keep different layers: a pool of one namespace a pipeline stage, seen as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
from scripted_runtime import WatchedRuntime, plain

from umbp.connector.scheduler.pool_view import PoolView
from umbp.connector.wire import (
    UMBPConnectorMetadata,
    UMBPHandshakeMetadata,
    UMBPPoolHandshakeMetadata,
    reports_by_rank,
)
from umbp.connector.worker import WorkerSide
from umbp.data import (
    BlockIdentityCodec,
    BlockLoadBatch,
    BlockStoreBatch,
    EngineTopology,
    KVLayoutPlanner,
    KVRegion,
    Rank,
    RankTopology,
    UMBPNamespace,
)
from umbp.errors import ConfigError
from umbp.options import parse_options
from umbp.runtime.base import IUMBPRuntime, UMBPSchedulerHandle
from umbp.runtime.wrap.passing import PassingRuntime, PassingSchedulerHandle
from umbp.testing.reference import ReferenceRuntime
from umbp.testing.tensors import FakeTensor

BLOCKS = 16
PAGE_BYTES = 512
HASHES = [bytes([index + 1]) * 32 for index in range(8)]
ALL_STAGES_HAVE = ((0,), (0,))
MIXED = ((0,), (0, 1))
"""Stage 0 has layers of cache group 0 alone, stage 1 of groups 0 and 1."""


class Pipeline:
    """An engine's workers over a runtime, and the scheduler's view of what they keep. Stage p keeps
    `groups[p]`, in a namespace of its own.
    """

    def __init__(
        self, runtime: IUMBPRuntime, groups: Sequence[Sequence[int]] = ALL_STAGES_HAVE, tp_size: int = 1
    ) -> None:
        self.runtime = runtime
        topology = EngineTopology(pp_size=len(groups), tp_size=tp_size)
        self.workers: dict[Rank, WorkerSide] = {}
        self.memory: dict[Rank, dict[str, FakeTensor]] = {}
        for rank in topology.all_namespaces():
            tp, _, _, pp = rank
            place = EngineTopology(pp_size=len(groups), pp_rank=pp, tp_size=tp_size, tp_rank=tp)
            self._add_worker(place, groups[pp])
        self.view = PoolView(runtime, topology)
        self.reports = {rank: worker.handshake() for rank, worker in self.workers.items()}
        self._events = 0

    def _add_worker(self, place: EngineTopology, groups: Sequence[int]) -> None:
        regions = [
            KVRegion(f"layer.{place.pp_rank}.{group}", group, PAGE_BYTES, PAGE_BYTES, n * PAGE_BYTES)
            for n, group in enumerate(groups)
        ]
        worker = WorkerSide(
            self.runtime,
            parse_options({}),
            UMBPNamespace(f"ns{place.pp_rank}"),
            place,
            KVLayoutPlanner(regions),
        )
        caches = {region.layer_name: FakeTensor.zeros((BLOCKS, PAGE_BYTES)) for region in regions}
        worker.register(caches)
        self.workers[place.local_namespace] = worker
        self.memory[place.local_namespace] = caches

    def open(self) -> Pipeline:
        self.view.open(self.reports)
        return self

    def fill(self, value: int) -> None:
        for caches in self.memory.values():
            for layer, tensor in caches.items():
                tensor.array[:] = value + len(layer)

    def store(self, hashes: Sequence[bytes], ranks: Sequence[Rank] | None = None, group: int = 0) -> None:
        """Store blocks 0, 1, ... on these ranks, in the scheduler's keys, and have each rank report it."""
        count = len(hashes)
        batch = BlockStoreBatch(
            keys=BlockIdentityCodec("ns0").keys(hashes, group),
            block_ids=range(count),
            group_ids=[group] * count,
            block_hashes=hashes,
            parent_block_hashes=[None, *hashes[:-1]],
            token_ids=[()] * count,
            block_sizes=[1] * count,
            request_id="r",
        )
        self._events += 1
        meta = UMBPConnectorMetadata(store_requests={"r": batch}, store_event=self._events, has_forward=False)
        for rank in ranks or tuple(self.workers):
            worker = self.workers[rank]
            worker.start_loads(meta)
            worker.submit_stores(meta)
            worker.collect()
            report = worker.take_report()
            assert report is not None
            result = report.store_events[self._events]
            assert (result.completed_workers, result.failed_objects) == (1, set())

    def load(self, hashes: Sequence[bytes], block_ids: Sequence[int], group: int = 0) -> set[int]:
        """Load on all ranks; the blocks that any of them could not fill."""
        keys = BlockIdentityCodec("ns0").keys(hashes, group)
        batch = BlockLoadBatch(keys, block_ids, [group] * len(keys), "r")
        meta = UMBPConnectorMetadata(load_requests={"r": batch}, load_events={"r": 1})
        failed = set()
        for worker in self.workers.values():
            worker.start_loads(meta)
            report = worker.take_report()
            assert report is not None
            assert report.load_events[1].completed_workers == 1
            failed |= worker.take_failed_blocks()
        return failed

    def close(self) -> None:
        self.view.close()
        for worker in self.workers.values():
            worker.close()


@pytest.fixture
def pipeline_on() -> Iterator[Callable[..., Pipeline]]:
    made = []

    def make(runtime: IUMBPRuntime, *arguments: Any, **shape: Any) -> Pipeline:
        made.append(Pipeline(runtime, *arguments, **shape))
        return made[-1].open()

    yield make
    for pipeline in made:
        pipeline.close()


@pytest.fixture(params=[{}, {"lookup_raw": False, "presence": False}], ids=["by hash", "by key"])
def pool(request: pytest.FixtureRequest, make_pool: Any) -> WatchedRuntime:
    """Asked by block hash, and as a runtime that knows keys alone."""
    runtime: WatchedRuntime = plain(make_pool(), **request.param)
    return runtime


# All stages as one


@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_prefix_is_there_as_far_as_every_rank_of_every_stage_has_it(
    pool: Any, pipeline_on: Any, tp_size: int
) -> None:
    pipeline = pipeline_on(pool, tp_size=tp_size)
    pipeline.store(HASHES[:2])
    for rank in pipeline.workers:
        pipeline.store(HASHES[2:3], [rank])
    *others, last = pipeline.workers
    pipeline.store(HASHES[3:4], others)
    pipeline.store(HASHES[4:5], [last])
    view = pipeline.view
    assert view.present(0, HASHES) == 3
    assert view.stored(0, HASHES[1:6]) == [True, True, False, False, False]
    assert view.hold("r", 0, HASHES) == 3
    assert view.hold("r", 0, HASHES[3:]) == 0
    view.unhold("r")
    pool.check_unpinned()


def test_every_stage_restores_its_own_layers(pool: Any, pipeline_on: Any) -> None:
    pipeline = pipeline_on(pool)
    pipeline.fill(1)
    pipeline.store(HASHES[:4])
    before = {rank: {n: t.array[:4].copy() for n, t in c.items()} for rank, c in pipeline.memory.items()}
    pipeline.fill(100)
    assert pipeline.load(HASHES[:4], [8, 9, 10, 11]) == set()
    for rank, caches in pipeline.memory.items():
        for layer, tensor in caches.items():
            assert (tensor.array[8:12] == before[rank][layer]).all()


def test_each_stage_keeps_its_objects_in_the_namespace_that_its_workers_report(pipeline_on: Any) -> None:
    runtime = ReferenceRuntime(100)
    pipeline_on(runtime).store(HASHES[:1])
    assert set(runtime.shelf.objects) == {
        f"umbp:vllm:v1:ns{stage}:tp0:pcp0:dcp0:pp{stage}:g0:{HASHES[0].hex()}" for stage in (0, 1)
    }


def test_clearing_clears_every_stage(pool: Any, pipeline_on: Any) -> None:
    pipeline = pipeline_on(pool)
    pipeline.store(HASHES[:2])
    assert pipeline.view.clear()
    pipeline.store(HASHES[:2], [(0, 0, 0, 0)])
    assert pipeline.view.present(0, HASHES) == 0
    pipeline.store(HASHES[:2], [(0, 0, 0, 1)])
    assert pipeline.view.present(0, HASHES) == 2


def test_a_watched_block_is_lost_with_the_first_stage_that_loses_it(pool: Any, pipeline_on: Any) -> None:
    pipeline = pipeline_on(pool, MIXED)
    first, second = pipeline.view._stages
    pipeline.store(HASHES[:3])
    pipeline.store(HASHES[3:4], [(0, 0, 0, 0)])
    pipeline.store(HASHES[:1], [(0, 0, 0, 1)], group=1)
    assert pipeline.view.watch(0, HASHES[:5]) == [True, True, True, False, False]
    assert pipeline.view.watch(1, HASHES[:2]) == [True, False], "only the second stage has such layers"
    assert pipeline.view.watch(2, HASHES[:1]) == [False]
    assert pipeline.view.take_lost() == []
    assert second.handle.clear()
    assert set(pipeline.view.take_lost()) == {(0, HASHES[0]), (0, HASHES[1]), (0, HASHES[2]), (1, HASHES[0])}
    pipeline.store(HASHES[:1], [(0, 0, 0, 1)])
    assert pipeline.view.watch(0, HASHES[:1]) == [True]
    assert first.handle.clear()
    assert (0, HASHES[0]) in pipeline.view.take_lost()


def test_what_one_owner_holds_adds_up_and_goes_together(make_pool: Any, pipeline_on: Any) -> None:
    pool = make_pool()
    pipeline = pipeline_on(pool, ((0, 1), (0, 1)))
    for group in (0, 1):
        pipeline.store(HASHES[:3], group=group)
    assert [pipeline.view.hold("a", group, HASHES[:2]) for group in (0, 1)] == [2, 2]
    assert pipeline.view.hold("b", 0, HASHES) == 3
    pipeline.view.unhold("a")
    pipeline.view.unhold("nobody")
    pipeline.view.unhold("b")
    pool.check_unpinned()


# Stages with different cache groups


def test_only_stages_that_have_layers_of_a_group_are_asked_for_it(pool: Any, pipeline_on: Any) -> None:
    pipeline = pipeline_on(pool, MIXED)
    pipeline.store(HASHES[:2], group=1)
    view = pipeline.view
    assert (view.present(0, HASHES), view.present(1, HASHES), view.present(2, HASHES)) == (0, 2, 0)
    assert view.stored(1, HASHES[1:3]) == [True, False]
    assert view.stored(2, HASHES[1:3]) == [False, False]
    assert (view.hold("r", 1, HASHES), view.hold("r", 2, HASHES)) == (2, 0)
    view.unhold("r")
    pool.check_unpinned()


def test_a_rank_without_layers_of_a_group_reports_its_loads_as_done(pool: Any, pipeline_on: Any) -> None:
    pipeline = pipeline_on(pool, MIXED)
    pipeline.store(HASHES[:2], group=1)
    assert pipeline.load(HASHES[:2], [4, 5], group=1) == set()
    assert pipeline.load(HASHES[:3], [4, 5, 6], group=1) == {6}


# Trouble between two stages


class TroubledRuntime(PassingRuntime):
    """A runtime that does something just before a stage's hold."""

    def __init__(self, inner: IUMBPRuntime, namespace: str, before_hold: Callable[[], None]) -> None:
        super().__init__(inner)
        self._namespace = namespace
        self._before_hold = before_hold

    def create_scheduler_handle(
        self, namespace: UMBPNamespace, topology: RankTopology, layout: Any
    ) -> UMBPSchedulerHandle:
        handle = super().create_scheduler_handle(namespace, topology, layout)
        return TroubledHandle(handle, self._before_hold) if namespace.value == self._namespace else handle


class TroubledHandle(PassingSchedulerHandle):
    def __init__(self, inner: UMBPSchedulerHandle, before_hold: Callable[[], None]) -> None:
        super().__init__(inner)
        self._before_hold = before_hold

    def hold_raw(self, request_id: str, group_id: int, block_hashes: Sequence[bytes]) -> int:
        self._before_hold()
        return super().hold_raw(request_id, group_id, block_hashes)

    def clear(self) -> bool:
        self._before_hold()
        return super().clear()


def held(runtime: ReferenceRuntime) -> list[int]:
    """How many objects of each stage are held."""
    keys = runtime.shelf.held_keys()
    return [sum(f":ns{stage}:" in key for key in keys) for stage in (0, 1)]


@pytest.mark.parametrize(("lost", "left"), [(2, 2), (0, 0)])
def test_what_a_later_stage_has_lost_meanwhile_is_held_on_no_stage(
    pipeline_on: Any, lost: int, left: int
) -> None:
    runtime = ReferenceRuntime(100)
    victim = BlockIdentityCodec("ns1", pp_rank=1).key(HASHES[lost])
    troubled = TroubledRuntime(runtime, "ns1", lambda: runtime.shelf.objects.pop(victim, None))
    pipeline = pipeline_on(troubled)
    pipeline.store(HASHES[:4])
    assert pipeline.view.hold("r", 0, HASHES) == left
    assert held(runtime) == [left, left]
    pipeline.view.unhold("r")
    assert not runtime.shelf.holds


def test_a_stage_that_can_t_answer_leaves_nothing_held_on_the_others(pipeline_on: Any) -> None:
    runtime = ReferenceRuntime(100)

    def break_down() -> None:
        raise ConnectionError("the backend is gone")

    pipeline = pipeline_on(TroubledRuntime(runtime, "ns1", break_down))
    pipeline.store(HASHES[:4])
    assert pipeline.view.hold("r", 0, HASHES) == 0
    assert not runtime.shelf.holds
    assert not pipeline.view.clear()


def test_a_stage_that_can_t_be_cleared_doesn_t_keep_the_others_from_it(pipeline_on: Any) -> None:
    runtime = ReferenceRuntime(100)

    def break_down() -> None:
        raise ConnectionError("the backend is gone")

    pipeline = pipeline_on(TroubledRuntime(runtime, "ns0", break_down))
    pipeline.store(HASHES[:4])
    assert not pipeline.view.clear()
    assert not any(":ns1:" in key for key in runtime.shelf.objects)


# The handshake


def test_workers_of_one_stage_that_differ_stop_the_start() -> None:
    pipeline = Pipeline(ReferenceRuntime(), tp_size=2)
    pipeline.reports[(1, 0, 0, 1)] = UMBPHandshakeMetadata("another")
    with pytest.raises(
        ConfigError, match=r"^workers of pipeline stage 1 derived 2 namespaces \(another, ns1"
    ):
        pipeline.open()


def test_a_stage_that_reports_nothing_stops_the_start() -> None:
    pipeline = Pipeline(ReferenceRuntime())
    del pipeline.reports[(0, 0, 0, 1)]
    with pytest.raises(ConfigError, match=r"^1 of 2 workers reported"):
        pipeline.open()


def vllm_reports(places: Mapping[tuple[int, int], str]) -> dict[tuple[int, int], UMBPHandshakeMetadata]:
    return {place: UMBPPoolHandshakeMetadata(name) for place, name in places.items()}


def test_reports_are_read_by_pipeline_and_tensor_rank() -> None:
    told = vllm_reports({(0, 0): "a", (0, 1): "b", (1, 0): "c", (1, 1): "d"})
    found = reports_by_rank(told, EngineTopology(pp_size=2, tp_size=2))
    assert {rank: report.namespace for rank, report in found.items()} == {
        (0, 0, 0, 0): "a",
        (1, 0, 0, 0): "b",
        (0, 0, 0, 1): "c",
        (1, 0, 0, 1): "d",
    }


def test_where_decode_context_is_on_every_prefill_context_rank_is_heard() -> None:
    """vLLM counts tensor ranks on through the prefill-context ranks then."""
    told = vllm_reports({(0, number): f"n{number}" for number in range(4)})
    found = reports_by_rank(told, EngineTopology(tp_size=2, pcp_size=2, dcp_size=2))
    assert {rank: report.namespace for rank, report in found.items()} == {
        (0, 0, 0, 0): "n0",
        (1, 0, 1, 0): "n1",
        (0, 1, 0, 0): "n2",
        (1, 1, 1, 0): "n3",
    }


def test_where_it_is_off_vllms_reports_are_left_for_those_of_the_first_step() -> None:
    """Several workers share a key then, and vLLM hands on one of their reports."""
    told = vllm_reports({(0, 0): "a", (0, 1): "b"})
    assert reports_by_rank(told, EngineTopology(tp_size=2, pcp_size=2)) == {}


def test_what_isn_t_of_this_connector_is_no_report() -> None:
    assert reports_by_rank({(0, 0): object()}, EngineTopology()) == {}
