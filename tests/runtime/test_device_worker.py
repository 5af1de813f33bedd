"""A worker whose KV memory a device's driver copies keeps the contract, and pins the pool that it uses and no
other. The device is host memory that does everything as late as it may."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from late_device import LateCopies, LateDevice
from replaced_pools import ReplacedPools

from umbp.data import (
    BlockIdentityCodec,
    BlockTransferPlan,
    KVLayoutDescriptor,
    KVRegion,
    RankTopology,
    UMBPNamespace,
)
from umbp.options import parse_options
from umbp.runtime.base import IUMBPRuntime
from umbp.runtime.embedded import EmbeddedRuntime, OwnPool
from umbp.runtime.pool_worker import PoolWorkerHandle
from umbp.testing.contract import RuntimeContract
from umbp.testing.tensors import FakeTensor
from umbp.transfer import Engine
from umbp.transfer.direct import DirectEngine

OPTIONS = parse_options({"capacity_bytes": "16MiB"})


class DeviceTensor:
    """A view of numpy memory that knows the allocation that it lies in."""

    def __init__(self, tensor: FakeTensor) -> None:
        root = tensor.array
        while root.base is not None:
            root = root.base
        self._address, self._size = int(root.ctypes.data), root.nbytes

    def untyped_storage(self) -> Any:
        return SimpleNamespace(data_ptr=lambda: self._address, nbytes=lambda: self._size)


class OneDevice:
    """Makes engines of one device."""

    def __init__(self) -> None:
        self.device = LateDevice(seed=3)

    def __call__(self, kv_caches: Mapping[str, Any], threads: int) -> Engine:
        caches: Any = {name: DeviceTensor(tensor) for name, tensor in kv_caches.items()}
        return DirectEngine(caches, self.device, LateCopies(self.device), threads, shortest_bytes=1)


class DeviceRuntime(EmbeddedRuntime):
    def create_worker_handle(
        self, namespace: UMBPNamespace, topology: RankTopology, layout: KVLayoutDescriptor
    ) -> PoolWorkerHandle:
        keeper = OwnPool(OPTIONS, namespace, topology.rank_count)
        return PoolWorkerHandle(OPTIONS, layout, keeper, make_engine=OneDevice())


class TestDeviceRuntime(RuntimeContract):
    @pytest.fixture
    def runtime(self) -> IUMBPRuntime:
        return DeviceRuntime(OPTIONS)

    @pytest.fixture
    def scheduler_runtime(self) -> IUMBPRuntime:
        return EmbeddedRuntime(OPTIONS)


def test_what_is_pinned_is_the_pool_in_use() -> None:
    """From the start; a pool that was replaced is let go before it is closed; at the end nothing is left."""
    engines, keeper = OneDevice(), ReplacedPools()
    pins = engines.device.pins
    layout = KVLayoutDescriptor((KVRegion("layer", 0, 4096, 4096, 0),), RankTopology())
    worker = PoolWorkerHandle(OPTIONS, layout, keeper, make_engine=engines)
    memory = FakeTensor.zeros((8, 4096))
    worker.register_buffers({"layer": memory})
    assert list(pins) == [keeper.pool.arena[0]]
    codec = BlockIdentityCodec(UMBPNamespace("n"))
    for step in range(3):
        plan = BlockTransferPlan(codec.key(bytes([step + 1]) * 8), step, group_id=0)
        memory.array[step] = step + 1
        job = worker.wait(worker.store([plan]))
        worker.publish(job)
        assert job.completed_keys == {plan.key}
        memory.array[step] = 0
        assert worker.wait(worker.load([plan])).completed_keys == {plan.key}
        assert (memory.array[step] == step + 1).all()
        before = keeper.pool
        keeper.replace()
        worker.wait(worker.store([plan]))
        worker.wait(worker.store([plan]))
        assert before.native.closed
        assert list(pins) == [keeper.pool.arena[0]]
        worker.publish(worker.wait(worker.store([plan])))
    worker.register_buffers({"layer": memory})
    assert list(pins) == [keeper.pool.arena[0]]
    worker.close()
    assert pins == {}
