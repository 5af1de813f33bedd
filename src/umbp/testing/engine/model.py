"""The model: arithmetic that makes a token's KV, and a recurrent state, from all tokens up to it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from vllm.v1.request import Request

_MASK = (1 << 64) - 1
_STEP = np.uint64(0xD1342543DE82EF95)
_MIX = np.uint64(0xBF58476D1CE4E5B9)
_LOW = np.uint64(31)
_HIGH = np.uint64(48)

NO_TOKEN = -1
"""Stands where a draft is wanted and none was made."""


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


class Patterns:
    """Numbers made into memory: row by row, `words` words of 16 bits each."""

    def __init__(self, words: int) -> None:
        self.words = words
        self._offsets = np.arange(words, dtype=np.uint64) * _STEP

    def of(self, numbers: Sequence[int]) -> np.ndarray:
        """[number, word]"""
        bits = np.array(numbers, dtype=np.uint64)[:, None] + self._offsets
        bits = (bits ^ (bits >> _LOW)) * _MIX
        content: np.ndarray = (bits >> _HIGH).astype(np.uint16).view(np.int16)
        return content


class _Known:
    """What has been computed of one request."""

    __slots__ = ("numbers", "rows", "tokens")

    def __init__(self, words: int) -> None:
        self.tokens: list[int] = []
        self.numbers: list[int] = []
        self.rows = np.empty((64, words), np.int16)

    def keep(self, tokens: Sequence[int]) -> None:
        """Forget what was computed from other tokens: a session replaces the last that it had sampled."""
        same = 0
        for old, new in zip(self.tokens, tokens, strict=False):
            if old != new:
                break
            same += 1
        del self.tokens[same:], self.numbers[same:]

    def extend(self, tokens: Sequence[int], numbers: Sequence[int], rows: np.ndarray) -> None:
        start, end = len(self.numbers), len(self.numbers) + len(numbers)
        if end > len(self.rows):
            larger = np.empty((2 * end, self.rows.shape[1]), np.int16)
            larger[:start] = self.rows[:start]
            self.rows = larger
        self.rows[start:end] = rows
        self.tokens.extend(tokens)
        self.numbers.extend(numbers)


class Chains:
    """The right content of every request's memory, computed once."""

    def __init__(self, words: int) -> None:
        self._patterns = Patterns(words)
        self._weights = 0
        self._known: dict[str, _Known] = {}

    def of(self, request: Request) -> np.ndarray:
        """[token, word] of all tokens that the request has."""
        return self._of(request).rows[: request.num_tokens]

    def ahead(self, request: Request, more: Sequence[int]) -> np.ndarray:
        """[token, word] of tokens that may come after those."""
        return self._patterns.of(chain(self._last(request), more))

    def next_tokens(self, request: Request, drafts: Sequence[int]) -> list[int]:
        """What is sampled: as many of the drafts as are right, and the token after them."""
        number = self._last(request)
        sampled = [sample(number)]
        for draft in drafts:
            if draft != sampled[-1]:
                break
            (number,) = chain(number, [draft])
            sampled.append(sample(number))
        return sampled

    def guess(self, request: Request, sampled: Sequence[int], count: int) -> list[int]:
        """Drafts of what comes after the request's tokens and the sampled ones: three of four are right."""
        number = chain(self._last(request), sampled)[-1]
        drafts: list[int] = []
        for _ in range(count):
            right = sample(number)
            drafts.append(right if (number >> 40) % 4 else 3 + right % 900)
            (number,) = chain(number, [drafts[-1]])
        return drafts

    def change_weights(self) -> None:
        """From now on the same tokens make another KV."""
        self._weights += 1
        self._known.clear()

    def forget(self, request_id: str) -> None:
        self._known.pop(request_id, None)

    def _salt(self, request: Request) -> int:
        return self._weights << 32 | (sum(request.cache_salt.encode()) if request.cache_salt else 0)

    def _last(self, request: Request) -> int:
        return self._of(request).numbers[request.num_tokens - 1]

    def _of(self, request: Request) -> _Known:
        known = self._known.get(request.request_id)
        if known is None:
            known = self._known[request.request_id] = _Known(self._patterns.words)
        have = request._all_token_ids
        if known.tokens != have:
            known.keep(have)
            start = len(known.numbers)
            state = known.numbers[-1] if start else self._salt(request)
            fresh = have[start:]
            numbers = chain(state, fresh)
            known.extend(fresh, numbers, self._patterns.of(numbers))
        return known
