"""What one scripted engine is like, and the constants of its model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

BLOCK = 16
"""Tokens of a KV block, where nothing else is said."""
HEADS = 2
"""KV heads of a rank."""
HEAD_SIZE = 4
STATE_WORDS = 48
"""Words of 16 bits of a rank's recurrent state in one layer."""

Kind = Literal["full", "sliding", "chunked", "mamba", "mla"]


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers of one kind. vLLM makes cache groups of them: as many layers in each as the rarest kind has."""

    kind: Kind = "full"
    count: int = 2
    window_tokens: int = 0
    """of a sliding window or of a chunk"""
    head_size: int = HEAD_SIZE
    """With half the size of others' heads, vLLM gives these layers blocks of twice the tokens."""
    block_tokens: int = BLOCK


@dataclass(frozen=True, slots=True)
class Shape:
    """What one engine is like."""

    ranks: int = 1
    """of tensor parallelism"""
    stages: int = 1
    """of pipeline parallelism, each with its share of the layers"""
    dcp: int = 1
    """Decode context parallelism: so many neighbouring ranks hold the same heads and deal out the tokens."""
    pcp: int = 1
    """Prefill context parallelism: so many times the ranks share out the computing, with the same KV unless
    tokens are dealt out."""
    dp_rank: int | None = None
    """Its number among data-parallel engines, where there are others."""
    layers: tuple[Layers, ...] = (Layers(),)
    kv_heads: int | None = None
    """of the whole model; fewer than ranks are held by several of them. None: `HEADS` of each rank's own."""
    blocks: int = 64
    prefix_caching: bool = True
    match_tokens: int | None = None
    """vLLM's `prefix_match_unit`: tokens of a prefix hash, where they are fewer than those of any block."""
    max_batched_tokens: int = 64
    max_seqs: int = 8
    max_model_len: int = 256
    layout: str = "LBNHC"
    role: str = "kv_both"
    policy: str = "recompute"
    depth: int = 1
    """Steps in flight: with 2 the engine plans a step before it knows what the one before has sampled."""
    runner: int = 1
    """Which of vLLM's model runners is played: 2 resumes a preempted request as a new one."""
    order: str = "fcfs"
    """Who is served first: "fcfs" or "priority"."""
    drafts: int = 0
    """Tokens that are guessed ahead in each step of speculative decoding."""
    drafter: Literal["ngram", "eagle", "mtp"] = "ngram"
    """Who guesses them; all but "ngram" have a layer of their own behind the model's."""
    has_connector: bool = True
    tells_events: bool = False
    """Whether KV events are on; the engine then records them."""
    extra: Mapping[str, object] = field(default_factory=dict)
    before: tuple[Mapping[str, object], ...] = ()
    """Connectors that vLLM's MultiConnector asks before this one, each as it is configured."""
    after: tuple[Mapping[str, object], ...] = ()
    """and those that it asks after this one"""

    @property
    def world(self) -> int:
        return self.ranks * self.pcp * self.stages

    @property
    def has_draft_layer(self) -> bool:
        return self.drafts > 0 and self.drafter != "ngram"

    @property
    def has_state(self) -> bool:
        return any(each.kind == "mamba" for each in self.layers)

    @property
    def model_heads(self) -> int:
        return self.ranks * HEADS if self.kv_heads is None else self.kv_heads

    @property
    def rank_heads(self) -> int:
        return max(1, self.model_heads // self.ranks)


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of the model: where it stands and what it is."""

    name: str
    like: Layers
    is_draft: bool = False


def model_layers(shape: Shape) -> list[Layer]:
    """The model's layers in their order, the draft's last. Kinds take turns as far as they last, so that
    every stage has some of each.
    """
    left = [[each] * each.count for each in shape.layers]
    mixed: list[Layers] = []
    total = sum(each.count for each in shape.layers)
    for place in range(total):
        # Whoever is furthest behind its share comes next.
        behind = max(
            (kind for kind in left if kind),
            key=lambda kind: len(kind) / kind[0].count - (total - place) / total + len(kind) / total,
        )
        mixed.append(behind.pop())
    names = [
        f"model.layers.{index}.{'linear_attn' if like.kind == 'mamba' else 'self_attn.attn'}"
        for index, like in enumerate(mixed)
    ]
    layers = [Layer(name, like) for name, like in zip(names, mixed, strict=True)]
    if shape.has_draft_layer:
        attention = next(each for each in shape.layers if each.kind != "mamba")
        like = replace(attention, kind="mla" if attention.kind == "mla" else "full", count=1, window_tokens=0)
        layers.append(Layer(f"model.layers.{total}.self_attn.attn", like, is_draft=True))
    return layers


def stage_layers(shape: Shape, stage: int) -> list[Layer]:
    """The layers of one stage of the pipeline; the draft's are on the last."""
    layers = model_layers(shape)
    own = [layer for layer in layers if not layer.is_draft]
    share, rest = divmod(len(own), shape.stages)
    bounds = [0]
    for index in range(shape.stages):
        bounds.append(bounds[-1] + share + (1 if index < rest else 0))
    mine = own[bounds[stage] : bounds[stage + 1]]
    if stage == shape.stages - 1:
        mine = mine + [layer for layer in layers if layer.is_draft]
    return mine


LAYERS = tuple(layer.name for layer in model_layers(Shape()))
"""The layers' names in an engine of the default shape."""
