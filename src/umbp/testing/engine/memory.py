"""The bytes of one rank's KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from umbp.testing.engine.shape import BLOCK, HEAD_SIZE, HEADS, LAYERS

SPOILED = -21846
"""What stands in memory that nobody has written since it changed owners; no pattern is likely to be it."""


class Memory:
    """One rank's KV cache, token by token."""

    def __init__(self, views: Mapping[str, torch.Tensor]) -> None:
        self._layers = [views[layer].view(torch.int16).numpy() for layer in LAYERS]

    def write(self, table: Sequence[int], start: int, content: np.ndarray) -> None:
        """`content` is [token, layer, head, content] of the tokens from `start` on."""
        places = np.arange(start, start + len(content))
        blocks = np.array(table)[places // BLOCK]
        for index, layer in enumerate(self._layers):
            layer[blocks, :, places % BLOCK] = content[:, index]

    def read(self, table: Sequence[int], count: int) -> np.ndarray:
        """The same of the first `count` tokens."""
        blocks = list(table[: -(-count // BLOCK)])
        layers = [
            layer[blocks].transpose(0, 2, 1, 3).reshape(-1, HEADS, 2 * HEAD_SIZE)[:count]
            for layer in self._layers
        ]
        return np.stack(layers, axis=1)

    def spoil(self, blocks: Iterable[int]) -> None:
        chosen = list(blocks)
        for layer in self._layers:
            layer[chosen] = SPOILED
