"""Before the first step: identity, agreement, refusals in one sentence, warnings, registration."""

from __future__ import annotations

import copy
import json
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scripted import LAYERS, Rank, Shape, cache_configs, full_attention, make_config, tokens, worker_config
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    CrossAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
)

from umbp.connector import UMBPStoreConnector, compat, plugin, support
from umbp.connector.build import build_worker_side, object_planner
from umbp.connector.identity import worker_namespace
from umbp.connector.wire import UMBPHandshakeMetadata
from umbp.data import RankTopology, UMBPNamespace
from umbp.errors import ConfigError, UMBPError
from umbp.options import Options, parse_options
from umbp.testing.reference import ReferenceRuntime

ROLES = pytest.mark.parametrize("role", list(KVConnectorRole), ids=["scheduler", "worker"])
Case = tuple[VllmConfig, KVCacheConfig]


@pytest.fixture
def case(root: Path, options_of: Any) -> Case:
    """A configuration of its own for each test, which may change it."""
    config = make_config(root, Shape(extra=options_of(ReferenceRuntime())))
    return config, cache_configs(config)[0]


def create(role: KVConnectorRole, case: Case) -> Any:
    config, cache_config = case
    return KVConnectorFactory.create_connector(config=config, role=role, kv_cache_config=cache_config)


def extra_of(config: VllmConfig) -> dict[str, Any]:
    assert config.kv_transfer_config is not None
    return config.kv_transfer_config.kv_connector_extra_config


# Refusals


def group_spec(cache_config: KVCacheConfig, spec: Any) -> None:
    cache_config.kv_cache_groups[0].kv_cache_spec = spec


def packed_latent(config: VllmConfig, cache_config: KVCacheConfig) -> None:
    spec = MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=8, dtype=torch.bfloat16, tokens_per_state=4
    )
    group_spec(cache_config, spec)


def mamba(config: VllmConfig, cache_config: KVCacheConfig) -> None:
    group_spec(cache_config, MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,)))


def encoder(config: VllmConfig, cache_config: KVCacheConfig) -> None:
    spec = CrossAttentionSpec(block_size=16, num_kv_heads=2, head_size=4, dtype=torch.bfloat16)
    group_spec(cache_config, spec)


def ring(config: VllmConfig, cache_config: KVCacheConfig) -> None:
    spec = CircularBufferSpec(block_size=16, num_kv_heads=2, head_size=4, dtype=torch.bfloat16)
    cache_config.kv_cache_groups.append(KVCacheGroupSpec(["ring"], spec))


def device_only(config: VllmConfig, cache_config: KVCacheConfig) -> None:
    other = copy.deepcopy(cache_config.kv_cache_groups[0])
    other.enable_kv_transfer = False
    cache_config.kv_cache_groups.append(other)


def latent_by_the_rotary_kernel(config: VllmConfig, cache_config: KVCacheConfig) -> None:
    """As vLLM has it in an eager engine on a processor."""
    object.__setattr__(config, "model_config", SimpleNamespace(use_mla=True))
    config.compilation_config.custom_ops = ["all"]


def no_group(config: VllmConfig, cache_config: KVCacheConfig) -> None:
    cache_config.kv_cache_groups.clear()


@ROLES
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (packed_latent, "KV cache group 0 packs several tokens together"),
        (mamba, "cache mode 'none'"),
        (latent_by_the_rotary_kernel, "latent attention (MLA) with vLLM's rotary kernel for processors"),
        (encoder, "KV cache group 0 is of vLLM's kind CrossAttentionSpec"),
        (ring, "KV cache group 1 is not cached by prefix"),
        (device_only, "KV cache group 1 is kept out of transfers"),
        (no_group, "a model without a KV cache"),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_this_version_can_t_keep_stops_the_start_with_one_sentence_that_names_it(
    case: Case, role: KVConnectorRole, change: Callable[..., None], said: str
) -> None:
    change(*case)
    with pytest.raises(ConfigError) as caught:
        create(role, case)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@ROLES
@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"capcity_bytes": 1 << 20}, "'capacity_bytes'"),
        ({"capacity_bytes": "12 parsecs"}, "capacity_bytes"),
        ({"capacity_bytes": 1 << 20, "total_capacity_bytes": 1 << 20}, "exclude"),
        ({"load_async": "true"}, "load_async"),
        ({"mode": "embeded"}, "embedded"),
        ({"mode": "distributed", "store": "rediss"}, "'redis'"),
        ({"key_namespace": ""}, "key_namespace"),
    ],
)
def test_an_option_error_stops_the_start_with_one_line(
    case: Case, role: KVConnectorRole, extra: dict[str, object], said: str
) -> None:
    extra_of(case[0]).clear()
    extra_of(case[0]).update(extra)
    with pytest.raises(UMBPError) as caught:
        create(role, case)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_hashes_with_a_random_seed_are_accepted_only_where_one_process_hashes(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = case
    config.cache_config.prefix_caching_hash_algo = "xxhash"
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    support.require_shareable_hashes(config, parse_options({"mode": "embedded"}))
    with pytest.raises(ConfigError, match=r"--prefix-caching-hash-algo xxhash .*PYTHONHASHSEED"):
        support.require_shareable_hashes(config, Options(mode="standalone", pool="p"))
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    support.require_shareable_hashes(config, Options(mode="standalone", pool="p"))


@ROLES
def test_synchronous_loads_are_refused_where_the_engine_plans_ahead(
    root: Path, options_of: Any, role: KVConnectorRole
) -> None:
    extra = options_of(ReferenceRuntime()) | {"load_async": False}
    config = make_config(root, Shape(depth=2, extra=extra))
    with pytest.raises(ConfigError, match=r"'load_async': false .* --no-async-scheduling$"):
        create(role, (config, cache_configs(config)[0]))


@ROLES
def test_synchronous_loads_are_refused_in_a_pipeline(
    root: Path, options_of: Any, role: KVConnectorRole
) -> None:
    config = make_config(root, Shape(extra=options_of(ReferenceRuntime()) | {"load_async": False}))
    cache_config = cache_configs(config)[0]
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(ConfigError, match=r"'load_async': false .* pipeline.*: leave the option out$"):
        create(role, (config, cache_config))


def test_a_pipeline_stage_without_kv_stops_the_start(case: Case) -> None:
    config, cache_config = case
    config.parallel_config.pipeline_parallel_size = 2
    config.parallel_config.rank = 1
    cache_config.kv_cache_groups[0].layer_names.clear()
    with pytest.raises(ConfigError, match="stage 1 has no layer with a KV cache"):
        create(KVConnectorRole.WORKER, case)


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({"capacity_byte": 1}, "did you mean 'capacity_bytes'?"),
        ({"capacity_bytes": "12 parsecs"}, "12 parsecs"),
        ({"mode": "embeded"}, "embedded"),
        ({"dram_numa_node": 1023}, "names memory node 1023, which this host doesn't have"),
    ],
)
def test_bad_options_are_refused_while_a_gpus_configuration_is_resolved(
    extra: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        UMBPStoreConnector.requires_piecewise_for_cudagraph(extra)
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert not UMBPStoreConnector.requires_piecewise_for_cudagraph({"capacity_bytes": "1GiB"})


# Warnings


@pytest.mark.parametrize(("policy", "warns"), [("fail", True), ("recompute", False)])
def test_the_policy_that_fails_requests_is_warned_of(
    root: Path, options_of: Any, caplog: pytest.LogCaptureFixture, policy: str, warns: bool
) -> None:
    config = make_config(root, Shape(extra=options_of(ReferenceRuntime()), policy=policy))
    with caplog.at_level(logging.WARNING, logger="vllm.umbp"):
        create(KVConnectorRole.SCHEDULER, (config, cache_configs(config)[-1]))
    said = [
        record.getMessage() for record in caplog.records if "kv_load_failure_policy" in record.getMessage()
    ]
    assert len(said) == warns
    assert all('"kv_load_failure_policy": "recompute"' in line for line in said)


def test_a_namespace_of_the_users_own_is_used_as_it_is_with_a_warning(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    extra_of(case[0])["key_namespace"] = "mine"
    with caplog.at_level(logging.WARNING, logger="vllm.umbp"):
        create(KVConnectorRole.SCHEDULER, case)
    assert sum("key_namespace 'mine'" in record.getMessage() for record in caplog.records) == 1
    assert worker_namespace(*case) == UMBPNamespace("mine")


def test_the_effective_options_are_said_once(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="vllm.umbp"):
        create(KVConnectorRole.SCHEDULER, case)
    lines = [record.getMessage() for record in caplog.records if "load_async" in record.getMessage()]
    assert len(lines) == 1


# Agreement


def test_workers_that_derived_different_namespaces_stop_the_start(make_engine: Any) -> None:
    engine = make_engine(ReferenceRuntime(), ranks=2)
    reports = {(0, 0): UMBPHandshakeMetadata("one"), (0, 1): UMBPHandshakeMetadata("two")}
    with pytest.raises(ConfigError, match=r"2 namespaces \(one, two\)"):
        engine.connector.set_xfer_handshake_metadata_pp_aware(reports)


def test_a_worker_that_reports_nothing_stops_the_start(make_engine: Any) -> None:
    reports = {(0, 1): UMBPHandshakeMetadata("one")}
    engine = make_engine(ReferenceRuntime(), ranks=2)
    with pytest.raises(ConfigError, match=r"of 2 workers reported"):
        engine.connector.set_xfer_handshake_metadata_pp_aware(reports)


def test_a_second_handshake_binds_anew_and_keeps_the_pool(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(make_pool(), ranks=2)
    engine.run(tokens(100))
    engine.connector.set_xfer_handshake_metadata_pp_aware(
        {(0, rank): one.connector.get_handshake_metadata() for rank, one in enumerate(engine.ranks)}
    )
    engine.forget_prefixes()
    engine.run(tokens(100))
    assert engine.restored_tokens() == 96


def test_before_the_handshake_all_is_a_miss(case: Case, make_engine: Any) -> None:
    scheduler = create(KVConnectorRole.SCHEDULER, case)
    request = make_engine(ReferenceRuntime()).make_request(tokens(100))
    assert scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert scheduler.reset_cache() is True
    scheduler.shutdown()


def test_every_rank_of_an_engine_derives_the_same_namespace(root: Path, options_of: Any) -> None:
    config = make_config(root, Shape(ranks=2, extra=options_of(ReferenceRuntime())))
    first, second, _ = cache_configs(config)
    assert worker_namespace(worker_config(config, 0), first) == worker_namespace(
        worker_config(config, 1), second
    )


def test_layers_that_share_anothers_cache_are_left_out_of_the_registration(
    root: Path, options_of: Any
) -> None:
    config = make_config(root, Shape(extra=options_of(ReferenceRuntime())))
    cache_config = cache_configs(config)[0]
    rank = Rank(config, cache_config, 0)
    views = {layer: torch.zeros(64, 2, 16, 8, dtype=torch.bfloat16) for layer in LAYERS}
    rank.connector.register_kv_caches({**views, "model.layers.9.shares": views[LAYERS[0]]})


def test_an_object_is_the_blocks_of_all_layers_one_behind_the_other(case: Case) -> None:
    planner = object_planner(case[1])
    page = full_attention().page_size_bytes
    assert [region.layer_name for region in planner.regions] == list(LAYERS)
    assert [region.object_offset for region in planner.regions] == [0, page]
    assert planner.describe(RankTopology(), "rank_local").object_size == 2 * page


# Identity


def changed(case: Case, path: str, value: object) -> Case:
    """Copies of both, with one thing changed: `config....` or `cache....`."""
    config, cache_config = copy.copy(case[0]), copy.deepcopy(case[1])
    target: Any = config
    first, *middle, last = path.split(".")
    if first == "cache":
        target = cache_config
    for name in middle:
        part = copy.copy(getattr(target, name))
        setattr(target, name, part)
        target = part
    object.__setattr__(target, last, value)
    return config, cache_config


def other_backend(case: Case) -> Case:
    class Layer:
        def get_attn_backend(self) -> Any:
            return SimpleNamespace(get_name=lambda: "FLASH_ATTN")

    return changed(case, "config.compilation_config.static_forward_context", dict.fromkeys(LAYERS, Layer()))


def other_rope(case: Case) -> Case:
    hf_config = copy.deepcopy(case[0].model_config.hf_config)
    hf_config.rope_parameters = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    return changed(case, "config.model_config.hf_config", hf_config)


def other_spec(case: Case) -> Case:
    config, cache_config = changed(case, "config.instance_id", "x")
    spec = cache_config.kv_cache_groups[0].kv_cache_spec
    cache_config.kv_cache_groups[0].kv_cache_spec = copy.copy(spec)
    object.__setattr__(cache_config.kv_cache_groups[0].kv_cache_spec, "num_kv_heads", 1)
    return config, cache_config


def draft_model(case: Case) -> Case:
    draft = SimpleNamespace(model="draft", revision=None)
    return changed(
        case,
        "config.speculative_config",
        SimpleNamespace(method="eagle", model="draft", draft_model_config=draft),
    )


def other_interleave(case: Case) -> Case:
    interleaved = changed(case, "config.parallel_config.decode_context_parallel_size", 2)
    return changed(interleaved, "config.parallel_config.cp_kv_cache_interleave_size", 16)


CHANGES: dict[str, Callable[[Case], Case]] = {
    "model": lambda case: changed(case, "config.model_config.model", "another/model"),
    "revision": lambda case: changed(case, "config.model_config.revision", "abc"),
    "dtype": lambda case: changed(case, "config.model_config.dtype", torch.float16),
    "quantization": lambda case: changed(case, "config.model_config.quantization", "fp8"),
    "cache_dtype": lambda case: changed(case, "config.cache_config.cache_dtype", "fp8_e5m2"),
    "rope": other_rope,
    "kv_layout": lambda case: changed(case, "cache.kv_cache_layout", "BLNHC"),
    "attention_backend": other_backend,
    "heads": other_spec,
    "block_size": lambda case: changed(case, "config.cache_config.block_size", 32),
    "hash_block_size": lambda case: changed(case, "cache.hash_block_size", 8),
    "hash_algorithm": lambda case: changed(
        case, "config.cache_config.prefix_caching_hash_algo", "sha256_cbor"
    ),
    "random_seed": lambda case: changed(case, "config.cache_config.prefix_caching_hash_algo", "xxhash"),
    "tp": lambda case: changed(case, "config.parallel_config.tensor_parallel_size", 2),
    "pp": lambda case: changed(case, "config.parallel_config.pipeline_parallel_size", 2),
    "pcp": lambda case: changed(case, "config.parallel_config.prefill_context_parallel_size", 2),
    "dcp": lambda case: changed(case, "config.parallel_config.decode_context_parallel_size", 2),
    "dcp_interleave": other_interleave,
    "draft_model": draft_model,
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_decides_whether_bytes_fit_changes_the_namespace(case: Case, name: str) -> None:
    assert worker_namespace(*CHANGES[name](case)) != worker_namespace(*case)


def test_all_changes_make_different_namespaces(case: Case) -> None:
    namespaces = {name: worker_namespace(*change(case)).value for name, change in CHANGES.items()}
    assert len(set(namespaces.values())) == len(namespaces)


def test_the_hash_seed_changes_the_namespace(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    seedless = worker_namespace(*case)
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    zero = worker_namespace(*case)
    monkeypatch.setenv("PYTHONHASHSEED", "1")
    assert len({seedless, zero, worker_namespace(*case)}) == 3


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("config.parallel_config.rank", 1),
        ("config.parallel_config.data_parallel_index", 1),
        ("config.scheduler_config.max_num_seqs", 3),
        ("config.scheduler_config.max_num_batched_tokens", 8192),
        ("config.model_config.max_model_len", 128),
        ("config.model_config.seed", 5),
        ("config.cache_config.num_gpu_blocks_override", 99),
        ("config.cache_config.enable_prefix_caching", False),
        ("config.cache_config.gpu_memory_utilization", 0.5),
        ("config.instance_id", "another"),
        ("cache.num_blocks", 99),
    ],
)
def test_what_says_nothing_of_the_bytes_leaves_the_namespace(case: Case, path: str, value: object) -> None:
    assert worker_namespace(*changed(case, path, value)) == worker_namespace(*case)


def test_the_derived_namespace_is_two_digests(case: Case) -> None:
    value = worker_namespace(*case).value
    first, _, second = value.partition(".")
    assert (len(first), len(second)) == (32, 16)
    assert first == UMBPNamespace.from_vllm_config(*case).value
    int(first + second, 16)


def test_the_worker_reports_the_namespace_that_it_uses(case: Case) -> None:
    side = build_worker_side(*case)
    assert side.handshake().namespace == worker_namespace(*case).value
    side.close()


def test_this_vllm_is_one_that_is_tested() -> None:
    assert compat.is_supported_version()


# Registration


@pytest.fixture
def registry() -> Iterator[dict[str, Any]]:
    """vLLM's own, put back as it was."""
    kept = dict(KVConnectorFactory._registry)
    for name in (plugin.OWN_NAME, plugin.FAMILY_NAME):
        KVConnectorFactory._registry.pop(name, None)
    yield KVConnectorFactory._registry
    KVConnectorFactory._registry.clear()
    KVConnectorFactory._registry.update(kept)


def test_the_plug_in_registers_both_names_and_may_run_again(registry: dict[str, Any]) -> None:
    from umbp.connector.connector import UMBPStoreConnector

    plugin.register()
    plugin.register()
    assert registry["UMBPConnector"]() is registry["UMBPStoreConnector"]() is UMBPStoreConnector


def test_a_connector_that_has_the_familys_name_keeps_it_unless_asked(
    registry: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from umbp.connector.connector import UMBPStoreConnector

    class Another:
        pass

    registry["UMBPStoreConnector"] = lambda: Another
    monkeypatch.delenv(plugin.REPLACE_VARIABLE, raising=False)
    plugin.register()
    assert registry["UMBPStoreConnector"]() is Another
    assert registry["UMBPConnector"]() is UMBPStoreConnector
    monkeypatch.setenv(plugin.REPLACE_VARIABLE, "1")
    plugin.register()
    plugin.register()
    assert registry["UMBPStoreConnector"]() is UMBPStoreConnector


def test_the_module_offers_the_class_under_both_names() -> None:
    import umbp.connector
    from umbp.connector.connector import UMBPStoreConnector

    assert umbp.connector.UMBPConnector is umbp.connector.UMBPStoreConnector is UMBPStoreConnector
    with pytest.raises(AttributeError):
        _ = umbp.connector.UMBPStore


@pytest.mark.slow
def test_importing_the_class_touches_no_device_and_no_pool() -> None:
    code = (
        "import sys, json, umbp.connector.connector; "
        "print(json.dumps([name for name in sys.modules if name.startswith('umbp')]))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = json.loads(result.stdout.splitlines()[-1])
    assert not [name for name in loaded if name.startswith(("umbp._native", "umbp.pool", "umbp.transfer"))]
