"""What the engine needs of each cache group for a hit, by its own cache managers. Scheduler thread only."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.kv_cache_interface import KVCacheConfig

from umbp.connector import compat


class HitRules:
    """The engine's cache managers, asked without its blocks."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        few_blocks = copy.copy(kv_cache_config)
        few_blocks.num_blocks = 2
        hit_tokens, hash_tokens = compat.hit_and_hash_tokens(vllm_config, kv_cache_config)
        block_tokens = compat.scheduler_block_tokens(vllm_config, kv_cache_config)
        coordinator: Any = get_kv_cache_coordinator(
            few_blocks,
            max_model_len=vllm_config.model_config.max_model_len,
            max_in_flight_tokens=vllm_config.max_in_flight_tokens,
            use_eagle=compat.drops_last_block(vllm_config),
            enable_caching=True,
            enable_kv_cache_events=False,
            dcp_world_size=vllm_config.parallel_config.decode_context_parallel_size,
            pcp_world_size=1,
            scheduler_block_size=block_tokens,
            hash_block_size=hash_tokens,
            num_prefill_lookahead=vllm_config.num_prefill_lookahead_tokens,
            allow_partial_hash_hits=hit_tokens < block_tokens,
        )
        self._managers: Sequence[Any] = coordinator.single_type_managers

    def needed(self, group_id: int, tokens: int) -> range:
        """Which blocks of a group the engine gives memory to for a hit of so many tokens, and reads."""
        manager = self._managers[group_id]
        skipped = max(manager.get_num_skipped_tokens(tokens), 0)
        return range(skipped // manager.block_size, -(-tokens // manager.block_size))

    def reachable(self, group_id: int, start: int, end: int) -> Sequence[bool] | None:
        """Which of a group's blocks from `start` to `end` can ever be part of a hit; None for all."""
        manager = self._managers[group_id]
        mask: Sequence[bool] | None = manager.reachable_block_mask(
            start_block=start,
            end_block=end,
            alignment_tokens=manager.cache_hit_alignment_tokens,
            kv_cache_spec=manager.kv_cache_spec,
            use_eagle=manager.use_eagle,
            dcp_world_size=manager.dcp_world_size,
        )
        return mask
