"""The embedded runtime keeps the contract: with room, without, with checksums, and under every wrapper."""

from __future__ import annotations

import logging

import pytest

from umbp.data import KVLayoutDescriptor, KVRegion, RankTopology, UMBPNamespace
from umbp.options import parse_options
from umbp.pool import Pool
from umbp.runtime.base import IUMBPRuntime
from umbp.runtime.embedded import EmbeddedRuntime
from umbp.runtime.wrap.faulty import FaultPlan, FaultyRuntime
from umbp.runtime.wrap.metered import MeteredRuntime
from umbp.runtime.wrap.slow import Pace, SlowRuntime
from umbp.testing.clock import TickClock
from umbp.testing.contract import RuntimeContract
from umbp.testing.tensors import FakeTensor

SLOT_BYTES = 8192
"""What an object of 4 KiB takes with its seal and trailer, in whole pages."""


def embedded(**options: object) -> EmbeddedRuntime:
    return EmbeddedRuntime(parse_options({"capacity_bytes": "16MiB", **options}))


class TestEmbeddedRuntime(RuntimeContract):
    @pytest.fixture
    def runtime(self) -> IUMBPRuntime:
        return embedded()

    @pytest.fixture
    def scheduler_runtime(self, runtime: IUMBPRuntime) -> IUMBPRuntime:
        """The scheduler's process makes a runtime of its own."""
        return embedded()


@pytest.mark.slow
class TestEmbeddedRuntimeOfRanksThatHoldTheSame(TestEmbeddedRuntime):
    kv_tp_replicas = 2


class TestSmallEmbeddedRuntime(RuntimeContract):
    capacity_objects = 12

    @pytest.fixture
    def runtime(self) -> IUMBPRuntime:
        return embedded(capacity_bytes=self.capacity_objects * SLOT_BYTES)


class TestVerifyingEmbeddedRuntime(RuntimeContract):
    @pytest.fixture
    def runtime(self) -> IUMBPRuntime:
        return embedded(verify="always", num_workers=1)


class TestFaultyEmbeddedRuntime(RuntimeContract):
    may_fail = True

    @pytest.fixture
    def runtime(self) -> IUMBPRuntime:
        plan = FaultPlan(3, load_keys=0.2, load_jobs=0.1, store_keys=0.2, store_jobs=0.1, lookups=0.2)
        return FaultyRuntime(embedded(), plan)


class TestWrappedEmbeddedRuntime(RuntimeContract):
    @pytest.fixture
    def runtime(self) -> IUMBPRuntime:
        clock = TickClock()

        def tick() -> float:
            clock.advance(0.01)
            return clock.now_s

        slow = SlowRuntime(embedded(), Pace({"load": 0.5, "store": 1.0}, tick, clock.sleep))
        return MeteredRuntime(FaultyRuntime(slow, FaultPlan()))


@pytest.mark.parametrize(("blocks", "is_warned"), [(10, True), (40, False)])
def test_a_pool_with_fewer_blocks_than_the_engine_is_warned_of(
    caplog: pytest.LogCaptureFixture, blocks: int, is_warned: bool
) -> None:
    runtime = embedded(capacity_bytes=blocks * SLOT_BYTES)
    layout = KVLayoutDescriptor((KVRegion("layer", 0, 4096, 4096, 0),), RankTopology())
    worker = runtime.create_worker_handle(UMBPNamespace("n"), RankTopology(), layout)
    with caplog.at_level(logging.WARNING, logger="vllm.umbp"):
        worker.register_buffers({"layer": FakeTensor.zeros((32, 4096))})
    said = [record.getMessage() for record in caplog.records]
    assert any(f"holds {blocks} blocks, fewer than the 32" in line for line in said) == is_warned
    worker.close()


@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_the_schedulers_notes_reach_the_policy_of_the_workers_pool(policy: str) -> None:
    runtime = embedded(eviction_policy=policy)
    layout = KVLayoutDescriptor((KVRegion("layer", 0, 4096, 4096, 0),), RankTopology())
    worker = runtime.create_worker_handle(UMBPNamespace("n"), RankTopology(), layout)
    worker.register_buffers({"layer": FakeTensor.zeros((32, 4096))})
    scheduler = runtime.create_scheduler_handle(UMBPNamespace("n"), RankTopology(), layout)
    extra = worker.handshake_extra()
    scheduler.bind_workers({RankTopology().local_namespace: extra})
    pool = Pool.attach(f"/proc/{extra['pid']}/fd/{extra['fd']}")
    assert pool.eviction_policy == policy
    for request in range(3):
        scheduler.note(f"r{request}", "admit", [b"a", b"b"])
        scheduler.note(f"r{request}", "end", [b"a", b"b", b"c"], 40, "stop")
    assert pool.stats()["noted"] == (3 if policy == "hazard" else 0)
    worker.audit()
    scheduler.close()
    worker.close()
