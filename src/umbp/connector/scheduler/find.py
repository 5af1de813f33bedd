"""How far a prompt is stored on every rank, and the holds that keep it there. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from umbp.connector.groups import CacheGroup, CacheShape, GroupKind
from umbp.connector.hits import HitFinder
from umbp.connector.scheduler.account import Quarantine
from umbp.connector.scheduler.pool_view import PoolView

FIND_TRIES = 4
"""How often a hit is looked for anew, each time a shorter one, when a part of it goes before it is held."""


class PrefixFinder(Protocol):
    """Finds what is stored beyond the engine's own hit."""

    def hold(self, owner: str, block_hashes: Sequence[bytes], start: int, limit: int) -> int:
        """The token at which the longest hit ends, at most `limit`, where the engine has the first `start`
        tokens itself. What must be loaded for it is held under `owner`; nothing is where the answer is
        `start`.
        """
        ...


class ChainFinder:
    """For one group of full attention: a hit is the run of blocks that is there."""

    def __init__(self, pool: PoolView, quarantine: Quarantine, shape: CacheShape) -> None:
        (self._group,) = shape.groups
        self._pool = pool
        self._quarantine = quarantine
        self._dropped_blocks = 1 if shape.drops_last_block else 0

    def hold(self, owner: str, block_hashes: Sequence[bytes], start: int, limit: int) -> int:
        tokens = self._group.block_tokens
        wanted = self._group.names(block_hashes)[start // tokens : limit // tokens]
        wanted = wanted[: self._quarantine.healthy_prefix(self._group.group_id, wanted)]
        if len(wanted) <= self._dropped_blocks:
            return start
        held = self._pool.hold(owner, self._group.group_id, wanted) - self._dropped_blocks
        if held > 0:
            return start + held * tokens
        self._pool.unhold(owner)
        return start


class GroupsFinder:
    """For any groups: a hit ends where the engine could go on in all of them, by its own rules."""

    def __init__(self, pool: PoolView, quarantine: Quarantine, shape: CacheShape, hits: HitFinder) -> None:
        self._pool = pool
        self._quarantine = quarantine
        self._shape = shape
        self._hits = hits
        # Those that need all blocks tell soonest how far a hit can reach.
        self._by_reach = sorted(shape.groups, key=lambda group: group.kind is not GroupKind.FULL)

    def hold(self, owner: str, block_hashes: Sequence[bytes], start: int, limit: int) -> int:
        for _ in range(FIND_TRIES):
            end = self._longest(block_hashes, start, limit)
            if end <= start:
                break
            if self._hold_all(owner, block_hashes, start, end):
                return end
            self._pool.unhold(owner)
            limit = end - self._shape.hit_tokens
        return start

    def _longest(self, block_hashes: Sequence[bytes], start: int, limit: int) -> int:
        """What the engine has itself counts as stored: a hit beyond it needs none of that from outside."""
        stored: dict[int, set[bytes]] = {}
        reach = limit
        for group in self._by_reach:
            names = group.names(block_hashes)
            first = start // group.block_tokens
            # Speculation looks one block further than the hit, and drops it.
            last = reach // group.block_tokens + (1 if self._shape.drops_last_block else 0)
            wanted = names[first:last]
            stored[group.group_id] = set(names[:first])
            if group.kind is GroupKind.FULL:
                run = self._pool.present(group.group_id, wanted)
                run = min(run, self._quarantine.healthy_prefix(group.group_id, wanted))
                stored[group.group_id].update(wanted[:run])
                reach = min(reach, (first + run) * group.block_tokens)
            else:
                stored[group.group_id].update(self._present(group, wanted))
            if reach <= start:
                return start
        return self._hits.longest(block_hashes, reach, stored)

    def _present(self, group: CacheGroup, names: Sequence[bytes]) -> Sequence[bytes]:
        found = self._pool.stored(group.group_id, names)
        return [
            name
            for name, is_there in zip(names, found, strict=True)
            if is_there and not self._quarantine.has(group.group_id, name)
        ]

    def _hold_all(self, owner: str, block_hashes: Sequence[bytes], start: int, end: int) -> bool:
        for group in self._shape.groups:
            needed = self._hits.needed(group.group_id, end)
            first = max(needed.start, start // group.block_tokens)
            names = group.names(block_hashes)[first : needed.stop]
            if names and self._pool.hold(owner, group.group_id, names) < len(names):
                return False
        return True
