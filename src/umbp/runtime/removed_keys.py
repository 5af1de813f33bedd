"""Which known keys have left the pools: the rings of removed digests, turned back into block hashes.

A pool keeps digests, not keys, so only keys that were learned can be told. Runs on the scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from umbp.data import Rank
from umbp.pool import Pool
from umbp.pool.pool import Digests

KEYS_PER_SLOT = 2
"""So many keys are remembered for each object that a pool can have; beyond, the oldest are forgotten."""

Removed = tuple[Rank, int, bytes]
"""Whose object has gone: rank, cache group and block hash."""


@dataclass(slots=True)
class _Known:
    """One rank's keys in the pool that it has now."""

    pool: Pool
    cursor: int
    limit: int
    groups: dict[int, dict[bytes, bytes]] = field(default_factory=dict)
    """By cache group: block hashes by digest, oldest first."""


class RemovedKeys:
    """Each key that was learned and has gone since is told once: evicted, removed or cleared by whichever
    process.

    Learning costs a digest and a dictionary entry for each block and rank: begun only by whoever asks.
    """

    def __init__(self, prefix_of: Callable[[int, Rank], str]) -> None:
        """`prefix_of(group, rank)` is what a key has before its hash."""
        self._prefix_of = prefix_of
        self._known: dict[Rank, _Known] = {}
        self._lost: list[Removed] = []

    def follow(self, pools: Mapping[Rank, Pool]) -> None:
        """What is found in these pools from now on and learned before `take` is missed by nobody.

        A pool that was replaced has taken its objects with it, one that was attached anew has not.
        """
        before = {rank: known for rank, known in self._known.items() if pools.get(rank) is not known.pool}
        for rank in before:
            del self._known[rank]
        for rank, pool in pools.items():
            if rank not in self._known:
                slots = pool.stats()["slots"]
                self._known[rank] = _Known(pool, pool.removed_head(), KEYS_PER_SLOT * slots)
        for rank, old in before.items():
            now = self._known.get(rank)
            for group, hashes in old.groups.items():
                there, gone = self._sorted_out(now, rank, group, list(hashes.values()))
                self._lost += [(rank, group, block_hash) for block_hash in gone]
                if now is not None:
                    self._remember(now, rank, group, there)

    def learn(self, pools: Mapping[Rank, Pool], group: int, hashes: Sequence[bytes]) -> None:
        """These blocks are stored now, or will be."""
        self.follow(pools)
        for rank, known in self._known.items():
            self._remember(known, rank, group, hashes)

    def forget(self, group: int, hashes: Sequence[bytes]) -> None:
        """These are not told of any more, on whichever rank."""
        for rank, known in self._known.items():
            entries = known.groups.get(group)
            if entries:
                for digest in _names(known.pool.digests_raw(self._prefix_of(group, rank), hashes)):
                    entries.pop(digest, None)

    def take(self, pools: Mapping[Rank, Pool]) -> list[Removed]:
        """Keys that have gone since the last call; of each rank and group the oldest first."""
        self.follow(pools)
        gone, self._lost = self._lost, []
        for rank, known in self._known.items():
            digests, known.cursor, has_gap = known.pool.removed_since(known.cursor)
            removed = None if has_gap else _names(digests)
            for group, entries in known.groups.items():
                suspects = list(entries) if removed is None else _known_ones(removed, entries)
                gone += [(rank, group, one) for one in self._drop_absent(known, rank, group, suspects)]
        return gone

    def _remember(self, known: _Known, rank: Rank, group: int, hashes: Sequence[bytes]) -> None:
        entries = known.groups.setdefault(group, {})
        digests = known.pool.digests_raw(self._prefix_of(group, rank), hashes)
        entries.update(zip(_names(digests), hashes, strict=True))
        if (surplus := len(entries) - known.limit) > 0:
            # All at once: each look for a dictionary's first entry passes over those that were there before.
            for digest in list(islice(entries, surplus)):
                del entries[digest]

    def _drop_absent(self, known: _Known, rank: Rank, group: int, suspects: list[bytes]) -> Iterable[bytes]:
        """Of these digests, those that are not there: what was stored again meanwhile has not gone."""
        entries = known.groups[group]
        hashes = [entries[digest] for digest in suspects]
        _, gone = self._sorted_out(known, rank, group, hashes)
        absent = set(gone)
        for digest, block_hash in zip(suspects, hashes, strict=True):
            if block_hash in absent:
                del entries[digest]
        return gone

    def _sorted_out(
        self, known: _Known | None, rank: Rank, group: int, hashes: list[bytes]
    ) -> tuple[list[bytes], list[bytes]]:
        """What of these is there, and what is not."""
        if known is None or not hashes:
            return [], hashes
        hits = known.pool.lookup_raw(self._prefix_of(group, rank), hashes).tolist()
        there: list[bytes] = []
        gone: list[bytes] = []
        for block_hash, is_there in zip(hashes, hits, strict=True):
            (there if is_there else gone).append(block_hash)
        return there, gone


def _names(digests: Digests) -> list[bytes]:
    """Each digest as one value."""
    names: list[bytes] = np.ascontiguousarray(digests).view("V16").ravel().tolist()
    return names


def _known_ones(removed: list[bytes], entries: Mapping[bytes, bytes]) -> list[bytes]:
    """Each once, though it may have gone several times."""
    return [digest for digest in dict.fromkeys(removed) if digest in entries]
