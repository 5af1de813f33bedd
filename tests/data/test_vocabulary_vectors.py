"""Every recorded answer of the vocabulary holds."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from vocabulary_vectors import VECTORS, cache_config, caches_of, engine_config, numbered, vectors

from umbp.data import (
    BlockIdentityCodec,
    BlockLoadBatch,
    BlockStoreBatch,
    BlockTransferPlan,
    KVLayoutPlanner,
    KVRange,
    RankTopology,
    RequestTracker,
    TransferJobState,
    UMBPNamespace,
)

ERRORS = {"ValueError": ValueError, "RuntimeError": RuntimeError}


def section(name: str) -> pytest.MarkDecorator:
    cases = vectors(name)
    return pytest.mark.parametrize("case", cases, ids=numbered(cases))


def raising(answer: dict[str, Any]) -> AbstractContextManager[Any]:
    return pytest.raises(ERRORS[answer["error"]]) if "error" in answer else nullcontext()


def test_every_section_of_the_vectors_has_a_test() -> None:
    tested = {"namespace", "topology", "key", "key_errors", "keys_for_topology", "layout", "jobs", "tracker"}
    assert set(VECTORS) - {"about"} == tested


@section("namespace")
def test_a_namespace_is_as_recorded(case: dict[str, Any]) -> None:
    config, cache = engine_config(case)
    with raising(case["namespace"]):
        assert UMBPNamespace.from_vllm_config(config, cache) == UMBPNamespace(case["namespace"]["value"])


@section("topology")
def test_a_topology_is_as_recorded(case: dict[str, Any]) -> None:
    config = SimpleNamespace(parallel_config=SimpleNamespace(**case["parallel_config"]))
    expected = dict(case["topology"]["value"])
    topology = RankTopology.from_vllm_config(config)
    assert topology.local_namespace == tuple(expected.pop("local_namespace"))
    assert topology == RankTopology(**expected)
    with raising(case["all_namespaces"]):
        ranks = topology.all_namespaces()
        assert ranks == tuple(map(tuple, case["all_namespaces"]["value"]))
        assert topology.rank_count == len(ranks)
        assert topology.local_namespace in ranks


@section("key")
def test_a_key_is_as_recorded(case: dict[str, Any]) -> None:
    ranks = {dim: case[dim] for dim in ("tp_rank", "pp_rank", "pcp_rank", "dcp_rank")}
    block_hash = bytes.fromhex(case["block_hash"])
    for namespace in (case["namespace"], UMBPNamespace(case["namespace"])):
        codec = BlockIdentityCodec(namespace, **ranks)
        assert codec.key(block_hash, case["group_id"]) == case["key"]
        assert codec.keys([block_hash], case["group_id"]) == [case["key"]]
        other = BlockIdentityCodec(namespace)
        assert other.key_for_namespace(block_hash, case["group_id"], codec.rank) == case["key"]
        assert other.key_prefix(case["group_id"], codec.rank) + case["block_hash"] == case["key"]
        assert codec.localize([other.key(block_hash, case["group_id"])]) == [case["key"]]


@section("key_errors")
def test_a_hash_or_group_that_is_none_is_refused(case: dict[str, Any]) -> None:
    codec = BlockIdentityCodec("ns")
    with raising(case):
        codec.key(bytes.fromhex(case["block_hash"]), case["group_id"])
    with raising(case):
        codec.keys([bytes.fromhex(case["block_hash"])], case["group_id"])


@section("keys_for_topology")
def test_keys_of_all_ranks_are_as_recorded(case: dict[str, Any]) -> None:
    sizes = {name: case[name] for name in ("tp_size", "pp_size", "pcp_size", "dcp_size")}
    keys = BlockIdentityCodec("ns").keys_for_topology(
        bytes.fromhex(case["block_hash"]), RankTopology(**sizes), case["group_ids"]
    )
    assert keys == case["keys"]


@section("layout")
def test_a_layout_is_as_recorded(case: dict[str, Any]) -> None:
    planner = KVLayoutPlanner.from_kv_cache_config(cache_config(case))
    assert [vars_of(region) for region in planner.regions] == case["regions"]
    assert planner.object_size == planner.describe(RankTopology()).object_size == case["object_size"]

    with raising(case["register"]):
        planner.register_kv_caches(caches_of(case))
    for query in case.get("ranges", ()):
        block_id, group_id = query["block_id"], query["group_id"]
        addresses = {name: cache["data_ptr"] for name, cache in case["caches"].items()}
        with raising(query):
            by_hand = planner.plan_for_block("k", block_id, addresses, group_id=group_id)
            assert by_hand == planner.plan_registered_block("k", block_id, group_id=group_id)
            assert by_hand.ranges == tuple(KVRange(*value) for value in query["value"])
        with raising(query):
            bare = BlockTransferPlan("k", block_id, group_id=group_id)
            assert planner.materialize(bare).ranges == by_hand.ranges


def vars_of(region: Any) -> dict[str, Any]:
    return {name: getattr(region, name) for name in region.__dataclass_fields__}


@section("jobs")
def test_a_job_ends_as_recorded(case: dict[str, Any]) -> None:
    job = TransferJobState(plans_of(case), plan_bytes=case["plan_bytes"])
    for step in case["steps"]:
        with raising(step):
            match step["op"]:
                case "start":
                    job.start()
                case "complete":
                    job.complete(step["keys"])
                case "complete_all":
                    job.complete()
                case "fail":
                    job.fail(step["keys"], "boom")
                case "cancel":
                    job.cancel()
        assert {
            "completed": sorted(job.completed_keys),
            "completed_bytes": job.completed_bytes,
            "error": job.error,
            "failed": sorted(job.failed_keys),
            "failed_block_ids": sorted(job.failed_block_ids),
            "status": job.status,
        } == step["after"]


def plans_of(case: dict[str, Any]) -> Any:
    keys, block_ids = case["keys"], case["block_ids"]
    assert case["kind"] in ("plans", "batch")
    if case["kind"] == "batch":
        return BlockLoadBatch(keys, block_ids, [0] * len(keys), "r")
    return [
        BlockTransferPlan(key, block_id, (KVRange("layer", 0, block_id, 0, length, length, 0),))
        for key, block_id, length in zip(keys, block_ids, case["lengths"], strict=True)
    ]


@section("jobs")
def test_a_job_ends_alike_over_plans_and_over_either_batch(case: dict[str, Any]) -> None:
    keys, block_ids = case["keys"], case["block_ids"]
    sizes = case["plan_bytes"] or case["lengths"]
    count = len(keys)
    store = BlockStoreBatch(
        keys, block_ids, [0] * count, [b"h"] * count, [None] * count, [()] * count, [1] * count, "r"
    )
    load = BlockLoadBatch(keys, block_ids, [0] * count, "r")
    jobs = [TransferJobState(plans, plan_bytes=sizes) for plans in (list(load), load, store)]
    for job in jobs:
        job.complete(keys[:1])
        job.fail(keys[1:], "boom")
    for job in jobs:
        assert job.keys == set(keys)
        assert job.status == ("failed" if count > 1 else "completed")
        assert job.completed_bytes == sizes[0]
        assert job.failed_block_ids == set(block_ids[1:])


@section("tracker")
def test_a_request_is_tracked_as_recorded(case: list[dict[str, Any]]) -> None:
    tracker = RequestTracker()
    for step in case:
        with raising(step):
            match step["op"]:
                case "update":
                    tracker.update_blocks(step["blocks"])
                case "replace":
                    tracker.replace_blocks(step["blocks"])
                case "mark":
                    assert tracker.mark_saved(step["token_count"], step["block_size"]) == step["returns"]
                case "reset":
                    tracker.reset()
        assert list(tracker.block_ids) == step["after"]["block_ids"]
        assert tracker.saved_tokens == step["after"]["saved_tokens"]
