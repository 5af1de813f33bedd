"""The bytes of one rank's KV cache, as vLLM allocates and views them, cache groups on top of each other."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

from umbp.testing.engine.shape import STATE_WORDS, Layer, Layers, Shape, model_layers

SPOILED = -21846
"""What stands in memory that nobody has written since it changed owners; no pattern is likely to be it."""
GARBAGE = SPOILED + 1
"""What a model computes from wrong bytes, or writes where nobody will look."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Where the content of layers stands in a token's row of the model: `words` columns a layer from `start`
    on, for one shard of the heads.
    """

    start: int
    words: int


def plan_columns(
    shape: Shape, configs: Sequence[KVCacheConfig]
) -> tuple[dict[tuple[str, int], Columns], int]:
    """The columns of each layer's shards, and how many there are; those of a rank's share of a group are
    neighbours.
    """
    layers = {layer.name: layer for layer in model_layers(shape)}
    columns: dict[tuple[str, int], Columns] = {}
    total = 0
    for group_id in range(len(configs[-1].kv_cache_groups)):
        names = list(
            dict.fromkeys(name for one in configs for name in one.kv_cache_groups[group_id].layer_names)
        )
        for shard in range(shards_of(layers[names[0]].like, shape)):
            for name in names:
                words = words_of(layers[name].like, shape)
                columns[name, shard] = Columns(total, words)
                total += words
    return columns, total


def shards_of(like: Layers, shape: Shape) -> int:
    """How many different ranks' worth of content a layer has."""
    if like.kind == "mla":
        return 1
    return shape.ranks if like.kind == "mamba" else min(shape.ranks, shape.model_heads)


def words_of(like: Layers, shape: Shape) -> int:
    """Words of one token, or of one state, in a layer of a rank."""
    if like.kind == "mamba":
        return STATE_WORDS
    heads = 1 if like.kind == "mla" else shape.rank_heads
    return heads * 2 * like.head_size


class Part:
    """Layers of one group, one kind and one rank, in memory at even distances.

    Of attention, `memory` is [layer, block, head, token, content]; of a state [layer, block, word].
    Where tokens are dealt out, a block of `block_tokens` has every `dcp_size`-th of them here.
    """

    def __init__(
        self,
        group_id: int,
        layer: Layer,
        block_tokens: int,
        memory: np.ndarray,
        columns: slice,
        dcp: tuple[int, int] = (1, 0),
    ) -> None:
        """`dcp`: among how many ranks tokens are dealt out, and which of them this is."""
        self.dcp_size, self.dcp_rank = dcp
        self.group_id = group_id
        self.like = layer.like
        self.is_draft = layer.is_draft
        self.is_state = layer.like.kind == "mamba"
        self.block_tokens = block_tokens
        self.memory = memory
        self.columns = columns
        self.layers, self.heads, self.content = memory.shape[0], memory.shape[2], memory.shape[-1]

    def held(self, start: int, end: int) -> np.ndarray:
        """Which of the tokens from `start` to `end` are here."""
        return np.arange(start + (self.dcp_rank - start) % self.dcp_size, end, self.dcp_size)

    def write(self, table: np.ndarray, start: int, rows: np.ndarray) -> None:
        """`rows` are [token, word] of the tokens from `start` on."""
        places = self.held(start, start + len(rows))
        blocks = table[places // self.block_tokens]
        mine = rows[(self.dcp_rank - start) % self.dcp_size :: self.dcp_size, self.columns]
        self.memory[:, blocks, :, places % self.block_tokens // self.dcp_size] = mine.reshape(
            len(places), self.layers, self.heads, self.content
        )

    def spoil(self, table: np.ndarray, start: int, end: int) -> None:
        """Garbage for the tokens from `start` to `end`."""
        places = self.held(start, end)
        blocks = table[places // self.block_tokens]
        self.memory[:, blocks, :, places % self.block_tokens // self.dcp_size] = GARBAGE

    def read(self, table: np.ndarray, start: int, end: int) -> np.ndarray:
        """[token, word] of those of the tokens from `start` to `end` that are here."""
        first = start // self.block_tokens
        blocks = table[first : -(-end // self.block_tokens)]
        rows = len(blocks) * self.block_tokens // self.dcp_size
        found = self.memory[:, blocks].transpose(1, 3, 0, 2, 4).reshape(rows, -1)
        before = len(self.held(first * self.block_tokens, start))
        return found[before : before + len(self.held(start, end))]

    def first_read(self, start: int) -> int:
        """The first token that the computation of the tokens from `start` on looks at."""
        if self.like.kind == "sliding":
            return max(0, start - self.like.window_tokens + 1)
        if self.like.kind == "chunked":
            return start // self.like.window_tokens * self.like.window_tokens
        return 0

    def write_state(self, block: int, row: np.ndarray) -> None:
        self.memory[:, block] = row[self.columns].reshape(self.layers, -1)

    def has_state(self, block: int, row: np.ndarray) -> bool:
        return np.array_equal(self.memory[:, block].reshape(-1), row[self.columns])


class Memory:
    """One rank's KV cache."""

    def __init__(
        self,
        shape: Shape,
        rank: int,
        config: KVCacheConfig,
        views: Mapping[str, torch.Tensor],
        columns: Mapping[tuple[str, int], Columns],
    ) -> None:
        layers = {layer.name: layer for layer in model_layers(shape)}
        self.parts = [
            part
            for group_id, group in enumerate(config.kv_cache_groups)
            for part in _parts(
                shape,
                rank,
                group_id,
                [layers[name] for name in group.layer_names],
                group.kv_cache_spec,
                views,
                columns,
            )
        ]
        seen = {}
        for part in sorted(self.parts, key=lambda part: part.memory[:, 0].size):
            seen[part.memory.__array_interface__["data"][0], part.memory[:, 0].size] = part.memory
        self._pages = list(seen.values())

    def spoil(self, blocks: Sequence[int]) -> None:
        """Make blocks nobody's, whichever group they were of."""
        chosen = np.array(blocks)
        for pages in self._pages:
            pages[:, chosen] = SPOILED

    def touched(self, blocks: Iterable[int]) -> list[int]:
        """Which of the spoiled blocks somebody has written since."""
        chosen = np.array(list(blocks))
        found: set[int] = set()
        for pages in self._pages:
            content = pages[:, chosen]
            if (content != SPOILED).any():
                per_block = (content != SPOILED).swapaxes(0, 1).reshape(len(chosen), -1).any(axis=1)
                found.update(chosen[per_block].tolist())
        return sorted(found)

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Whole blocks, source and target, as vLLM copies them before a forward."""
        source, target = np.array(list(pairs)).T
        for pages in self._pages:
            pages[:, target] = pages[:, source]


def _parts(
    shape: Shape,
    rank: int,
    group_id: int,
    layers: Sequence[Layer],
    spec: KVCacheSpec,
    views: Mapping[str, torch.Tensor],
    columns: Mapping[tuple[str, int], Columns],
) -> Iterator[Part]:
    """The group's layers, together where one strided view shows them all."""
    pcp_rank, tp_rank = divmod(rank % (shape.ranks * shape.pcp), shape.ranks)
    # Tokens are dealt out among prefill-context ranks first.
    dcp = (shape.dcp, (tp_rank * shape.pcp + pcp_rank) % shape.dcp) if spec.dcp_sharded else (1, 0)
    block_tokens = spec.block_size * dcp[0]
    for alike in (False, True):
        chosen = [layer for layer in layers if layer.is_draft is alike]
        if not chosen:
            continue
        shard = tp_rank * shards_of(chosen[0].like, shape) // shape.ranks
        places = [columns[layer.name, shard] for layer in chosen]
        arrays = [_words(views[layer.name], layer) for layer in chosen]
        addresses = [array.__array_interface__["data"][0] for array in arrays]
        gaps = {after - before for before, after in itertools.pairwise(addresses)}
        is_even = len(gaps) <= 1 and all(
            after.start == before.start + before.words for before, after in itertools.pairwise(places)
        )
        if is_even:
            gap = gaps.pop() if gaps else 0
            memory = np.lib.stride_tricks.as_strided(
                arrays[0], (len(arrays), *arrays[0].shape), (gap, *arrays[0].strides)
            )
            span = slice(places[0].start, places[-1].start + places[-1].words)
            yield Part(group_id, chosen[0], block_tokens, memory, span, dcp)
            continue
        for layer, array, place in zip(chosen, arrays, places, strict=True):
            span = slice(place.start, place.start + place.words)
            yield Part(group_id, layer, block_tokens, array[None], span, dcp)


def _words(view: torch.Tensor, layer: Layer) -> np.ndarray:
    if layer.like.kind != "mamba":
        array: np.ndarray = view.view(torch.int16).numpy()
        return array
    return view.numpy().view(np.int16)[:, 0, 0, :]
