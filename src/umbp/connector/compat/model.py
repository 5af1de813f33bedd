"""What of vLLM's configuration the connector reads: versions, hashes, cache groups, KV formats."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import vllm
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import (
    resolve_cache_hit_alignment_tokens,
    resolve_dcp_kv_block_size,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from umbp.connector.groups import CacheGroup, CacheShape, GroupKind

SUPPORTED_VERSIONS = ("0.32", "0.33")
"""The vLLM minor versions whose hooks this connector was written for and is tested with."""


_RANDOM_SEED_ALGORITHMS = frozenset({"xxhash", "xxhash_cbor"})
"""Prefix hash algorithms that vLLM seeds at random in each process unless PYTHONHASHSEED is set."""


def vllm_minor_version() -> str:
    """The running vLLM's `major.minor`."""
    return ".".join(vllm.__version__.split(".")[:2])


def is_supported_version() -> bool:
    """Whether this vLLM is one that the connector is tested with."""
    return vllm_minor_version() in SUPPORTED_VERSIONS


def hash_block_tokens(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Tokens per entry of `Request.block_hashes`."""
    resolved = getattr(kv_cache_config, "hash_block_size", None)
    return int(resolved or resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[1])


def hit_and_hash_tokens(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> tuple[int, int]:
    """Tokens that every hit is a multiple of, and tokens per entry of `Request.block_hashes`."""
    hash_tokens = hash_block_tokens(vllm_config, kv_cache_config)
    step_tokens = scheduler_block_tokens(vllm_config, kv_cache_config)
    hit_tokens = resolve_cache_hit_alignment_tokens(kv_cache_config, vllm_config, step_tokens, hash_tokens)
    return hit_tokens, hash_tokens


def scheduler_block_tokens(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> int:
    """Tokens after which a block ends in every cache group."""
    return int(resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)[0])


def drops_last_block(vllm_config: VllmConfig) -> bool:
    """Whether the engine computes the last block of every hit anew, for speculation."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.use_eagle_block_drop()


def cache_shape(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> CacheShape:
    """The cache's groups; all of them are of kinds that `unsupported_cache_group` lets pass."""
    parallel = vllm_config.parallel_config
    drafting = {i for i, group in enumerate(kv_cache_config.kv_cache_groups) if group.is_eagle_group}
    hit_tokens, hash_tokens = hit_and_hash_tokens(vllm_config, kv_cache_config)
    groups = []
    for group_id, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        tokens = resolve_dcp_kv_block_size(spec, parallel.decode_context_parallel_size)
        kind = _kind(spec)
        # A state is no draft's; and where no group is said to be one, any may be.
        is_drafted = kind is not GroupKind.STATE and (not drafting or group_id in drafting)
        drops = is_drafted and drops_last_block(vllm_config)
        groups.append(CacheGroup(group_id, kind, tokens, tokens // hash_tokens, drops))
    return CacheShape(
        tuple(groups),
        hash_tokens,
        hit_tokens,
        unsettled_tokens=max(vllm_config.num_prefill_lookahead_tokens - 1, 0),
    )


def turns_latent_queries_wrongly(vllm_config: VllmConfig) -> bool:
    """Whether the engine's answers depend on how many tokens of a prompt are computed at once. vLLM's rotary
    kernel for processors takes queries as one row a token; latent attention hands it a row a head, and gets
    another rotation for every number of rows. Compiled engines leave that kernel out, eager ones have it.
    """
    return bool(
        current_platform.is_cpu()
        and vllm_config.model_config.use_mla
        and vllm_config.compilation_config.is_custom_op_enabled("rotary_embedding")
    )


def _kind(spec: Any) -> GroupKind:
    first = _layer_specs(spec)[0]
    if isinstance(first, SlidingWindowSpec):
        return GroupKind.WINDOW
    if isinstance(first, ChunkedLocalAttentionSpec):
        return GroupKind.CHUNK
    return GroupKind.STATE if isinstance(first, MambaSpec) else GroupKind.FULL


_SERVED_SPECS = (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SlidingWindowMLASpec,
    ChunkedLocalAttentionSpec,
    MambaSpec,
    SinkFullAttentionSpec,
)


def unsupported_cache_group(kv_cache_config: KVCacheConfig) -> str | None:
    """What of this cache configuration can't be served, by its group; None if all of it can."""
    groups = kv_cache_config.kv_cache_groups
    if not groups:
        return "a model without a KV cache"
    for group_id, group in enumerate(groups):
        name = f"a model whose KV cache group {group_id}"
        if not group.enable_kv_transfer or group.host_resident:
            return f"{name} is kept out of transfers by vLLM (HiSparse)"
        if not group.kv_cache_spec.prefix_cacheable or group.kv_cache_spec.prefix_replay_tokens:
            return f"{name} is not cached by prefix"
        for spec in _layer_specs(group.kv_cache_spec):
            if type(spec) not in _SERVED_SPECS:
                return f"{name} is of vLLM's kind {type(spec).__name__}"
            if isinstance(spec, MambaSpec):
                if spec.mamba_cache_mode != "align":
                    return (
                        f"{name} keeps a state (Mamba) in cache mode {spec.mamba_cache_mode!r}, which leaves "
                        "none at block ends: say --enable-prefix-caching --mamba-cache-mode align"
                    )
            elif spec.tokens_per_state != 1:
                return f"{name} packs several tokens together"
    return None


def _layer_specs(spec: Any) -> Sequence[Any]:
    per_layer = getattr(spec, "kv_cache_specs", None)
    return list(per_layer.values()) if per_layer is not None else [spec]


def hash_seed(vllm_config: VllmConfig) -> str:
    """The seed of the prefix hashes as any process of the engine can tell it: PYTHONHASHSEED where set,
    "default" for the algorithms with vLLM's fixed seed, "random" for the others.

    A worker can't ask vLLM for it: the seed is set in the engine core's process alone.
    """
    seed = os.environ.get("PYTHONHASHSEED")
    if seed is not None:
        return seed
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    return "random" if algorithm in _RANDOM_SEED_ALGORITHMS else "default"


def attention_formats(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> list[str]:
    """How each transferred layer's backend lays KV out inside a block, as sorted distinct names.

    On CPUs the layout also follows the instruction set, so that is part of the name. Worker process only:
    the layers live there.
    """
    layers = vllm_config.compilation_config.static_forward_context
    names = set()
    for group in kv_cache_config.kv_cache_groups:
        for layer_name in group.layer_names:
            name = layers[layer_name].get_attn_backend().get_name()
            if name == "CPU_ATTN":
                name += ":" + _cpu_attention_isa(vllm_config, group.kv_cache_spec)
            names.add(name)
    return sorted(names)


def _cpu_attention_isa(vllm_config: VllmConfig, spec: Any) -> str:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    head_size = getattr(_layer_specs(spec)[0], "head_size", None)
    dtype: Any = vllm_config.model_config.dtype
    return _get_attn_isa(dtype, spec.block_size, head_size, vllm_config.cache_config.cache_dtype)
