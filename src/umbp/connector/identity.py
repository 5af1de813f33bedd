"""Which stored bytes fit which engine: the pool's namespace as a worker derives it.

Runs in workers, which alone see per-layer specs and attention layers; the scheduler adopts what they report.
"""

from __future__ import annotations

import hashlib
import json

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import KVCacheConfig

from umbp.connector import compat
from umbp.data import UMBPNamespace

OBJECT_FORMAT = 1
"""Our own version of how a block's bytes are ordered inside an object."""


def worker_namespace(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> UMBPNamespace:
    """The configured namespace as it is, else the derived one with a digest of the KV format appended.

    The appended digest covers what the vocabulary's recipe leaves out and what decides whether bytes fit:
    attention backend and instruction set, resolved dtypes, hash algorithm, seed and hash block size, our
    format.
    """
    configured = UMBPNamespace.configured(vllm_config)
    if configured is not None:
        return configured
    derived = UMBPNamespace.from_vllm_config(vllm_config, kv_cache_config)
    text = json.dumps(format_facts(vllm_config, kv_cache_config), sort_keys=True, separators=(",", ":"))
    return UMBPNamespace(f"{derived.value}.{hashlib.sha256(text.encode()).hexdigest()[:16]}")


def format_facts(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> dict[str, object]:
    """What the second digest is taken over, as JSON values."""
    cache = vllm_config.cache_config
    parallel = vllm_config.parallel_config
    facts: dict[str, object] = {
        "attention": compat.attention_formats(vllm_config, kv_cache_config),
        "cache_dtype": str(cache.cache_dtype),
        "dtype": str(vllm_config.model_config.dtype),
        "hash_algorithm": str(cache.prefix_caching_hash_algo),
        "hash_block_tokens": compat.hash_block_tokens(vllm_config, kv_cache_config),
        "hash_seed": compat.hash_seed(vllm_config),
        "kv_layout": kv_cache_config.kv_cache_layout,
        "object_format": OBJECT_FORMAT,
    }
    if parallel.decode_context_parallel_size > 1:
        # Which tokens of a block are whose; only here, so that other engines' namespaces stay what they were.
        facts["context_interleave"] = parallel.cp_kv_cache_interleave_size
    return facts
