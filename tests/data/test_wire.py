"""The messages between scheduler and workers, and their way through vLLM's own encodings."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM isn't installed")

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

import umbp.data
from umbp.connector import wire
from umbp.data import (
    BlockLoadBatch,
    BlockStoreBatch,
    BlockTransferPlan,
    KVLayoutPlanner,
    KVRange,
    LoadSpec,
    StoreEventResult,
    UMBPConnectorMetadata,
    UMBPConnectorWorkerMetadata,
    UMBPHandshakeMetadata,
    UMBPNamespace,
)

pytestmark = pytest.mark.vllm033

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


# --- the engine's own configuration


def attention(heads: int) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=32, num_kv_heads=heads, head_size=64, dtype=torch.bfloat16)


def cache_config() -> KVCacheConfig:
    """Two layers of one spec, two of a "uniform type" group, and a group that is closed to transfer."""
    small, large = attention(1), attention(2)
    uniform = UniformTypeKVCacheSpecs(block_size=32, kv_cache_specs={"c": small, "d": large})
    sizes = {"a": small, "b": small, "c": small, "d": large, "e": small}
    return KVCacheConfig(
        num_blocks=4,
        kv_cache_tensors=[
            KVCacheTensor(
                size=4 * spec.page_size_bytes,
                layers=[name],
                layer_stride=0,
                block_stride=spec.page_size_bytes,
            )
            for name, spec in sizes.items()
        ],
        kv_cache_groups=[
            KVCacheGroupSpec(["a", "b"], small),
            KVCacheGroupSpec(["c", "d"], uniform),
            KVCacheGroupSpec(["e"], small, enable_kv_transfer=False),
        ],
    )


def test_the_planner_reads_the_engine_s_cache_config() -> None:
    page = attention(1).page_size_bytes
    planner = KVLayoutPlanner.from_kv_cache_config(cache_config())
    found = [
        (r.layer_name, r.group_id, r.block_bytes, r.object_offset, r.block_size) for r in planner.regions
    ]
    assert found == [
        ("a", 0, page, 0, 32),
        ("b", 0, page, page, 32),
        ("c", 1, page, 2 * page, 32),
        ("d", 1, 2 * page, 3 * page, 32),
    ]


def test_the_planner_takes_the_engine_s_tensors() -> None:
    """A view of shape [blocks, heads, tokens, bytes], as the engine makes it, in elements of two bytes."""
    planner = KVLayoutPlanner.from_kv_cache_config(cache_config())
    caches = {
        name: torch.zeros(4, heads, 32, 128, dtype=torch.bfloat16)
        for name, heads in (("a", 1), ("b", 1), ("c", 1), ("d", 2))
    }
    planner.register_kv_caches(caches)
    plan = planner.plan_registered_block("k", 3, group_id=1)
    for piece in plan.ranges:
        row = caches[piece.layer_name][3]
        assert (piece.base_address, piece.length) == (row.data_ptr(), row.numel() * 2)


def test_specs_of_the_engine_have_a_fingerprint_each() -> None:
    def namespace(config: KVCacheConfig) -> str:
        engine = SimpleNamespace(
            model_config=SimpleNamespace(model="m", dtype=torch.bfloat16, quantization=None),
            cache_config=SimpleNamespace(block_size=32),
            parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
        )
        return UMBPNamespace.from_vllm_config(engine, config).value

    one, other = cache_config(), cache_config()
    assert namespace(one) == namespace(other)
    other.kv_cache_groups[1].kv_cache_spec.kv_cache_specs["d"] = attention(4)
    assert namespace(one) != namespace(other)
