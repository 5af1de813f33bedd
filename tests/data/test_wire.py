"""The messages between scheduler and workers, and their way through vLLM's own encodings."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM isn't installed")

from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

import umbp.data
from umbp.connector import wire
from umbp.data import (
    BlockLoadBatch,
    BlockStoreBatch,
    BlockTransferPlan,
    KVRange,
    LoadSpec,
    StoreEventResult,
    UMBPConnectorMetadata,
    UMBPConnectorWorkerMetadata,
    UMBPHandshakeMetadata,
)

PLAN = BlockTransferPlan(
    "k", 3, (KVRange("a", 0, 3, 4096, 64, 64, 0),), "r", 0, b"hash", b"parent", (1, 2), 2, "GPU"
)
LOAD = BlockLoadBatch(["k0", "k1"], [4, 5], [0, 1], "r")
STORE = BlockStoreBatch(["k0", "k1"], [4, 5], [0, 1], [b"0", b"1"], [None, b"0"], [(1, 2), (3,)], [2, 2], "r")


def through_msgpack(value: Any) -> Any:
    frames = [bytes(frame) for frame in MsgpackEncoder().encode(value)]
    return MsgpackDecoder(type(value)).decode(frames)


@pytest.mark.parametrize(
    "value",
    [
        PLAN,
        BlockTransferPlan("k", 0),
        LOAD,
        BlockLoadBatch([], [], [], "r"),
        STORE,
        LoadSpec(1, 2, ((b"a", None), ())),
        StoreEventResult(2, {(0, b"a"), (1, b"\xff\x00")}),
        UMBPConnectorWorkerMetadata({1: StoreEventResult(1, {(0, b"a")}), 7: StoreEventResult()}),
        UMBPConnectorWorkerMetadata(),
        UMBPHandshakeMetadata("ns"),
        UMBPConnectorMetadata(True, [PLAN], {"r": LOAD, "q": [PLAN]}, {"r": STORE, "q": [PLAN]}, {"p"}, 9),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_message_survives_msgpack_and_pickle(value: Any) -> None:
    assert through_msgpack(value) == value
    assert pickle.loads(pickle.dumps(value)) == value


def test_a_large_batch_survives_msgpack() -> None:
    count = 8192
    batch = BlockLoadBatch([f"key {n}" for n in range(count)], range(count), [0] * count, "r")
    assert through_msgpack(batch) == batch


def test_the_vocabulary_hands_on_the_connector_s_own_classes() -> None:
    for name in ("UMBPConnectorMetadata", "UMBPConnectorWorkerMetadata", "UMBPHandshakeMetadata"):
        assert getattr(umbp.data, name) is getattr(wire, name)


def test_the_messages_have_the_engine_s_base_classes() -> None:
    assert issubclass(UMBPConnectorMetadata, base.KVConnectorMetadata)
    assert issubclass(UMBPConnectorWorkerMetadata, base.KVConnectorWorkerMetadata)
    assert issubclass(UMBPHandshakeMetadata, base.KVConnectorHandshakeMetadata)


def test_the_messages_have_their_fields_first_and_their_defaults() -> None:
    metadata = UMBPConnectorMetadata()
    names = [field.name for field in dataclasses.fields(metadata)]
    assert names[:6] == [
        "async_load",
        "store_plans",
        "load_requests",
        "store_requests",
        "preempted_request_ids",
        "store_event",
    ]
    assert [getattr(metadata, name) for name in names[:6]] == [False, [], {}, {}, set(), -1]
    assert UMBPConnectorWorkerMetadata().store_events == {}
    with pytest.raises(dataclasses.FrozenInstanceError):
        UMBPHandshakeMetadata("ns").namespace = "other"  # type: ignore[misc]


def test_store_plans_come_loose_first_and_then_by_request() -> None:
    loose, listed = [PLAN], [dataclasses.replace(PLAN, key="listed")]
    metadata = UMBPConnectorMetadata(store_plans=loose, store_requests={"q": listed, "r": STORE})
    assert list(metadata.iter_store_plans()) == [*loose, *listed, *STORE]
    assert list(metadata.store_plan_groups()) == [loose, listed, STORE]
    assert list(UMBPConnectorMetadata(store_requests={"r": STORE}).store_plan_groups()) == [STORE]
    assert list(UMBPConnectorMetadata().store_plan_groups()) == []


def test_aggregating_merges_event_by_event_and_shares_nothing() -> None:
    one = UMBPConnectorWorkerMetadata({1: StoreEventResult(1, {(0, b"a")})})
    other = UMBPConnectorWorkerMetadata(
        {1: StoreEventResult(1, {(0, b"b")}), 2: StoreEventResult(1, {(0, b"c")})}
    )
    before = copy.deepcopy(other)
    assert one.aggregate(other) is one
    assert one.store_events == {
        1: StoreEventResult(2, {(0, b"a"), (0, b"b")}),
        2: StoreEventResult(1, {(0, b"c")}),
    }
    for result in one.store_events.values():
        result.completed_workers += 1
        result.failed_objects.add((9, b"z"))
    assert other == before


@pytest.mark.parametrize("other", [None, object(), StoreEventResult()])
def test_a_foreign_report_is_a_type_error(other: Any) -> None:
    with pytest.raises(TypeError, match=type(other).__name__):
        UMBPConnectorWorkerMetadata().aggregate(other)
