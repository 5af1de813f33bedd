"""How far a prompt is stored on every rank, and the holds that keep it there. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from umbp.connector.groups import CacheGroup, CacheShape, GroupKind
from umbp.connector.hits import HitRules
from umbp.connector.scheduler.account import Quarantine
from umbp.connector.scheduler.pool_view import PoolView
from umbp.runtime.base import Wanted

FIND_TRIES = 4
"""How often a hit is looked for anew, each time a shorter one, when a part of it goes before it is held."""


class PrefixFinder(Protocol):
    """Finds what is stored beyond the engine's own hit."""

    def wanted(self, block_hashes: Sequence[bytes], start: int, limit: int) -> Sequence[Wanted]:
        """The blocks that `hold` would ask for."""
        ...

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
        self._dropped_blocks = int(self._group.drops_last_block)

    def wanted(self, block_hashes: Sequence[bytes], start: int, limit: int) -> Sequence[Wanted]:
        tokens = self._group.block_tokens
        names = self._group.names(block_hashes)[start // tokens : limit // tokens]
        return [Wanted(self._group.group_id, names, is_chain=True)]

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
    """For any groups: a hit ends where every group has what the engine needs to go on from there."""

    def __init__(self, pool: PoolView, quarantine: Quarantine, shape: CacheShape, rules: HitRules) -> None:
        self._pool = pool
        self._quarantine = quarantine
        self._shape = shape
        self._rules = rules
        # Those that need all blocks tell soonest how far a hit can reach.
        self._by_reach = sorted(shape.groups, key=lambda group: group.kind is not GroupKind.FULL)

    def wanted(self, block_hashes: Sequence[bytes], start: int, limit: int) -> Sequence[Wanted]:
        return [
            Wanted(
                group.group_id,
                group.names(block_hashes)[
                    start // group.block_tokens : self._last_looked_at(group, limit, limit)
                ],
                is_chain=group.kind is GroupKind.FULL,
            )
            for group in self._by_reach
        ]

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
        """Where the longest hit ends, at most at `limit`. What the engine has itself counts as stored: a hit
        beyond it needs none of that from outside.
        """
        end = limit
        sparse: list[tuple[CacheGroup, int, Sequence[bool]]] = []
        for group in self._by_reach:
            first = start // group.block_tokens
            wanted = group.names(block_hashes)[first : self._last_looked_at(group, end, limit)]
            if group.kind is GroupKind.FULL:
                run = self._pool.present(group.group_id, wanted)
                run = min(run, self._quarantine.healthy_prefix(group.group_id, wanted))
                end = min(end, (first + run - group.drops_last_block) * group.block_tokens)
            else:
                sparse.append((group, first, self._present(group, wanted)))
            if end <= start:
                return start
        while end > start:
            end -= end % self._shape.hit_tokens
            lacks = [place for one in sparse if (place := self._lacking(*one, end)) is not None]
            if not lacks:
                break
            # Whatever ends behind a block that is lacking, and still not far behind, needs it as well.
            end = min(lacks)
        return max(end, start)

    def _last_looked_at(self, group: CacheGroup, end: int, limit: int) -> int:
        """The blocks of a hit that ends there, and what speculation wants to see behind it. Of several groups
        the engine looks even at a block that the prompt's last token is in.
        """
        last = end // group.block_tokens + group.drops_last_block
        return last if len(self._shape.groups) > 1 else min(last, limit // group.block_tokens)

    def _lacking(self, group: CacheGroup, first: int, is_there: Sequence[bool], end: int) -> int | None:
        """Where the last block begins that is lacking for a hit up to `end`, or the run of lacking blocks
        that it ends; None if none is.
        """
        needed = self._rules.needed(group.group_id, end)
        stop = needed.stop + group.drops_last_block
        for row in range(stop - 1, max(needed.start, first) - 1, -1):
            if row - first < len(is_there) and is_there[row - first]:
                continue
            run = row
            # But for chunks, every hit needs the block that it ends with.
            while group.kind is not GroupKind.CHUNK and run > first and not is_there[run - 1 - first]:
                run -= 1
            return min(run * group.block_tokens, end - 1)
        return None

    def _present(self, group: CacheGroup, names: Sequence[bytes]) -> Sequence[bool]:
        found = self._pool.stored(group.group_id, names)
        if not len(self._quarantine):
            return found
        return [
            is_there and not self._quarantine.has(group.group_id, name)
            for name, is_there in zip(names, found, strict=True)
        ]

    def _hold_all(self, owner: str, block_hashes: Sequence[bytes], start: int, end: int) -> bool:
        for group in self._shape.groups:
            needed = self._rules.needed(group.group_id, end)
            first = max(needed.start, start // group.block_tokens)
            names = group.names(block_hashes)[first : needed.stop]
            if names and self._pool.hold(owner, group.group_id, names) < len(names):
                return False
        return True
