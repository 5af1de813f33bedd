"""How long a prefix the engine could go on from, if it had in its own cache what is stored outside.

The rules are the engine's own: its cache coordinator is asked, over a stand-in for its block pool that knows
which blocks are stored. Scheduler thread only.
"""

from __future__ import annotations

import copy
from collections.abc import Container, Mapping, Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import KVCacheConfig

from umbp.connector import compat

Stored = Mapping[int, Container[bytes]]
"""By cache group: the names of the blocks that are there."""


class HitFinder:
    """The engine's rules for a hit in several cache groups, asked without its blocks."""

    def __init__(self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
        few_blocks = copy.copy(kv_cache_config)
        few_blocks.num_blocks = 2
        speculative = vllm_config.speculative_config
        hit_tokens, hash_tokens = compat.hit_and_hash_tokens(vllm_config, kv_cache_config)
        coordinator: Any = get_kv_cache_coordinator(
            few_blocks,
            max_model_len=vllm_config.model_config.max_model_len,
            max_in_flight_tokens=vllm_config.max_in_flight_tokens,
            use_eagle=speculative is not None and speculative.use_eagle_block_drop(),
            enable_caching=True,
            enable_kv_cache_events=False,
            dcp_world_size=vllm_config.parallel_config.decode_context_parallel_size,
            pcp_world_size=1,
            scheduler_block_size=hit_tokens,
            hash_block_size=hash_tokens,
            num_prefill_lookahead=vllm_config.num_prefill_lookahead_tokens,
            allow_partial_hash_hits=False,
        )
        self._pool = _StandIn(hash_tokens)
        self._coordinator: Any = coordinator
        self._managers: Sequence[Any] = coordinator.single_type_managers
        for owner in (coordinator, *self._managers):
            owner.block_pool = self._pool

    def longest(self, block_hashes: Sequence[bytes], limit_tokens: int, stored: Stored) -> int:
        """Tokens of the longest hit of at most `limit_tokens` in what is stored, by the groups' names."""
        self._pool.stored = stored
        try:
            _, tokens, *_ = self._coordinator.find_longest_cache_hit(list(block_hashes), limit_tokens)
        finally:
            self._pool.stored = {}
        return int(tokens)

    def needed(self, group_id: int, tokens: int) -> range:
        """Which blocks of a group the engine gives memory to for a hit of so many tokens, and reads."""
        manager = self._managers[group_id]
        skipped = max(manager.get_num_skipped_tokens(tokens), 0)
        return range(skipped // manager.block_size, tokens // manager.block_size)

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


class _StandIn:
    """Stands where the engine's cache managers look for their block pool: knows names, has no blocks."""

    def __init__(self, hash_tokens: int) -> None:
        self.hash_block_size = hash_tokens
        self.null_block = KVCacheBlock(0)
        self.null_block.is_null = True
        self.stored: Stored = {}
        self._hit = KVCacheBlock(1)

    def get_cached_block(
        self, block_hash: bytes, kv_cache_group_ids: Sequence[int]
    ) -> list[KVCacheBlock] | None:
        if all(block_hash in self.stored.get(group_id, ()) for group_id in kv_cache_group_ids):
            return [self._hit] * len(kv_cache_group_ids)
        return None
