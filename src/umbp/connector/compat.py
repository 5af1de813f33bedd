"""Every touch of this package on vLLM's internals, in one place.

Pure functions over vLLM's configuration, requests and block pool. Both roles use them; nothing here keeps
state.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    BlockHashWithGroupId,
    generate_block_hash_extra_keys,
    get_block_hash,
    maybe_convert_block_hash,
    resolve_dcp_kv_block_size,
    resolve_kv_cache_block_sizes,
    to_event_extra_keys,
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
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)

from umbp.connector.groups import CacheGroup, CacheShape, GroupKind

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

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
    hit_tokens, _ = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return hit_tokens, hash_block_tokens(vllm_config, kv_cache_config)


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
                        f"{name} keeps a state (Mamba) in cache mode {spec.mamba_cache_mode!r}: only "
                        "--mamba-cache-mode align, with prefix caching on, leaves states at block ends"
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


def scheduled_requests(output: SchedulerOutput, among: Container[str]) -> Iterable[tuple[str, int]]:
    """Of each of these requests that computes in this step: its id and how many tokens are computed after
    it.
    """
    scheduled = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        if new.req_id in among:
            yield new.req_id, new.num_computed_tokens + scheduled[new.req_id]
    cached = output.scheduled_cached_reqs
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        if request_id in among:
            yield request_id, computed + scheduled[request_id]


def prompt_tokens(output: SchedulerOutput) -> int:
    """How many tokens the step computes beyond those that each of its requests would generate in it."""
    generated = len(output.num_scheduled_tokens)
    generated += sum(map(len, output.scheduled_spec_decode_tokens.values()))
    return max(output.total_num_scheduled_tokens - generated, 0)


def begun_within_loads(output: SchedulerOutput) -> Mapping[str, int]:
    """Of a step that waits for loads: the requests that begin in it, with their tokens that are cached or
    loaded.
    """
    if not output.has_sync_kv_loads:
        return {}
    begun = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    resumed = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    begun.update((one, tokens) for one, tokens in resumed if one in cached.resumed_req_ids)
    return begun


def taken_blocks(output: SchedulerOutput, block_tokens: int) -> tuple[int, int]:
    """How many free blocks this step's requests took at most, and how many of those hold nothing computed or
    loaded yet: the others were hits of the engine's own cache, or a load's.
    """
    taken = fresh = 0
    for new in output.scheduled_new_reqs:
        taken += len(new.block_ids[0])
        fresh += len(new.block_ids[0]) - new.num_computed_tokens // block_tokens
    more = sum(len(ids[0]) for ids in output.scheduled_cached_reqs.new_block_ids if ids is not None)
    return taken + more, fresh + more


def preempted_requests(output: SchedulerOutput) -> Iterable[str]:
    """Ids of the requests that lost their blocks since the last step."""
    return output.preempted_req_ids or ()


def block_tables(output: SchedulerOutput, request_id: str) -> tuple[list[int], ...] | None:
    """A scheduled request's current block ids by cache group, exact also after a resume."""
    state = output.kv_connector_block_state
    return None if state is None else state.get_block_ids(request_id)


def offered_states(output: SchedulerOutput, request_id: str) -> Sequence[tuple[int, int, int]]:
    """Blocks with a request's state at a block's end, as `(group, block id, tokens)`. They hold it once this
    step has run, and belong to others later: whoever wants one pins it now.
    """
    state = output.kv_connector_block_state
    return () if state is None else state.boundary_state_offloads.get(request_id, ())


def reads_prefix_cache(request: Request) -> bool:
    """Whether this request may be served from cached prefixes at all."""
    return not getattr(request, "skip_reading_prefix_cache", False)


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


@dataclass(frozen=True, slots=True)
class GroupLabel:
    """What KV events tell of a cache group: its number, vLLM's word for its kind, and its window."""

    group_id: int
    kind: str
    window_tokens: int | None


def tells_kv_events(vllm_config: VllmConfig) -> bool:
    """Whether the engine publishes KV events."""
    events = vllm_config.kv_events_config
    return events is not None and events.enable_kv_cache_events


def group_labels(kv_cache_config: KVCacheConfig) -> dict[int, GroupLabel]:
    """Each cache group as events tell it, by number."""
    return {
        group_id: GroupLabel(
            group_id,
            str(get_kv_cache_spec_kind(group.kv_cache_spec).value),
            get_kv_cache_spec_sliding_window(group.kv_cache_spec),
        )
        for group_id, group in enumerate(kv_cache_config.kv_cache_groups)
    }


def adapter_of(request: Request) -> tuple[int | None, str | None]:
    """The request's LoRA adapter by number and name."""
    lora = request.lora_request
    return (None, None) if lora is None else (lora.adapter_id, lora.name)


def extra_keys(request: Request, start: int, end: int, block_tokens: int) -> list[Any] | None:
    """What the hashes of blocks from token `start` to `end` are made of beside tokens, block by block, as
    events tell it; None where that is nothing.
    """
    keys = [
        generate_block_hash_extra_keys(request, first, first + block_tokens, 0)[0]
        for first in range(start, end, block_tokens)
    ]
    return to_event_extra_keys(keys) if any(keys) else None


def outside_hash(block_hash: bytes) -> int | bytes:
    """A block hash as events spell it."""
    return maybe_convert_block_hash(BlockHash(block_hash))


def block_stored(
    label: GroupLabel,
    block_tokens: int,
    block_hashes: Sequence[bytes],
    *,
    parent: bytes | None = None,
    tokens: Sequence[int] = (),
    adapter: tuple[int | None, str | None] = (None, None),
    extra_keys: list[Any] | None = None,
    session_id: str | None = None,
    locality: str | None = None,
) -> BlockStored:
    """vLLM's event for blocks that follow each other, behind `parent`.

    Its newer fields for tokens beyond a block stay empty: with a connector no hash covers any.
    """
    lora_id, lora_name = adapter
    return BlockStored(
        block_hashes=[outside_hash(block_hash) for block_hash in block_hashes],
        parent_block_hash=None if parent is None else outside_hash(parent),
        token_ids=list(tokens),
        block_size=block_tokens,
        lora_id=lora_id,
        medium=MEDIUM_CPU,
        lora_name=lora_name,
        extra_keys=extra_keys,
        group_idx=label.group_id,
        kv_cache_spec_kind=label.kind,
        kv_cache_spec_sliding_window=label.window_tokens,
        locality=locality,
        session_id=session_id,
    )


def block_removed(group_id: int, block_hashes: Sequence[bytes], locality: str | None) -> BlockRemoved:
    """vLLM's event for blocks of one group."""
    return BlockRemoved(
        block_hashes=[outside_hash(block_hash) for block_hash in block_hashes],
        medium=MEDIUM_CPU,
        group_idx=group_id,
        locality=locality,
    )
