"""Every touch of this package on vLLM's internals, in one place.

Pure functions over vLLM's configuration, requests and block pool. Both roles use them; nothing here keeps
state.
"""

from umbp.connector.compat.blocks import (
    cached_name,
    hash_of_name,
    hide_blocks,
    next_evicted,
    pin_blocks,
    tells_evictions,
    unpin_blocks,
    unpin_evictable,
)
from umbp.connector.compat.kv_events import (
    GroupLabel,
    adapter_of,
    block_removed,
    block_stored,
    extra_keys,
    group_labels,
    outside_hash,
    tells_kv_events,
)
from umbp.connector.compat.model import (
    SUPPORTED_VERSIONS,
    attention_formats,
    cache_shape,
    drops_last_block,
    hash_block_tokens,
    hash_seed,
    hit_and_hash_tokens,
    is_supported_version,
    turns_latent_queries_wrongly,
    unsupported_cache_group,
    vllm_minor_version,
)
from umbp.connector.compat.steps import (
    begun_within_loads,
    block_tables,
    offered_states,
    preempted_requests,
    prompt_tokens,
    reads_prefix_cache,
    scheduled_requests,
    taken_blocks,
)

__all__ = [
    "SUPPORTED_VERSIONS",
    "GroupLabel",
    "adapter_of",
    "attention_formats",
    "begun_within_loads",
    "block_removed",
    "block_stored",
    "block_tables",
    "cache_shape",
    "cached_name",
    "drops_last_block",
    "extra_keys",
    "group_labels",
    "hash_block_tokens",
    "hash_of_name",
    "hash_seed",
    "hide_blocks",
    "hit_and_hash_tokens",
    "is_supported_version",
    "next_evicted",
    "offered_states",
    "outside_hash",
    "pin_blocks",
    "preempted_requests",
    "prompt_tokens",
    "reads_prefix_cache",
    "scheduled_requests",
    "taken_blocks",
    "tells_evictions",
    "tells_kv_events",
    "turns_latent_queries_wrongly",
    "unpin_blocks",
    "unpin_evictable",
    "unsupported_cache_group",
    "vllm_minor_version",
]
