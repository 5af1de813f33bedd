"""What this connector refuses when an engine starts, and what it warns of. Pure checks over the
configuration.
"""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig

from umbp.connector import compat
from umbp.data import KVLayoutPlanner, RankTopology
from umbp.errors import ConfigError
from umbp.options import Options
from umbp.runtime.base import Capabilities

logger = init_logger("vllm.umbp")


def require_supported(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise a one-sentence `ConfigError` for an engine whose KV cache this version can't keep."""
    if compat.turns_latent_queries_wrongly(vllm_config):
        raise ConfigError(
            "UMBP can't serve latent attention (MLA) with vLLM's rotary kernel for processors, whose answers "
            "change with how much of a prompt is computed at once: start vLLM with --compilation-config "
            '\'{"custom_ops": ["-rotary_embedding"]}\', or without --enforce-eager'
        )
    reason = compat.unsupported_cache_group(kv_cache_config)
    if reason is not None:
        _refuse(reason)


def _refuse(what: str) -> None:
    raise ConfigError(f"UMBP can't serve {what}; start vLLM without --kv-transfer-config")


def require_shareable_hashes(vllm_config: VllmConfig, options: Options) -> None:
    """Refuse prefix hashes that differ from process to process where a pool outlives or spans processes."""
    if options.mode != "embedded" and compat.hash_seed(vllm_config) == "random":
        algorithm = vllm_config.cache_config.prefix_caching_hash_algo
        raise ConfigError(
            f"--prefix-caching-hash-algo {algorithm} has a random seed in every process, so engines can't "
            "share prefixes: set PYTHONHASHSEED to the same value for all engines, or use sha256_cbor"
        )


def require_layers(topology: RankTopology, planner: KVLayoutPlanner) -> None:
    """Refuse a pipeline stage that keeps no KV at all: there is nothing that its blocks could be found by."""
    if not planner.regions:
        raise ConfigError(
            f"UMBP can't serve a pipeline whose stage {topology.pp_rank} has no layer with a KV cache: give "
            "it one by VLLM_PP_LAYER_PARTITION, or start vLLM without --kv-transfer-config"
        )


def require_safe_loads(vllm_config: VllmConfig, options: Options) -> None:
    """Refuse synchronous loads where the engine plans a step before the results of the last are in: there it
    goes on computing from a load that has failed, and may never end.
    """
    if not options.load_async and vllm_config.max_concurrent_batches > 1:
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            what, remedy = "fills a pipeline", "leave the option out"
        else:
            what = "schedules asynchronously"
            remedy = "leave the option out, or start vLLM with --no-async-scheduling"
        raise ConfigError(
            f"option 'load_async': false is not safe while vLLM {what}, which then goes on "
            f"from a load that has failed: {remedy}"
        )


def can_write_lazily(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Whether blocks can be stored when the engine is about to evict them; says in one line why not.

    Others, to whom a producer hands its blocks, would not find them; and what is cached by several groups, or
    not at all, has no one order of eviction.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_role != "kv_both":
        reason = f"kv_role 'kv_both', not {None if transfer is None else transfer.kv_role!r}"
    elif not vllm_config.cache_config.enable_prefix_caching:
        reason = "vLLM's own prefix caching, which is off"
    elif not compat.cache_shape(vllm_config, kv_cache_config).is_chain:
        kinds = ", ".join(group.kind for group in compat.cache_shape(vllm_config, kv_cache_config).groups)
        reason = f"one KV cache group of full attention, not {kinds}"
    else:
        return True
    logger.warning(
        "UMBP: write_policy 'lazy' needs %s: every block is stored when it has been computed", reason
    )
    return False


def can_tell_events(can: Capabilities) -> bool:
    """Whether what is told of the pool can be kept right; says in one line why not."""
    if can.watch:
        return True
    logger.warning(
        "UMBP: the runtime of this mode can't tell what its pool evicts: KV events tell of the engine's own "
        "cache alone"
    )
    return False


def warn_of_risks(vllm_config: VllmConfig, options: Options) -> None:
    """Say once, at start, what is allowed but may surprise."""
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_load_failure_policy != "recompute":
        logger.warning(
            "UMBP: kv_load_failure_policy is %r: a block that can't be loaded back will FAIL its request. "
            'Set "kv_load_failure_policy": "recompute" in --kv-transfer-config: it is then recomputed.',
            transfer.kv_load_failure_policy,
        )
    if not compat.is_supported_version():
        logger.warning(
            "UMBP: vLLM %s is not one of the versions this connector is tested with (%s)",
            compat.vllm_minor_version(),
            ", ".join(compat.SUPPORTED_VERSIONS),
        )
    if options.key_namespace not in (None, "auto"):
        logger.warning(
            "UMBP: key_namespace %r is used as it is: you now answer for it that every engine with this "
            "namespace has the same model, weights, dtype, layout and block size",
            options.key_namespace,
        )
