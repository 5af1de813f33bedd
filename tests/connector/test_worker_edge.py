"""The worker's edge to a runtime that isn't ours: what it throws is a failed transfer, unless
nobody could then know whether blocks are still being written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from umbp.connector.wire import UMBPConnectorMetadata
from umbp.connector.worker import IDLE_NAP_S, IDLE_WAIT_BYTES, WorkerSide
from umbp.data import (
    BlockIdentityCodec,
    BlockLoadBatch,
    BlockStoreBatch,
    BlockTransferPlan,
    KVLayoutPlanner,
    KVRegion,
    RankTopology,
    TransferJobState,
    UMBPNamespace,
)
from umbp.errors import UMBPError
from umbp.options import parse_options
from umbp.runtime.base import Capabilities, IUMBPRuntime, UMBPWorkerHandle
from umbp.runtime.wrap.passing import PassingRuntime, PassingWorkerHandle
from umbp.testing.clock import TickClock
from umbp.testing.reference import ReferenceRuntime
from umbp.testing.tensors import FakeTensor

PAGE_BYTES = 64
HASHES = tuple(bytes([index + 1]) * 32 for index in range(3))
KEYS = BlockIdentityCodec("n").keys(HASHES)


class ThrowingRuntime(PassingRuntime):
    """Throws from the verbs it is told to."""

    def __init__(self, inner: IUMBPRuntime, verbs: Sequence[str]) -> None:
        super().__init__(inner)
        self.verbs = verbs
        self.capabilities = Capabilities()

    def _around_worker(self, inner: UMBPWorkerHandle, topology: RankTopology) -> UMBPWorkerHandle:
        return ThrowingWorkerHandle(inner, self)


class ThrowingWorkerHandle(PassingWorkerHandle):
    def __init__(self, inner: UMBPWorkerHandle, runtime: ThrowingRuntime) -> None:
        super().__init__(inner)
        self._runtime = runtime

    def _may_throw(self, verb: str) -> None:
        if verb in self._runtime.verbs:
            raise ConnectionError(f"{verb}: the backend is gone")

    def load(self, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        self._may_throw("load")
        return self._unended(super().load(plans))

    def store(self, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        self._may_throw("store")
        return super().store(plans)

    def _unended(self, job: TransferJobState) -> TransferJobState:
        """The wrapped job has ended when it is returned; with `poll` or `pending` it is shown as running."""
        if not {"poll", "pending"} & set(self._runtime.verbs):
            return job
        shown = TransferJobState(job.plans)
        shown.start()
        return shown

    def poll(self, job: TransferJobState) -> TransferJobState | None:
        self._may_throw("poll")
        return None if "pending" in self._runtime.verbs else super().poll(job)

    def publish(self, job: TransferJobState) -> None:
        self._may_throw("publish")
        super().publish(job)


def worker(
    *verbs: str,
    naps: list[float] | None = None,
    nap: Callable[[float], None] | None = None,
    made: list[ThrowingRuntime] | None = None,
    clock: TickClock | None = None,
    local: bool = False,
    idle_wait_bytes: int = IDLE_WAIT_BYTES,
) -> WorkerSide:
    regions = [KVRegion("layer", 0, PAGE_BYTES, PAGE_BYTES, 0, 16)]
    runtime = ThrowingRuntime(ReferenceRuntime(), verbs)
    runtime.capabilities = Capabilities(local=local)
    if made is not None:
        made.append(runtime)
    side = WorkerSide(
        runtime,
        parse_options({}),
        UMBPNamespace("n"),
        RankTopology(),
        KVLayoutPlanner(regions),
        nap=nap or (naps if naps is not None else []).append,
        clock=clock or TickClock(),
        idle_wait_bytes=idle_wait_bytes,
    )
    side.register({"layer": FakeTensor.zeros((8, PAGE_BYTES))})
    return side


def store_step(side: WorkerSide) -> Any:
    parents = (None, *HASHES[:-1])
    batch = BlockStoreBatch(KEYS, (1, 2, 3), (0,) * 3, HASHES, parents, ((),) * 3, (16,) * 3, "r")
    meta = UMBPConnectorMetadata(store_requests={"r": batch}, store_event=4)
    side.start_loads(meta)
    side.submit_stores(meta)
    side.collect()
    report = side.take_report()
    assert report is not None
    return report.store_events[4]


def load_step(side: WorkerSide, *, async_load: bool = True) -> set[str]:
    batch = BlockLoadBatch(KEYS, (4, 5, 6), (0,) * 3, "r")
    meta = UMBPConnectorMetadata(
        async_load=async_load, load_requests={"r": batch}, load_events={"r": 9}, has_forward=False
    )
    side.start_loads(meta)
    side.submit_stores(meta)
    return side.collect()


@pytest.mark.parametrize("verb", ["store", "publish"])
def test_a_store_that_throws_loses_its_objects_and_is_reported_once(verb: str) -> None:
    side = worker(verb)
    result = store_step(side)
    assert result.completed_workers == 1
    assert result.failed_objects == {(0, block_hash) for block_hash in HASHES}
    assert side.take_report() is None


def test_a_load_that_throws_when_it_begins_fails_all_its_blocks() -> None:
    side = worker("load")
    assert load_step(side) == {"r"}
    assert side.take_failed_blocks() == {4, 5, 6}


def test_a_load_of_what_is_not_there_fails_all_its_blocks_and_names_the_hashes() -> None:
    side = worker()
    assert load_step(side) == {"r"}
    assert side.take_failed_blocks() == {4, 5, 6}
    report = side.take_report()
    assert report is not None
    assert report.load_events[9].failed_objects == {(0, block_hash) for block_hash in HASHES}


def test_a_load_whose_end_can_not_be_known_stops_the_engine_with_a_sentence() -> None:
    with pytest.raises(UMBPError, match=r"3 blocks has ended .*the backend is gone.* the engine stops"):
        load_step(worker("poll"))


def test_a_step_with_nothing_to_compute_leaves_the_processor_to_what_is_pending() -> None:
    naps: list[float] = []
    side = worker("pending", naps=naps)
    assert load_step(side) == set()
    assert naps == [IDLE_NAP_S]
    side.start_loads(UMBPConnectorMetadata())
    assert side.collect() == set()
    assert naps == [IDLE_NAP_S], "a step that computes is not delayed"


def test_what_ends_while_the_processor_is_left_to_it_is_told_in_the_same_step() -> None:
    runtime: list[ThrowingRuntime] = []

    def nap(seconds: float) -> None:
        runtime[0].verbs = ()

    side = worker("pending", nap=nap, made=runtime)
    assert load_step(side) == {"r"}


def test_a_step_with_nothing_to_compute_does_not_hold_up_arrivals_for_a_long_copy() -> None:
    # Beside loads of many gigabytes a new request could not begin before the last of them had ended.
    naps: list[float] = []
    side = worker("pending", naps=naps, local=True, idle_wait_bytes=3 * PAGE_BYTES - 1)
    assert load_step(side) == set()
    assert naps == [IDLE_NAP_S]


def test_lost_blocks_are_told_of_once_a_minute_with_their_number_and_a_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = TickClock()
    side = worker("load", clock=clock)
    with caplog.at_level(logging.WARNING, logger="vllm.umbp"):
        for _ in range(3):
            load_step(side)
            side.take_report()
        clock.advance(61.0)
        load_step(side)
    said = [r.getMessage() for r in caplog.records if "could not be loaded" in r.getMessage()]
    assert [line.split()[1] for line in said] == ["3", "9"]
    assert all(line.endswith("load: the backend is gone") for line in said)
