"""The small print of the vocabulary, line by line, and the edges that the vectors don't reach."""

from __future__ import annotations

import dataclasses
import pickle
import time
from types import SimpleNamespace
from typing import Any

import pytest
from vocabulary_vectors import Cache, HFConfig, engine_config, make_group, make_spec, vectors

from umbp.data import (
    BlockIdentityCodec,
    BlockLoadBatch,
    BlockStoreBatch,
    BlockTransferPlan,
    EngineTopology,
    KVLayoutDescriptor,
    KVLayoutPlanner,
    KVRange,
    KVRegion,
    LoadSpec,
    RankTopology,
    RequestTracker,
    StoreEventResult,
    TransferJobState,
    TransferJobStatus,
    UMBPNamespace,
    localized_plans,
    plans_in_groups,
)

HASH = bytes(range(32))


def load_batch(count: int = 3) -> BlockLoadBatch:
    return BlockLoadBatch([f"k{n}" for n in range(count)], range(count), [0] * count, "r")


def store_batch(count: int = 3) -> BlockStoreBatch:
    hashes = [bytes([n + 1]) for n in range(count)]
    return BlockStoreBatch(
        [f"k{n}" for n in range(count)],
        range(count),
        [0] * count,
        hashes,
        [None, *hashes[:-1]],
        [(n, n + 1) for n in range(count)],
        [2] * count,
        "r",
    )


# --- fields and defaults


DEFAULTS: list[tuple[type[Any], dict[str, Any]]] = [
    (
        RankTopology,
        {
            f"{dim}_{what}": value
            for dim in ("tp", "pp", "pcp", "dcp")
            for what, value in (("rank", 0), ("size", 1))
        },
    ),
    (BlockIdentityCodec, {"namespace": ..., "tp_rank": 0, "pp_rank": 0, "pcp_rank": 0, "dcp_rank": 0}),
    (
        KVRegion,
        {
            "layer_name": ...,
            "group_id": ...,
            "block_stride": ...,
            "block_bytes": ...,
            "object_offset": ...,
            "block_size": 1,
        },
    ),
    (
        KVLayoutDescriptor,
        {
            "regions": ...,
            "topology": ...,
            "layout_format": "rank_local",
            "kv_tp_replicas": 1,
            "counted_tokens": None,
        },
    ),
    (
        BlockTransferPlan,
        {
            "key": ...,
            "block_id": ...,
            "ranges": (),
            "request_id": None,
            "group_id": None,
            "block_hash": None,
            "parent_block_hash": None,
            "token_ids": (),
            "block_size": 0,
            "medium": "CPU",
        },
    ),
    (BlockLoadBatch, dict.fromkeys(("keys", "block_ids", "group_ids", "request_id"), ...)),
    (
        BlockStoreBatch,
        dict.fromkeys(
            (
                "keys",
                "block_ids",
                "group_ids",
                "block_hashes",
                "parent_block_hashes",
                "token_ids",
                "block_sizes",
                "request_id",
            ),
            ...,
        ),
    ),
    (LoadSpec, {"local_tokens": ..., "external_tokens": ..., "block_hashes_by_group": ()}),
    (RequestTracker, {"saved_tokens": 0, "block_ids": (), "load_spec": None}),
    (StoreEventResult, {"completed_workers": 0, "failed_objects": set()}),
    (
        TransferJobState,
        {
            "plans": ...,
            "status": TransferJobStatus.PENDING,
            "completed_keys": set(),
            "failed_keys": set(),
            "error": None,
            "plan_bytes": None,
        },
    ),
]


@pytest.mark.parametrize(("kind", "expected"), DEFAULTS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_type_has_its_fields_in_order_and_their_defaults(kind: type[Any], expected: dict[str, Any]) -> None:
    found = {}
    for field in dataclasses.fields(kind):
        if field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
        else:
            found[field.name] = ... if field.default is dataclasses.MISSING else field.default
    assert list(found.items()) == list(expected.items())


def test_a_range_is_a_tuple_with_names() -> None:
    names = ("layer_name", "group_id", "block_id", "base_address", "stride", "length", "object_offset")
    assert KVRange._fields == names


@pytest.mark.parametrize(
    "value",
    [
        UMBPNamespace("n"),
        RankTopology(),
        BlockIdentityCodec("n"),
        KVRegion("l", 0, 1, 1, 0),
        KVLayoutDescriptor((), RankTopology()),
        BlockTransferPlan("k", 0),
        load_batch(),
        store_batch(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_value_is_frozen_hashable_and_survives_pickling(value: Any) -> None:
    name = dataclasses.fields(value)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, getattr(value, name))
    assert hash(value) == hash(pickle.loads(pickle.dumps(value)))
    assert pickle.loads(pickle.dumps(value)) == value
    assert dataclasses.replace(value) == value


# --- identity


def test_status_values_are_the_lower_case_names() -> None:
    assert {status.name.lower(): str(status) for status in TransferJobStatus} == {
        name: name for name in ("pending", "running", "completed", "failed", "cancelled")
    }


@pytest.mark.parametrize("value", ["", 0, 7, None, True, ["x"]])
def test_a_configured_namespace_is_a_non_empty_string(value: object) -> None:
    transfer = SimpleNamespace(kv_connector_extra_config={"key_namespace": value})
    with pytest.raises(ValueError, match="key_namespace"):
        UMBPNamespace.configured(SimpleNamespace(kv_transfer_config=transfer))


@pytest.mark.parametrize("extra", [{}, {"key_namespace": "auto"}, {"mode": "embedded"}])
def test_no_namespace_is_configured_where_none_is_given(extra: dict[str, object]) -> None:
    transfer = SimpleNamespace(kv_connector_extra_config=extra)
    assert UMBPNamespace.configured(SimpleNamespace(kv_transfer_config=transfer)) is None


def derived(**changes: Any) -> str:
    """The namespace of the first recorded case, after changes of its parts."""
    config, cache = engine_config(vectors("namespace")[0])
    for place, value in changes.items():
        part, _, name = place.partition("__")
        if part == "cache":
            setattr(cache, name, value)
        elif name:
            setattr(getattr(config, part), name, value)
        else:
            setattr(config, part, value)
    return UMBPNamespace.from_vllm_config(config, cache).value


CHANGES: dict[str, dict[str, Any]] = {
    "model": {"model_config__model": "org/b"},
    "revision": {"model_config__revision": "dev"},
    "dtype": {"model_config__dtype": "torch.float16"},
    "quantization": {"model_config__quantization": "awq"},
    "rope": {"model_config__hf_config": HFConfig({"rope_theta": 1.0, "a": {"b": [1, 2]}})},
    "block size": {"cache_config__block_size": 32},
    "layout": {"cache__kv_cache_layout": "LBHNC"},
    "tp": {"parallel_config__tensor_parallel_size": 4},
    "pp": {"parallel_config__pipeline_parallel_size": 2},
    "pcp": {"parallel_config__prefill_context_parallel_size": 2},
    "dcp": {"parallel_config__decode_context_parallel_size": 2},
    "draft": {
        "speculative_config": SimpleNamespace(
            method="eagle", draft_model_config=SimpleNamespace(model="d", revision=None)
        )
    },
    "other draft": {
        "speculative_config": SimpleNamespace(
            method="eagle", draft_model_config=SimpleNamespace(model="e", revision=None)
        )
    },
    "spec kind": {"cache__kv_cache_groups": [make_group(["l0"], make_spec("OtherSpec", {"block_size": 16}))]},
    "spec field": {
        "cache__kv_cache_groups": [make_group(["l0"], make_spec("OtherSpec", {"block_size": 32}))]
    },
    "layers": {"cache__kv_cache_groups": [make_group(["l1"], make_spec("OtherSpec", {"block_size": 16}))]},
}


def test_each_part_of_the_identity_changes_the_namespace() -> None:
    namespaces = {name: derived(**change) for name, change in CHANGES.items()}
    namespaces["as it was"] = derived()
    assert len(set(namespaces.values())) == len(namespaces)
    assert all(len(value) == 32 and int(value, 16) >= 0 for value in namespaces.values())


def test_what_names_a_download_or_a_library_doesn_t_change_the_namespace() -> None:
    content = {
        "rope_theta": 10000.0,
        "a": {"b": [1, 2]},
        "_name_or_path": "/elsewhere",
        "transformers_version": "9",
    }
    assert derived(model_config__hf_config=HFConfig(content)) == derived()
    assert derived(parallel_config__prefill_context_parallel_size=1) == derived()


def test_the_dictionary_of_the_hf_config_is_not_changed() -> None:
    content = {"_name_or_path": "x", "transformers_version": "5", "a": {"b": [1]}}
    before = {**content, "a": {"b": [1]}}
    derived(model_config__hf_config=HFConfig(content))
    assert content == before


def test_values_that_json_can_t_hold_go_through_str() -> None:
    class Odd:
        def __str__(self) -> str:
            return "odd"

    with_object = derived(model_config__hf_config=HFConfig({"x": Odd()}))
    assert with_object == derived(model_config__hf_config=HFConfig({"x": "odd"}))


def test_layers_of_a_uniform_type_group_have_their_own_fingerprints() -> None:
    def group_of(specs: dict[str, Any]) -> list[Any]:
        spec = SimpleNamespace(block_size=16, kv_cache_specs=specs)
        return [make_group(list(specs), spec)]

    small, large = make_spec("Spec", {"heads": 1}), make_spec("Spec", {"heads": 2})
    uniform = derived(cache__kv_cache_groups=group_of({"a": small, "b": small}))
    mixed = derived(cache__kv_cache_groups=group_of({"a": small, "b": large}))
    swapped = derived(cache__kv_cache_groups=group_of({"a": large, "b": small}))
    assert len({uniform, mixed, swapped}) == 3


def test_missing_parts_of_the_model_config_have_their_stand_ins() -> None:
    bare = derived(model_config=SimpleNamespace())
    assert bare == derived(
        model_config=SimpleNamespace(model="", revision=None, dtype=None, quantization=None)
    )


@pytest.mark.parametrize(
    "bad", [{"tp_size": 0}, {"pp_size": -1}, {"tp_rank": 1}, {"dcp_rank": -1}, {"pcp_rank": 2, "pcp_size": 2}]
)
def test_a_rank_lies_within_a_positive_size(bad: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))[:3]):
        RankTopology(**bad)


@pytest.mark.parametrize("size", [0, -1])
def test_an_engine_s_sizes_are_positive(size: int) -> None:
    for name in ("tensor_parallel_size", "decode_context_parallel_size"):
        with pytest.raises(ValueError, match="positive"):
            RankTopology.from_vllm_config(SimpleNamespace(parallel_config=SimpleNamespace(**{name: size})))


def test_an_engine_that_says_nothing_has_one_rank() -> None:
    topology = RankTopology.from_vllm_config(SimpleNamespace(parallel_config=SimpleNamespace()))
    assert topology == RankTopology()
    assert topology.all_namespaces() == ((0, 0, 0, 0),)


@pytest.mark.parametrize("block_hash", [b"", "00", None, 7])
def test_a_hash_is_non_empty_bytes(block_hash: Any) -> None:
    codec = BlockIdentityCodec("ns")
    for ask in (
        lambda: codec.key(block_hash),
        lambda: codec.keys([HASH, block_hash]),
        lambda: codec.key_for_namespace(block_hash, 0, (0, 0, 0, 0)),
        lambda: codec.keys_for_topology(block_hash, RankTopology(), [0]),
    ):
        with pytest.raises(ValueError, match="hash"):
            ask()


def test_the_codec_works_with_replace() -> None:
    codec = dataclasses.replace(BlockIdentityCodec("ns"), tp_rank=3)
    assert codec.key(HASH) == f"umbp:vllm:v1:ns:tp3:pcp0:dcp0:pp0:g0:{HASH.hex()}"


# --- layout


@pytest.mark.parametrize(
    "bad",
    [{"block_stride": 0}, {"block_bytes": 0}, {"block_size": 0}, {"block_bytes": 65}, {"block_bytes": -4}],
)
def test_a_region_that_can_t_be_names_its_layer(bad: dict[str, int]) -> None:
    good = {"block_stride": 64, "block_bytes": 64, "object_offset": 0, "block_size": 16}
    with pytest.raises(ValueError, match=r"layer\.7"):
        KVRegion("layer.7", 0, **{**good, **bad})


def test_a_descriptor_has_a_format_and_no_layer_twice() -> None:
    region = KVRegion("layer.7", 0, 64, 32, 0)
    with pytest.raises(ValueError, match="layout_format"):
        KVLayoutDescriptor((region,), RankTopology(), "")
    with pytest.raises(ValueError, match=r"layer\.7"):
        KVLayoutDescriptor((region, region), RankTopology())
    assert KVLayoutDescriptor((region,), RankTopology()).object_size == 32


@pytest.mark.parametrize("replicas", [0, -1, 3, 8])
def test_replicas_must_divide_the_tensor_parallel_ranks(replicas: int) -> None:
    assert KVLayoutDescriptor((), RankTopology(tp_size=4), kv_tp_replicas=2).kv_tp_replicas == 2
    with pytest.raises(ValueError, match="kv_tp_replicas"):
        KVLayoutDescriptor((), RankTopology(tp_size=4), kv_tp_replicas=replicas)


def test_objects_count_for_tokens_in_one_group_and_only_where_the_first_ranks_kv_is_held() -> None:
    layout = KVLayoutDescriptor((), RankTopology(), counted_tokens=(1, 16))
    assert [layout.tokens_of(group) for group in (0, 1, 2, None)] == [0, 16, 0, 16]
    assert layout.counted_if(True) == layout
    assert layout.counted_if(False).tokens_of(1) == KVLayoutDescriptor((), RankTopology()).tokens_of(1) == 0
    with pytest.raises(ValueError, match="counted_tokens"):
        KVLayoutDescriptor((), RankTopology(), counted_tokens=(1, 0))


def planner() -> KVLayoutPlanner:
    return KVLayoutPlanner([KVRegion("a", 0, 64, 64, 0), KVRegion("b", 1, 128, 64, 64)])


def test_missing_layers_are_all_named_in_order() -> None:
    with pytest.raises(ValueError, match="a, b"):
        planner().register_kv_caches({"c": Cache(0, 64)})


@pytest.mark.parametrize(
    "shape", [{"ndim": 0}, {"dim": lambda: 0}, {"shape": ()}], ids=["ndim", "dim", "shape"]
)
def test_a_tensor_without_dimensions_is_refused_however_it_says_so(shape: dict[str, Any]) -> None:
    scalar = SimpleNamespace(data_ptr=lambda: 0, element_size=lambda: 1, stride=lambda _: 64, **shape)
    with pytest.raises(ValueError, match="dimension"):
        planner().register_kv_caches({"a": scalar, "b": Cache(0, 128)})


def test_a_tensor_that_knows_nothing_of_dimensions_has_one() -> None:
    plain = SimpleNamespace(data_ptr=lambda: 0, element_size=lambda: 1, stride=lambda _: 64)
    planner().register_kv_caches({"a": plain, "b": Cache(0, 128)})


@pytest.mark.parametrize("stride", [0, -64, 48, 128, 65])
def test_a_stride_that_can_t_be_cut_names_the_layer_and_both_strides(stride: int) -> None:
    with pytest.raises(ValueError, match=rf"layer a: physical stride {stride} .*64"):
        planner().register_kv_caches({"a": Cache(0, stride), "b": Cache(0, 128)})


def test_a_block_longer_than_the_stride_is_a_whole_number_of_strides() -> None:
    uneven = KVLayoutPlanner([KVRegion("a", 0, 96, 80, 0)])
    with pytest.raises(ValueError, match=r"layer a: physical stride 32 .*80.*96"):
        uneven.register_kv_caches({"a": Cache(0, 32)})


def test_nothing_is_planned_before_registration() -> None:
    fresh = planner()
    with pytest.raises(RuntimeError):
        fresh.plan_registered_block("k", 0)
    with pytest.raises(RuntimeError):
        fresh.materialize(BlockTransferPlan("k", 0))
    plan = fresh.plan_for_block("k", 2, {"a": 1000, "b": 2000})
    assert [(r.base_address, r.stride, r.length) for r in plan.ranges] == [(1128, 64, 64), (2256, 128, 64)]


def test_a_missing_base_address_names_its_layer() -> None:
    with pytest.raises(ValueError, match="layer b"):
        planner().plan_for_block("k", 0, {"a": 0})
    assert planner().plan_for_block("k", 0, {"a": 0}, group_id=0).ranges


def test_registered_strides_apply_to_addresses_given_by_hand() -> None:
    registered = planner()
    registered.register_kv_caches({"a": Cache(0, 32), "b": Cache(0, 128)})
    plan = registered.plan_for_block("k", 1, {"a": 1000}, group_id=0)
    assert [(r.base_address, r.length, r.object_offset) for r in plan.ranges] == [
        (1064, 32, 0),
        (1096, 32, 32),
    ]


def test_a_registration_that_fails_leaves_the_old_one() -> None:
    registered = planner()
    registered.register_kv_caches({"a": Cache(1000, 64), "b": Cache(2000, 128)})
    before = registered.plan_registered_block("k", 3)
    for bad in (
        {},
        {"a": Cache(5000, 32), "b": Cache(6000, 48)},
        {"a": Cache(5000, 64), "b": Cache(0, 1, ndim=0)},
    ):
        with pytest.raises(ValueError, match=r"\S"):
            registered.register_kv_caches(bad)
        assert registered.plan_registered_block("k", 3) == before


def test_the_group_chooses_ranges_and_is_not_kept_in_the_plan() -> None:
    registered = planner()
    registered.register_kv_caches({"a": Cache(1000, 64), "b": Cache(2000, 128)})
    plan = registered.plan_registered_block("k", 0, group_id=1, request_id="r")
    assert plan.group_id is None
    assert plan.request_id == "r"
    assert [(r.layer_name, r.object_offset) for r in plan.ranges] == [("b", 0)]
    whole = registered.plan_registered_block("k", 0)
    assert [(r.layer_name, r.object_offset) for r in whole.ranges] == [("a", 0), ("b", 64)]


def test_materialize_fills_the_ranges_and_keeps_all_else() -> None:
    registered = planner()
    registered.register_kv_caches({"a": Cache(1000, 64), "b": Cache(2000, 128)})
    bare = BlockTransferPlan("k", 2, (), "r", 1, HASH, HASH[:8], (1, 2), 16, "GPU")
    full = registered.materialize(bare)
    assert dataclasses.replace(full, ranges=()) == bare
    assert full.ranges == registered.plan_registered_block("k", 2, group_id=1).ranges


# --- plans


@pytest.mark.parametrize("batch", [load_batch(), store_batch()], ids=["load", "store"])
def test_a_batch_is_a_sequence_of_plans(batch: BlockLoadBatch | BlockStoreBatch) -> None:
    plans = list(batch)
    assert len(batch) == 3
    assert [batch[n] for n in range(3)] == plans == [batch[n - 3] for n in range(3)]
    assert batch[1:] == plans[1:]
    assert batch[::-1] == plans[::-1]
    assert batch[5:] == []
    assert plans[1] in batch
    assert batch.index(plans[2]) == 2
    assert list(reversed(batch)) == plans[::-1]
    for index in (3, -4):
        with pytest.raises(IndexError):
            batch[index]


def test_a_batch_gives_each_plan_its_columns() -> None:
    assert load_batch()[1] == BlockTransferPlan("k1", 1, request_id="r", group_id=0)
    assert store_batch()[1] == BlockTransferPlan("k1", 1, (), "r", 0, b"\x02", b"\x01", (1, 2), 2)


@pytest.mark.parametrize("batch", [load_batch(), store_batch()], ids=["load", "store"])
def test_unequal_columns_are_refused(batch: BlockLoadBatch | BlockStoreBatch) -> None:
    for field in dataclasses.fields(batch):
        if field.name != "request_id":
            shorter = getattr(batch, field.name)[:-1]
            with pytest.raises(ValueError, match=field.name):
                dataclasses.replace(batch, **{field.name: shorter})


def test_a_batch_keeps_its_columns_when_the_lists_it_was_made_from_change() -> None:
    keys, block_ids = ["k0"], [7]
    batch = BlockLoadBatch(keys, block_ids, [0], "r")
    keys.append("k1")
    block_ids[0] = 8
    assert (list(batch.keys), list(batch.block_ids)) == (["k0"], [7])


def test_a_localized_batch_is_the_same_under_other_keys() -> None:
    batch = store_batch()
    local = batch.localized(["x", "y", "z"])
    assert list(local.keys) == ["x", "y", "z"]
    assert dataclasses.replace(local, keys=batch.keys) == batch
    assert list(batch.keys) == ["k0", "k1", "k2"]
    with pytest.raises(ValueError, match="keys"):
        batch.localized(["x"])


def test_scheduler_keys_are_rewritten_to_the_worker_s_rank_without_touching_the_batch() -> None:
    scheduler = BlockIdentityCodec("ns")
    worker = BlockIdentityCodec("ns", tp_rank=1, pp_rank=2, pcp_rank=3, dcp_rank=4)
    hashes = [HASH, HASH[:4], HASH[4:]]
    count = len(hashes)
    keys = [scheduler.key(h, group) for group, h in enumerate(hashes)]
    expected = [worker.key(h, group) for group, h in enumerate(hashes)]
    load = BlockLoadBatch(keys, range(count), range(count), "r")
    store = BlockStoreBatch(
        keys, range(count), range(count), hashes, [None] * count, [()] * count, [1] * count, "r"
    )
    for batch in (load, store):
        before = pickle.dumps(batch)
        local = localized_plans(batch, worker)
        assert type(local) is type(batch)
        assert [plan.key for plan in local] == expected
        assert pickle.dumps(batch) == before
        assert [plan.key for plan in localized_plans(list(batch), worker)] == expected
        assert localized_plans(local, worker) == local


def test_plans_that_carry_ranges_are_left_alone() -> None:
    worker = BlockIdentityCodec("ns", tp_rank=1)
    key = BlockIdentityCodec("ns").key(HASH)
    ranged = BlockTransferPlan(key, 0, (KVRange("a", 0, 0, 0, 1, 1, 0),))
    bare = BlockTransferPlan(key, 0)
    plans = [ranged, bare]
    local = localized_plans(plans, worker)
    assert local[0] is ranged
    assert local[1].key == worker.key(HASH)
    assert plans == [ranged, bare]


def test_thousands_of_blocks_are_handled_by_column_without_building_plans(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """8,192 blocks: making, localizing, completing and pickling a batch must not make 8,192 objects."""
    from umbp.data import plans as plans_module

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a plan was built")

    count = 8192
    hashes = [n.to_bytes(32, "big") for n in range(1, count + 1)]
    scheduler, worker = BlockIdentityCodec("ns"), BlockIdentityCodec("ns", tp_rank=1)
    monkeypatch.setattr(plans_module, "BlockTransferPlan", refuse)
    begun = time.perf_counter()
    batch = BlockStoreBatch(
        scheduler.keys(hashes),
        range(count),
        [0] * count,
        hashes,
        [None] * count,
        [()] * count,
        [16] * count,
        "r",
    )
    local = localized_plans(batch, worker)
    job = TransferJobState(local, plan_bytes=[10] * count)
    job.complete(worker.keys(hashes[:-1]))
    job.fail(worker.keys(hashes[-1:]))
    assert job.completed_bytes == 10 * (count - 1)
    assert job.failed_block_ids == {count - 1}
    assert len(pickle.loads(pickle.dumps(local))) == count
    # Some 20 ms on a quiet machine: the bound catches a quadratic step, not a busy neighbour.
    assert time.perf_counter() - begun < 2


def test_a_key_at_a_time_costs_no_more_than_linear_time() -> None:
    batch = load_batch(8192)
    job = TransferJobState(batch)
    begun = time.perf_counter()
    for key in batch.keys:
        job.complete([key])
    assert job.status == "completed"
    assert time.perf_counter() - begun < 2


# --- jobs


def test_one_failed_key_never_fails_its_siblings() -> None:
    job = TransferJobState(load_batch())
    job.start()
    job.fail(["k1"], "gone")
    assert job.status == "running"
    job.complete(["k0", "k2"])
    assert (job.status, job.completed_keys, job.failed_keys) == ("failed", {"k0", "k2"}, {"k1"})
    assert job.failed_block_ids == {1}


def test_complete_with_nothing_named_completes_everything() -> None:
    job = TransferJobState(load_batch())
    job.complete(())
    assert job.status == "completed"
    assert job.completed_keys == job.keys


def test_fail_overwrites_the_error_also_with_none() -> None:
    job = TransferJobState(load_batch())
    job.fail(["k0"], "first")
    job.fail(["k1"])
    assert job.error is None


def test_a_cancelled_job_is_not_failed_and_keeps_its_key_sets() -> None:
    job = TransferJobState(load_batch())
    job.complete(["k0"])
    job.cancel()
    assert (job.status, job.error) == ("cancelled", "cancelled")
    assert (job.completed_keys, job.failed_keys) == ({"k0"}, set())
    job.cancel("preempted")
    assert job.error == "preempted"


def test_the_caller_s_collections_are_not_shared_with_the_job() -> None:
    job, keys = TransferJobState(load_batch()), {"k0"}
    job.complete(keys)
    job.complete(["k1"])
    assert keys == {"k0"}


def test_a_job_about_nothing_completes_as_a_whole() -> None:
    job = TransferJobState([])
    job.start()
    job.complete()
    assert (job.status, job.completed_bytes, job.failed_block_ids) == ("completed", 0, set())


@pytest.mark.parametrize("status", list(TransferJobStatus))
def test_only_a_pending_job_starts(status: TransferJobStatus) -> None:
    job = TransferJobState([], status)
    assert status.is_final == (status not in ("pending", "running"))
    if status == "pending":
        job.start()
        assert job.status == "running"
    else:
        with pytest.raises(RuntimeError):
            job.start()


def test_jobs_are_told_apart_by_identity() -> None:
    one, other = TransferJobState([]), TransferJobState([])
    assert one != other
    assert len({one, other, one}) == 2


# --- requests


def test_a_load_is_what_the_engine_lacks() -> None:
    assert LoadSpec(10, 30).num_tokens_to_load == 20
    assert LoadSpec(30, 10).num_tokens_to_load == 0


def test_update_and_replace_copy_what_they_are_given() -> None:
    for change in (RequestTracker.update_blocks, RequestTracker.replace_blocks):
        tracker, table = RequestTracker(), [[1, 2], [3]]
        change(tracker, table)
        table[0].append(9)
        assert list(tracker.block_ids) == [[1, 2], [3]]
        tracker.update_blocks([[4], []])
        assert table == [[1, 2, 9], [3]]


def test_reset_forgets_everything() -> None:
    tracker = RequestTracker(32, ([1],), LoadSpec(0, 16))
    tracker.reset()
    assert tracker == RequestTracker()


def test_a_table_with_another_number_of_groups_is_refused_and_changes_nothing() -> None:
    tracker = RequestTracker()
    tracker.update_blocks([[1], [2]])
    with pytest.raises(ValueError, match="2"):
        tracker.update_blocks([[1, 5]])
    assert list(tracker.block_ids) == [[1], [2]]


@pytest.mark.parametrize("block_size", [0, -16])
def test_a_mark_needs_a_block_size(block_size: int) -> None:
    with pytest.raises(ValueError, match="block size"):
        RequestTracker().mark_saved(100, block_size)


# --- store events


def test_merging_results_adds_and_unites_and_shares_nothing() -> None:
    one, other = StoreEventResult(1, {(0, b"a")}), StoreEventResult(2, {(1, b"a")})
    one.merge(other)
    assert one == StoreEventResult(3, {(0, b"a"), (1, b"a")})
    one.failed_objects.add((9, b"z"))
    assert other == StoreEventResult(2, {(1, b"a")})


# --- what a running engine adds


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"tp_size": 4},
        {"tp_size": 2, "pp_size": 3},
        {"tp_size": 4, "dcp_size": 2, "pcp_size": 2, "pp_size": 2},
    ],
    ids=str,
)
def test_an_engine_s_topology_has_the_ranks_of_its_shape(sizes: dict[str, int]) -> None:
    shape, engine = RankTopology(**sizes), EngineTopology(**sizes)
    assert engine.all_namespaces() == shape.all_namespaces()
    assert engine.rank_count == shape.rank_count == len(shape.all_namespaces())


def test_the_stages_of_an_engine_share_out_its_ranks() -> None:
    engine = EngineTopology(tp_size=2, tp_rank=1, pp_size=3, pp_rank=2)
    stages = engine.stages()
    assert [stage.stage for stage in stages] == [0, 1, 2]
    assert [stage.rank_count for stage in stages] == [2, 2, 2]
    assert sum((stage.all_namespaces() for stage in stages), ()) == engine.all_namespaces()
    assert {stage.local_namespace for stage in stages} == {engine.local_namespace}


def test_an_engine_without_a_pipeline_is_its_only_stage() -> None:
    engine = EngineTopology(tp_size=2)
    assert engine.stages() == (engine,)


@pytest.mark.parametrize(("tp", "pcp", "dcp"), [(1, 2, 2), (2, 4, 4), (2, 2, 4)])
def test_decode_context_may_span_prefill_context_ranks(tp: int, pcp: int, dcp: int) -> None:
    """vLLM's own rule; each rank then has a place of its own, as its worker reads it from its number."""
    ranks = EngineTopology(tp_size=tp, pcp_size=pcp, dcp_size=dcp).all_namespaces()
    assert len(set(ranks)) == tp * pcp
    for number, rank in enumerate(ranks):
        parallel = SimpleNamespace(
            rank=number,
            tensor_parallel_size=tp,
            prefill_context_parallel_size=pcp,
            decode_context_parallel_size=dcp,
        )
        worker = EngineTopology.from_vllm_config(SimpleNamespace(parallel_config=parallel))
        assert worker.local_namespace == rank


def test_plans_can_be_cut_to_some_cache_groups() -> None:
    hashes = [bytes([n + 1]) for n in range(4)]
    load = BlockLoadBatch(["a", "b", "c", "d"], [1, 2, 3, 4], [0, 1, 0, 2], "r")
    store = BlockStoreBatch(
        load.keys, load.block_ids, load.group_ids, hashes, [None, *hashes[:-1]], [()] * 4, [1] * 4, "r"
    )
    for batch in (load, store):
        cut = plans_in_groups(batch, frozenset({0, 2}))
        assert isinstance(cut, type(batch))
        assert list(cut) == [batch[0], batch[2], batch[3]]
        assert list(plans_in_groups(list(batch), frozenset({0, 2}))) == list(cut)
        assert plans_in_groups(batch, frozenset({0, 1, 2, 3})) is batch
        assert len(plans_in_groups(batch, frozenset({7}))) == 0
    whole = [BlockTransferPlan("k", 0)]
    assert plans_in_groups(whole, frozenset({7})) == whole
