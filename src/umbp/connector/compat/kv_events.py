"""KV events as vLLM has them, and what of requests and cache groups goes into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import (
    KVCacheConfig,
    get_kv_cache_spec_kind,
    get_kv_cache_spec_sliding_window,
)

if TYPE_CHECKING:
    from vllm.v1.request import Request


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
