"""What one scripted engine is like, and the constants of its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

BLOCK = 16
"""Tokens of a KV block."""
LAYERS = tuple(f"model.layers.{index}.self_attn.attn" for index in range(2))
HEADS = 2
HEAD_SIZE = 4


@dataclass(frozen=True)
class Shape:
    """What one engine is like."""

    ranks: int = 1
    blocks: int = 64
    prefix_caching: bool = True
    max_batched_tokens: int = 64
    max_seqs: int = 8
    max_model_len: int = 256
    layout: str = "LBNHC"
    role: str = "kv_both"
    policy: str = "recompute"
    depth: int = 1
    """Steps in flight: with 2 the engine plans a step before it knows what the one before has sampled."""
    tells_events: bool = False
    """Whether KV events are on; the engine then records them."""
    extra: Mapping[str, object] = field(default_factory=dict)
