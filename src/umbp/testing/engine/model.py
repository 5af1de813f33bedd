"""The model: arithmetic that makes a token's KV from all tokens up to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from vllm.v1.request import Request

from umbp.testing.engine.shape import HEAD_SIZE, HEADS, LAYERS

_MASK = (1 << 64) - 1


def chain(state: int, tokens: Iterable[int]) -> list[int]:
    """A number for each token, drawn from all tokens up to it."""
    numbers = []
    for token in tokens:
        state = ((state ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK
        state ^= state >> 29
        numbers.append(state)
    return numbers


def tokens(count: int, seed: int = 0) -> list[int]:
    """A prompt. Prompts of one seed share their beginning."""
    return [3 + (seed * 7919 + index * (31 + seed)) % 990 for index in range(count)]


def sample(number: int) -> int:
    """The token that follows."""
    return 3 + (number >> 7) % 900


def patterns(numbers: Sequence[int], ranks: int) -> np.ndarray:
    """The KV of tokens: [token, rank, layer, head, content]."""
    words = ranks * len(LAYERS) * HEADS * 2 * HEAD_SIZE
    bits = np.array(numbers, dtype=np.uint64)[:, None] + np.arange(words, dtype=np.uint64) * np.uint64(
        0xD1342543DE82EF95
    )
    bits = (bits ^ (bits >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    content: np.ndarray = (bits >> np.uint64(48)).astype(np.uint16).view(np.int16)
    return content.reshape(len(numbers), ranks, len(LAYERS), HEADS, 2 * HEAD_SIZE)


class Chains:
    """The right KV of every request, computed once."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._weights = 0
        self._numbers: dict[str, list[int]] = {}
        self._patterns: dict[str, np.ndarray] = {}

    def of(self, request: Request, count: int) -> np.ndarray:
        """[token, rank, layer, head, content] of the request's first `count` tokens."""
        self._extend(request, count)
        return self._patterns[request.request_id][:count]

    def next_token(self, request: Request) -> int:
        self._extend(request, request.num_tokens)
        return sample(self._numbers[request.request_id][request.num_tokens - 1])

    def change_weights(self) -> None:
        """From now on the same tokens make another KV."""
        self._weights += 1
        self._numbers.clear()
        self._patterns.clear()

    def forget(self, request_id: str) -> None:
        self._numbers.pop(request_id, None)
        self._patterns.pop(request_id, None)

    def _extend(self, request: Request, count: int) -> None:
        numbers = self._numbers.setdefault(request.request_id, [])
        if len(numbers) >= count:
            return
        salt = self._weights << 32 | (sum(request.cache_salt.encode()) if request.cache_salt else 0)
        more = chain(numbers[-1] if numbers else salt, request.all_token_ids[len(numbers) : count])
        numbers.extend(more)
        known = self._patterns.get(request.request_id)
        made = patterns(more, self._ranks)
        self._patterns[request.request_id] = made if known is None else np.concatenate([known, made])
