"""How far a prompt is stored on every rank, and the holds that keep it there. Scheduler thread only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from umbp.connector.groups import CacheGroup, CacheShape, GroupKind
from umbp.connector.hits import HitRules
from umbp.connector.scheduler.account import Quarantine
from umbp.connector.scheduler.pool_view import PoolView
from umbp.runtime.base import Wanted

FULL = GroupKind.FULL

FIND_TRIES = 4
"""How often a hit is looked for anew, each time a shorter one, when a part of it goes before it is held."""


@dataclass(frozen=True, slots=True)
class Hit:
    """Where the longest hit ends, and of each cache group in which that is inside a block: the name that this
    block is kept under. It may have more in it than the hit has.
    """

    end: int
    tails: Mapping[int, bytes] = field(default_factory=dict)


class PrefixFinder(Protocol):
    """Finds what is stored beyond the engine's own hit."""

    def wanted(self, block_hashes: Sequence[bytes], start: int, limit: int) -> Sequence[Wanted]:
        """The blocks that `hold` would ask for."""
        ...

    def hold(self, owner: str, block_hashes: Sequence[bytes], start: int, limit: int) -> Hit:
        """The longest hit up to `limit` at most, where the engine has the first `start` tokens itself; both
        are places where hits may end, and blocks of every cache group end at `start`. What must be loaded for
        it is held under `owner`; nothing is where it ends at `start`.
        """
        ...

    def reach(self, block_hashes: Sequence[bytes], start: int, limit: int) -> int:
        """Where the longest hit ends at this moment; `start` for none. Holds nothing."""
        ...

    def is_written(self, block_hashes: Sequence[bytes], end: int) -> bool:
        """Whether a hit that ends there would be longer, but for a block that is just being written."""
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

    def hold(self, owner: str, block_hashes: Sequence[bytes], start: int, limit: int) -> Hit:
        tokens = self._group.block_tokens
        wanted = self._group.names(block_hashes)[start // tokens : limit // tokens]
        wanted = wanted[: self._quarantine.healthy_prefix(self._group.group_id, wanted)]
        if len(wanted) <= self._dropped_blocks:
            return Hit(start)
        held = self._pool.hold(owner, self._group.group_id, wanted) - self._dropped_blocks
        if held > 0:
            return Hit(start + held * tokens)
        self._pool.unhold(owner)
        return Hit(start)

    def reach(self, block_hashes: Sequence[bytes], start: int, limit: int) -> int:
        tokens = self._group.block_tokens
        wanted = self._group.names(block_hashes)[start // tokens : limit // tokens]
        found = self._pool.present(self._group.group_id, wanted)
        found = min(found, self._quarantine.healthy_prefix(self._group.group_id, wanted))
        return start + max(found - self._dropped_blocks, 0) * tokens

    def is_written(self, block_hashes: Sequence[bytes], end: int) -> bool:
        next_block = end // self._group.block_tokens + self._dropped_blocks
        return _is_written(self._pool, self._group, block_hashes, next_block)


@dataclass(frozen=True, slots=True)
class _Run:
    """What is there of a group that needs all blocks: whole ones up to token `whole`, and of the next one,
    named `tail`, what its tokens up to `end` need.

    | whole | whole | whole | tail    .... |
                          whole     end
    """

    whole: int
    end: int
    tail: bytes = b""


class GroupsFinder:
    """For any groups: a hit ends where every group has what the engine needs to go on from there."""

    def __init__(self, pool: PoolView, quarantine: Quarantine, shape: CacheShape, rules: HitRules) -> None:
        self._pool = pool
        self._quarantine = quarantine
        self._shape = shape
        self._is_fine = shape.is_fine
        self._rules = rules
        # Those that need all blocks tell soonest how far a hit can reach.
        self._by_reach = sorted(map(self._as_looked_up, shape.groups), key=lambda g: g.kind is not FULL)
        # Where hits may end inside a block, speculation gives up a hash's tokens instead of a block's.
        self._dropped_tokens = {
            group.group_id: min(group.block_tokens, shape.hit_tokens) * group.drops_last_block
            for group in shape.groups
        }

    def _as_looked_up(self, group: CacheGroup) -> CacheGroup:
        """A state may be one at any place where a hit may end: as if its blocks were no larger than that."""
        if group.kind is GroupKind.STATE and group.block_tokens > self._shape.hit_tokens:
            return replace(group, block_tokens=self._shape.hit_tokens, hashes_per_block=1)
        return group

    def wanted(self, block_hashes: Sequence[bytes], start: int, limit: int) -> Sequence[Wanted]:
        wanted = []
        for group in self._by_reach:
            last = self._last_looked_at(group, limit, limit)
            names = group.names(block_hashes)[start // group.block_tokens : last // group.block_tokens]
            wanted.append(Wanted(group.group_id, names, is_chain=group.kind is FULL))
            if self._is_fine and group.hashes_per_block > 1:
                whole = set(names)
                inside = block_hashes[start // group.hash_tokens : last // group.hash_tokens]
                tails = [name for name in inside if name not in whole]
                wanted.append(Wanted(group.group_id, tails, is_chain=False))
        return wanted

    def hold(self, owner: str, block_hashes: Sequence[bytes], start: int, limit: int) -> Hit:
        for _ in range(FIND_TRIES):
            hit = self._longest(block_hashes, start, limit)
            if hit.end <= start:
                break
            held = self._hold_all(owner, block_hashes, start, hit)
            if held == hit.end:
                return hit
            self._pool.unhold(owner)
            limit = min(held, hit.end - self._shape.hit_tokens)
            limit -= limit % self._shape.hit_tokens
        return Hit(start)

    def reach(self, block_hashes: Sequence[bytes], start: int, limit: int) -> int:
        return self._longest(block_hashes, start, limit).end

    def is_written(self, block_hashes: Sequence[bytes], end: int) -> bool:
        return any(
            _is_written(self._pool, group, block_hashes, end // group.block_tokens)
            for group in self._shape.groups
            if group.kind is FULL
        )

    def _longest(self, block_hashes: Sequence[bytes], start: int, limit: int) -> Hit:
        """Where the longest hit ends, at most at `limit`. What the engine has itself counts as stored: a hit
        beyond it needs none of that from outside.
        """
        end = limit
        runs: dict[int, _Run] = {}
        sparse: list[tuple[CacheGroup, int, Sequence[bool]]] = []
        for group in self._by_reach:
            first = start // group.block_tokens
            last = self._last_looked_at(group, end, limit)
            wanted = group.names(block_hashes)[first : last // group.block_tokens]
            if group.kind is FULL:
                found = self._pool.present(group.group_id, wanted)
                found = min(found, self._quarantine.healthy_prefix(group.group_id, wanted))
                run = self._run(group, block_hashes, (first + found) * group.block_tokens, last)
                runs[group.group_id] = run
                end = min(end, run.end - self._dropped_tokens[group.group_id])
            else:
                sparse.append((group, first, self._present(group, wanted)))
            if end <= start:
                return Hit(start)
        while end > start:
            end -= end % self._shape.hit_tokens
            lacks = [place for one in sparse if (place := self._lacking(*one, end)) is not None]
            if not lacks:
                break
            # Whatever ends behind a block that is lacking, and still not far behind, needs it as well.
            end = min(lacks)
        return Hit(end, self._tails(block_hashes, end, runs)) if end > start else Hit(start)

    def _last_looked_at(self, group: CacheGroup, end: int, limit: int) -> int:
        """The tokens of a hit that ends there, and what speculation wants to see behind it. Of several groups
        the engine looks even at a block that the prompt's last token is in.
        """
        last = end + self._dropped_tokens[group.group_id]
        return last if len(self._shape.groups) > 1 else min(last, limit)

    def _run(self, group: CacheGroup, block_hashes: Sequence[bytes], whole: int, last: int) -> _Run:
        """What is there of a group whose blocks are whole up to there: of the next one, something that
        reaches as far as possible, though not beyond `last`.
        """
        inside = min(whole + group.block_tokens - group.hash_tokens, last)
        if inside <= whole or not self._is_fine:
            return _Run(whole, whole)
        names = block_hashes[whole // group.hash_tokens : inside // group.hash_tokens]
        found = self._present(group, names)
        for place in range(len(names) - 1, -1, -1):
            if found[place]:
                return _Run(whole, whole + (place + 1) * group.hash_tokens, names[place])
        return _Run(whole, whole)

    def _tails(
        self, block_hashes: Sequence[bytes], end: int, runs: Mapping[int, _Run]
    ) -> Mapping[int, bytes]:
        """What a hit up to there takes of the blocks that it ends inside of."""
        if not self._is_fine:
            return {}
        tails = {}
        for group in self._shape.groups:
            row, inside = divmod(end, group.block_tokens)
            if not inside:
                continue
            run = runs.get(group.group_id)
            if run is None:
                tails[group.group_id] = block_hashes[end // group.hash_tokens - 1]
            elif (row + 1) * group.block_tokens <= run.whole:
                tails[group.group_id] = group.names(block_hashes)[row]
            else:
                tails[group.group_id] = run.tail
        return tails

    def _lacking(self, group: CacheGroup, first: int, is_there: Sequence[bool], end: int) -> int | None:
        """Where the last block begins that is lacking for a hit up to `end`, or the run of lacking blocks
        that it ends; None if none is.
        """
        if group.kind is GroupKind.STATE:
            needed = range(end // group.block_tokens - 1, end // group.block_tokens)
        else:
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

    def _hold_all(self, owner: str, block_hashes: Sequence[bytes], start: int, hit: Hit) -> int:
        """`hit.end` where all that it needs is held; else where a hit can end at most."""
        for group in self._shape.groups:
            needed = self._rules.needed(group.group_id, hit.end)
            first = max(needed.start, start // group.block_tokens)
            names = whole = group.names(block_hashes)[first : hit.end // group.block_tokens]
            if (tail := hit.tails.get(group.group_id)) is not None:
                names = [*names, tail]
            held = self._pool.hold(owner, group.group_id, names) if names else 0
            if held < len(whole) and group.kind is FULL:
                return (first + held) * group.block_tokens
            if held < len(names):
                return hit.end - 1
        return hit.end


def _is_written(pool: PoolView, group: CacheGroup, block_hashes: Sequence[bytes], block: int) -> bool:
    names = group.names(block_hashes)
    return block < len(names) and pool.is_written(group.group_id, names[block])
