"""KV events: which blocks can be loaded from the pool, told to whoever routes requests by it.

A block is told as stored once every rank's pool has it, be it this engine that stored it, another whose block
a lookup has found, or a store beyond that it was fetched from; and as removed once some rank has lost it, to
whomever. Replayed into a set, the events are what is there, as far as this engine knows of it. What a store
has and the pools lack is not told: stores forget without telling. Scheduler thread only; where events are
off, nothing of this module is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from umbp.connector import compat
from umbp.connector.compat import GroupLabel
from umbp.connector.groups import CacheGroup, CacheShape
from umbp.connector.scheduler.account import LoadEntry, StoreEntry
from umbp.connector.scheduler.block_book import BlockBook, Place
from umbp.connector.scheduler.pool_view import PoolView
from umbp.data import BlockStoreBatch
from umbp.errors import InvariantError

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.request import Request


class KVEvents:
    """Collects events between two calls of `take`."""

    def __init__(self, pool: EventfulPool, shape: CacheShape, kinds: Mapping[int, GroupLabel]) -> None:
        """`kinds`: what events tell of each group, by its number."""
        self._pool = pool
        self._groups = {group.group_id: group for group in shape.groups}
        self._hash_tokens = shape.hash_tokens
        self._kinds = kinds
        self._locality = "LOCAL" if pool.is_local else None
        self._book = BlockBook(shape.hash_tokens)
        self._told: dict[int, set[bytes]] = {group_id: set() for group_id in self._groups}
        self._planned: dict[int, list[list[Place | None]]] = {}
        """Of each store that is under way, by its entry's identity: the places of its batches' blocks."""
        self._events: list[KVCacheEvent] = []
        pool.listener = self

    def keep(self, blocks: int) -> None:
        """An engine with so many blocks may have some stored when the requests that made them are gone."""
        self._book.keep(2 * blocks)

    # Requests

    def open(self, request: Request) -> None:
        """A request's blocks may be looked up and stored from now on."""
        self._book.open(request)

    def close(self, request_id: str) -> None:
        """The request is gone; what is under way of it is told all the same."""
        self._book.close(request_id)

    # What is learned of the pool

    def found(self, group_id: int, hashes: Sequence[bytes]) -> None:
        """A lookup has found these blocks on every rank."""
        told = self._told[group_id]
        fresh = [block_hash for block_hash in hashes if block_hash not in told]
        if fresh:
            self._tell(group_id, zip(fresh, self._book.find(fresh), strict=True))

    def stores_planned(self, entry: StoreEntry) -> None:
        """These blocks are being stored."""
        self._planned[id(entry)] = [self._book.find(_hashes(batch)) for batch in entry.batches.values()]

    def stores_ended(self, entry: StoreEntry) -> None:
        """Every rank has reported, whatever became of it there: what all of them have is looked up."""
        stored: dict[int, list[tuple[bytes, Place | None]]] = {}
        for batch, places in zip(entry.batches.values(), self._planned.pop(id(entry)), strict=True):
            for group_id, block_hash, place in zip(batch.group_ids, _hashes(batch), places, strict=True):
                stored.setdefault(group_id, []).append((block_hash, place))
        for group_id, blocks in stored.items():
            self._tell(group_id, blocks)

    def load_ended(self, entry: LoadEntry) -> None:
        """What had to be fetched for it is in the pool now, unless it failed, or has gone again."""
        fetched: dict[int, list[bytes]] = {}
        for group_id, block_hash in entry.objects:
            fetched.setdefault(group_id, []).append(block_hash)
        for group_id, hashes in fetched.items():
            self.found(group_id, hashes)

    def take(self) -> list[KVCacheEvent]:
        """What has happened since the last call, in an order that can be replayed."""
        lost: dict[int, list[bytes]] = {}
        for group_id, block_hash in self._pool.take_lost():
            if block_hash in self._told.get(group_id, ()):
                self._told[group_id].remove(block_hash)
                lost.setdefault(group_id, []).append(block_hash)
        events, self._events = self._events, []
        for group_id, hashes in lost.items():
            events.append(compat.block_removed(group_id, hashes, self._locality))
        return events

    def audit(self) -> None:
        """Raise `InvariantError` where the accounts are off."""
        self._book.audit()
        if self._told.keys() != self._groups.keys():
            raise InvariantError(
                f"blocks of groups {sorted(self._told)} were told, of {sorted(self._groups)}"
            )

    # Inside

    def _tell(self, group_id: int, blocks: Iterable[tuple[bytes, Place | None]]) -> None:
        """Tell those as stored that are there at this moment: when they go will be told as well."""
        told = self._told[group_id]
        # The same block may come from two requests of one step.
        fresh = {block_hash: place for block_hash, place in blocks if block_hash not in told}
        if not fresh:
            return
        there = self._pool.watch(group_id, list(fresh))
        run: list[tuple[bytes, Place | None]] = []
        for one, is_there in zip(fresh.items(), there, strict=True):
            if not is_there:
                continue
            told.add(one[0])
            if run and not self._follows(group_id, run[-1][1], one[1]):
                self._events.append(self._stored(group_id, run))
                run = []
            run.append(one)
        if run:
            self._events.append(self._stored(group_id, run))

    def _follows(self, group_id: int, before: Place | None, place: Place | None) -> bool:
        if before is None or place is None or place[0] is not before[0]:
            return False
        group = self._groups[group_id]
        return _is_whole(group, place) and place[1] == before[1] + group.hashes_per_block

    def _stored(self, group_id: int, run: Sequence[tuple[bytes, Place | None]]) -> KVCacheEvent:
        """One event for blocks that follow each other in one prompt. A block whose tokens nobody knows any
        more is told by its hash alone. One that is filled so far only is told as vLLM does, by the tokens of
        its last hash.

        | ... parent | run[0] | run[1] | ... | run[-1] |
                     start                             end
        """
        group = self._groups[group_id]
        hashes = [block_hash for block_hash, _ in run]
        label = self._kinds[group_id]
        first, last = run[0][1], run[-1][1]
        if first is None or last is None:
            return compat.block_stored(label, group.block_tokens, hashes, locality=self._locality)
        chain, index = first
        tokens_each = group.block_tokens if _is_whole(group, first) else self._hash_tokens
        before = index - tokens_each // self._hash_tokens
        start, end = (before + 1) * self._hash_tokens, (last[1] + 1) * self._hash_tokens
        return compat.block_stored(
            label,
            tokens_each,
            hashes,
            parent=chain.hashes[before] if before >= 0 else None,
            tokens=chain.tokens[start:end],
            adapter=chain.adapter,
            extra_keys=chain.extra_keys(start, end, tokens_each),
            session_id=chain.session_id,
            locality=self._locality,
        )


def _is_whole(group: CacheGroup, place: Place) -> bool:
    return (place[1] + 1) % group.hashes_per_block == 0


def _hashes(batch: BlockStoreBatch) -> list[bytes]:
    # The scheduler's own batches have a hash for every block.
    return [block_hash for block_hash in batch.block_hashes if block_hash is not None]


class EventfulPool(PoolView):
    """The pool, with a listener to what is found in it."""

    listener: KVEvents | None = None

    def present(self, group_id: int, hashes: Sequence[bytes]) -> int:
        count = super().present(group_id, hashes)
        self._tell(group_id, hashes[:count])
        return count

    def stored(self, group_id: int, hashes: Sequence[bytes]) -> list[bool]:
        found = super().stored(group_id, hashes)
        self._tell(group_id, [block for block, is_there in zip(hashes, found, strict=True) if is_there])
        return found

    def hold(self, owner: str, group_id: int, hashes: Sequence[bytes]) -> int:
        count = super().hold(owner, group_id, hashes)
        self._tell(group_id, hashes[:count])
        return count

    def _tell(self, group_id: int, found: Sequence[bytes]) -> None:
        if found and self.listener is not None:
            self.listener.found(group_id, found)
