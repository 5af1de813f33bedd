"""Copies that the engine would make too early, and the requests that wait for a step because of them.

A hit of the engine's own that ends inside a block gets a copy of that block, which vLLM makes before the
step's forward. But a block of attention counts as cached as soon as it is given to whoever will compute it,
so that requests which begin in the same step can share it:

    step n     | copies | forward |        r1 begins: its block is cached
               |   ^    |    ^    |        r2 begins, and hits 16 of that block's 32 tokens
               | for r2 |  by r1  |        what r2 gets is what the block held before

What r2 computed from that would be wrong, and be stored. A step later its copy is right. (States vLLM keeps
from hits in the step that computes them.)

Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from umbp.connector import compat
from umbp.connector.groups import CacheShape, GroupKind

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


class EarlyCopies:
    """Finds them while a step is being planned."""

    def __init__(self, shape: CacheShape) -> None:
        self._shape = shape
        self._cut_groups = [
            group
            for group in shape.groups
            if group.kind is not GroupKind.STATE and group.block_tokens > shape.hit_tokens
        ]
        self._cache: KVCacheManager | None = None

    def bind(self, cache: KVCacheManager) -> None:
        self._cache = cache

    def is_one_for(self, request: Request, whole_tokens: int, everyone: Iterable[Request]) -> bool:
        """Whether the engine would copy for this request what one of the others is yet to compute; of its own
        hit `whole_tokens` are in whole blocks of all groups.
        """
        if self._cache is None or not self._cut_groups:
            return False
        computing = [one for one in everyone if self._computes_what_follows(one, request, whole_tokens)]
        if not computing:
            return False
        hit_tokens, hit_blocks = compat.own_hit(self._cache, request)
        behind = [one for one in computing if one.num_computed_tokens < hit_tokens]
        for group in self._cut_groups if behind else ():
            place, is_cut = divmod(hit_tokens, group.block_tokens)
            source = hit_blocks[group.group_id][place : place + 1] if is_cut else []
            if not any(source):
                continue
            tables = (compat.held_blocks(self._cache, one)[group.group_id] for one in behind)
            if any(table[place : place + 1] == source for table in tables):
                return True
        return False

    def _computes_what_follows(self, one: Request, request: Request, whole_tokens: int) -> bool:
        """Whether it runs, and goes on after these tokens as the request does."""
        place = whole_tokens // self._shape.hash_tokens
        mine, theirs = request.block_hashes, one.block_hashes
        return (
            one is not request
            and compat.is_running(one)
            and place < min(len(mine), len(theirs))
            and mine[place] == theirs[place]
        )
