"""What the connector does to the engine's block pool, and reads of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, get_block_hash

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


def pin_blocks(pool: BlockPool, block_ids: Sequence[int]) -> None:
    """Keep these blocks from being given to anyone else; each call wants one `unpin_blocks`."""
    pool.touch([pool.blocks[block_id] for block_id in block_ids])


def unpin_blocks(pool: BlockPool, block_ids: Sequence[int]) -> None:
    """Give back one pin of each block; the last of a prefix becomes the first to be reused."""
    pool.free_blocks([pool.blocks[block_id] for block_id in reversed(block_ids)])


def tells_evictions(pool: BlockPool) -> bool:
    """Whether `next_evicted` and `unpin_evictable` know this vLLM's block pool, and it caches anything."""
    queue = getattr(pool, "free_block_queue", None)
    names = ("fake_free_list_head", "fake_free_list_tail", "num_free_blocks")
    return pool.enable_caching and all(hasattr(queue, name) for name in names)


def next_evicted(pool: BlockPool, limit: int) -> list[tuple[int, bytes | None]]:
    """The free blocks that will be given away next, at most `limit`, the first first: id and name.

    A name stands for one time that the engine has cached a block: the block gets another object when it is
    cached again, be it under the same hash, and None when it isn't cached any more.
    """
    queue = pool.free_block_queue
    last = queue.fake_free_list_tail
    block = queue.fake_free_list_head.next_free_block
    found: list[tuple[int, bytes | None]] = []
    while block is not None and block is not last and len(found) < limit:
        found.append((block.block_id, block.block_hash))
        block = block.next_free_block
    return found


def cached_name(pool: BlockPool, block_id: int) -> bytes | None:
    """The name, as `next_evicted` tells it, of any block."""
    return pool.blocks[block_id].block_hash


def hash_of_name(name: bytes) -> bytes:
    """The block hash in a name."""
    return get_block_hash(BlockHashWithGroupId(name))


def unpin_evictable(
    pool: BlockPool, block_ids: Sequence[int], behind: Sequence[tuple[int, bytes | None] | None]
) -> int:
    """Give back one pin of each of these blocks, which `next_evicted` has told; returns how many are free.

    Each returns to its place: behind the block that was told before it, if that still waits to be given away,
    else behind the one returned before it, or to the front. (vLLM's own `free_blocks` would make them the
    last to be given away.)
    """
    queue = pool.free_block_queue
    place = queue.fake_free_list_head
    free = 0
    for block_id, neighbour in zip(block_ids, behind, strict=True):
        block = pool.blocks[block_id]
        block.ref_cnt -= 1
        if block.ref_cnt:
            continue
        if neighbour is not None:
            before = pool.blocks[neighbour[0]]
            if before.next_free_block is not None and before.block_hash is neighbour[1]:
                place = before
        after = place.next_free_block
        assert after is not None, "the end of vLLM's free list is never taken"
        place.next_free_block, block.prev_free_block = block, place
        block.next_free_block, after.prev_free_block = after, block
        place = block
        free += 1
    queue.num_free_blocks += free
    return free


def hide_blocks(pool: BlockPool, block_ids: Sequence[int]) -> None:
    """Take these blocks out of the engine's prefix cache; who has them keeps them."""
    pool.evict_blocks(set(block_ids))


def own_hit(cache: KVCacheManager, request: Request) -> tuple[int, list[list[int]]]:
    """What the engine would take from its own cache for this request now: how many tokens, and the ids of
    their blocks by cache group, with 0 for those that it needs no more.
    """
    if not cache.prefix_cache_lookup_enabled(request):
        return 0, []
    blocks, tokens, _ = cache.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
    return tokens, [[block.block_id for block in group] for group in blocks]


def held_blocks(cache: KVCacheManager, request: Request) -> Sequence[list[int]]:
    """The ids of the blocks that a request has, by cache group."""
    return cache.get_block_ids(request.request_id)
