"""Which tokens a block hash stands for: KV events name blocks by hash, and tell what is in them.

Scheduler thread only. A hash is chained over its whole prefix, so its place in a prompt is the same in every
request that has it.

    request a   | h0 | h1 | h2 | h3 |    places: h0, h1 and h5 in b, h2 and h3 in a
    request b   | h0 | h1 | h5 |         the latest request that has a hash stands for it
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from umbp.connector import compat
from umbp.errors import InvariantError

if TYPE_CHECKING:
    from vllm.v1.request import Request


class Chain:
    """One request's hashes and tokens. They grow while it is open, and may be taken back."""

    def __init__(self, request: Request) -> None:
        self.hashes: Sequence[bytes] = request.block_hashes
        self.tokens: Sequence[int] = request.all_token_ids
        self.adapter = compat.adapter_of(request)
        self.session_id: str | None = request.session_id
        self.indexed = 0
        """So many of the hashes are in the book, as far as they were not taken back."""
        self.listed: set[bytes] = set()
        """All that were ever put there."""
        self._request: Request | None = request
        self._extra: list[Any] | None = None

    def extra_keys(self, start: int, end: int, block_tokens: int) -> list[Any] | None:
        """What these blocks' hashes are made of beside tokens, block by block; None for nothing."""
        if self._request is not None:
            return compat.extra_keys(self._request, start, end, block_tokens)
        return None if self._extra is None else self._extra[start // block_tokens : end // block_tokens]

    def close(self, block_tokens: int) -> None:
        """Let the request go, with the images that it may hold; what is told of its blocks stays."""
        if self._request is not None:
            end = len(self.hashes) * block_tokens
            self._extra = compat.extra_keys(self._request, 0, end, block_tokens)
            self._request = None


Place: TypeAlias = tuple[Chain, int]
"""Where a hash stands: the chain, and its number there."""


class BlockBook:
    """Places by hash. A request is indexed when a hash is asked for that isn't known yet."""

    def __init__(self, hash_tokens: int) -> None:
        self._hash_tokens = hash_tokens
        self._open: dict[str, Chain] = {}
        self._closed: dict[int, Chain] = {}
        """By identity, since a request's name may come again; oldest first."""
        self._places: dict[bytes, Place] = {}
        self._kept = 0

    def keep(self, hashes: int) -> None:
        """Remember so many hashes of requests that are gone, if blocks are hash by hash."""
        self._kept = hashes

    def open(self, request: Request) -> None:
        """From now on its hashes can be found, those to come included."""
        self._open[request.request_id] = Chain(request)

    def close(self, request_id: str) -> None:
        """The request is gone; its hashes are forgotten, or kept as `keep` says."""
        chain = self._open.pop(request_id, None)
        if chain is None:
            return
        if not self._kept:
            self._forget(chain)
            return
        self._index(chain)
        chain.close(self._hash_tokens)
        self._closed[id(chain)] = chain
        limit = self._kept + sum(other.indexed for other in self._open.values())
        while len(self._places) > limit and self._closed:
            self._forget(self._closed.pop(next(iter(self._closed))))

    def find(self, hashes: Sequence[bytes]) -> list[Place | None]:
        """The place of each hash, where it is known."""
        places = [self._place(block_hash) for block_hash in hashes]
        if None in places:
            for chain in self._open.values():
                self._index(chain)
            places = [self._place(block_hash) for block_hash in hashes]
        if None in places:
            # A request that is gone has taken hashes with it that others have too, or some were taken back.
            for chain in self._open.values():
                chain.indexed = 0
                self._index(chain)
            places = [self._place(block_hash) for block_hash in hashes]
        return places

    def audit(self) -> None:
        """Raise `InvariantError` where a place is in a request that is gone."""
        chains = {id(chain) for chain in (*self._open.values(), *self._closed.values())}
        if any(id(chain) not in chains for chain, _ in self._places.values()):
            raise InvariantError("the book has places in requests that are gone")

    def _place(self, block_hash: bytes) -> Place | None:
        place = self._places.get(block_hash)
        if place is None:
            return None
        chain, index = place
        # What a session's client takes back makes room for other hashes.
        is_there = index < len(chain.hashes) and chain.hashes[index] == block_hash
        return place if is_there else None

    def _index(self, chain: Chain) -> None:
        known, count = chain.indexed, len(chain.hashes)
        if count > known:
            fresh = chain.hashes[known:count]
            chain.listed.update(fresh)
            places = zip(itertools.repeat(chain), range(known, count), strict=False)
            self._places.update(zip(fresh, places, strict=True))
        chain.indexed = count

    def _forget(self, chain: Chain) -> None:
        for block_hash in chain.listed:
            place = self._places.get(block_hash)
            if place is not None and place[0] is chain:
                del self._places[block_hash]
