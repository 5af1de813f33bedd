"""Which known keys have left the pools: the rings of removed digests, turned back into keys.

A pool keeps digests, not keys, so only keys that were learned can be told. Runs on the scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from umbp.data import BlockIdentityCodec, Rank
from umbp.pool import Pool

GROUP = 0
KEYS_PER_SLOT = 2
"""So many keys are remembered for each object that a pool can have; beyond, the oldest are forgotten."""

Digest = tuple[int, int]


@dataclass(slots=True)
class _Known:
    """One rank's keys in the pool that it has now, oldest first."""

    pool: Pool
    cursor: int
    limit: int
    hashes: dict[Digest, bytes] = field(default_factory=dict)


class RemovedKeys:
    """Each key that was learned and has gone since is told once: evicted, removed or cleared by whichever
    process.

    Learning costs a digest and a dictionary entry for each block of each request: begun only by whoever asks.
    """

    def __init__(self, codec: BlockIdentityCodec) -> None:
        self._codec = codec
        self._known: dict[Rank, _Known] = {}
        self._lost: list[str] = []

    def learn(self, pools: Mapping[Rank, Pool], hashes: Sequence[bytes]) -> None:
        """These blocks are stored now, or will be."""
        self._follow(pools)
        for rank, known in self._known.items():
            self._remember(known, self._codec.key_prefix(GROUP, rank), hashes)

    def take(self, pools: Mapping[Rank, Pool]) -> list[str]:
        """Keys that have gone since the last call, oldest first."""
        self._follow(pools)
        gone, self._lost = self._lost, []
        for rank, known in self._known.items():
            digests, known.cursor, has_gap = known.pool.removed_since(known.cursor)
            prefix = self._codec.key_prefix(GROUP, rank)
            if has_gap:
                gone += self._absent(known, prefix)
                continue
            for digest in map(tuple, digests.tolist()):
                # What was stored again meanwhile has not gone.
                block_hash = known.hashes.get(digest)
                if block_hash is not None and not known.pool.lookup_raw(prefix, [block_hash])[0]:
                    del known.hashes[digest]
                    gone.append(prefix + block_hash.hex())
        return gone

    @staticmethod
    def _remember(known: _Known, prefix: str, hashes: Sequence[bytes]) -> None:
        digests = known.pool.digests_raw(prefix, hashes)
        known.hashes.update(zip(map(tuple, digests.tolist()), hashes, strict=True))
        while len(known.hashes) > known.limit:
            del known.hashes[next(iter(known.hashes))]

    def _absent(self, known: _Known, prefix: str) -> list[str]:
        """The ring has run over: every known key is looked up."""
        items = list(known.hashes.items())
        hits = known.pool.lookup_raw(prefix, [block_hash for _, block_hash in items])
        absent = [item for item, hit in zip(items, hits.tolist(), strict=True) if not hit]
        for digest, _ in absent:
            del known.hashes[digest]
        return [prefix + block_hash.hex() for _, block_hash in absent]

    def _follow(self, pools: Mapping[Rank, Pool]) -> None:
        """A pool that was replaced has taken its objects with it, one that was attached anew has not."""
        before = {rank: known for rank, known in self._known.items() if pools.get(rank) is not known.pool}
        for rank in before:
            del self._known[rank]
        for rank, pool in pools.items():
            if rank not in self._known:
                slots = pool.stats()["slots"]
                self._known[rank] = _Known(pool, pool.removed_head(), KEYS_PER_SLOT * slots)
        for rank, known in before.items():
            hashes = list(known.hashes.values())
            prefix = self._codec.key_prefix(GROUP, rank)
            now = self._known.get(rank)
            hits = [False] * len(hashes) if now is None else now.pool.lookup_raw(prefix, hashes).tolist()
            kept = [block_hash for block_hash, is_there in zip(hashes, hits, strict=True) if is_there]
            self._lost += [prefix + h.hex() for h, is_there in zip(hashes, hits, strict=True) if not is_there]
            if now is not None:
                self._remember(now, prefix, kept)
