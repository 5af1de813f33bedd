"""A pool that is cleared between a store's end and its publication."""

from __future__ import annotations

import pytest

from umbp.data import (
    BlockIdentityCodec,
    BlockTransferPlan,
    KVLayoutDescriptor,
    KVRegion,
    RankTopology,
    UMBPNamespace,
)
from umbp.options import parse_options
from umbp.testing.tensors import FakeTensor

embedded = pytest.importorskip("umbp.runtime.embedded", reason="the native core isn't built")


def test_a_key_that_is_stored_again_after_a_clear_gives_its_first_slot_back() -> None:
    """Scenario: a store is over but not published, the pool is cleared, and the key is stored again."""
    runtime = embedded.EmbeddedRuntime(parse_options({"capacity_bytes": 64 * 4096, "num_workers": 1}))
    namespace, topology = UMBPNamespace("x"), RankTopology()
    layout = KVLayoutDescriptor((KVRegion("layer", 0, 1024, 1024, 0, 16),), topology)
    worker = runtime.create_worker_handle(namespace, topology, layout)
    scheduler = runtime.create_scheduler_handle(namespace, topology, KVLayoutDescriptor((), topology))
    worker.register_buffers({"layer": FakeTensor.zeros((8, 1024))})
    scheduler.bind_workers({topology.local_namespace: worker.handshake_extra()})
    key = BlockIdentityCodec(namespace.value).key(b"a" * 32)
    first = worker.wait(worker.store([BlockTransferPlan(key, 1, group_id=0)]))
    assert scheduler.clear()
    second = worker.wait(worker.store([BlockTransferPlan(key, 2, group_id=0)]))
    worker.publish(first)
    worker.publish(second)
    assert scheduler.lookup([key]) == [True]
    usage = worker.usage()
    assert (usage["pool_objects"], usage["pool_pinned_objects"]) == (1, 0)
    worker.audit()
    scheduler.close()
    worker.close()
