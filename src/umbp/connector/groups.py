"""What a model's KV cache consists of, as the engine divides it: groups of layers, each with blocks of its
own.

Values only. A block's name in a group is the prefix hash at its end, so blocks of several hashes are named by
the last of them.

    hashes   |  0 |  1 |  2 |  3 |  4 |  5 |
    group 0  |  0 |  1 |  2 |  3 |  4 |  5 |     one hash a block
    group 1  |    1    |    3    |    5    |     two hashes a block

Where the engine's hits may end inside a block, one that is filled so far only is kept as well, named by the
hash at that place; what it holds behind it means nothing. In group 1 a prompt that ends with hash 4 leaves

    group 1  |    1    |    3    |  4 |
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from enum import StrEnum


class GroupKind(StrEnum):
    """Which blocks of a prefix a group needs to go on from its end."""

    FULL = "full attention"
    """All."""
    WINDOW = "sliding window"
    """Those that the window reaches back into."""
    CHUNK = "chunked local attention"
    """Those of the chunk that the end lies in."""
    STATE = "state"
    """The last alone: it holds what came of all before."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """One group: its number in the engine, its kind, tokens of a block, and prefix hashes of a block."""

    group_id: int
    kind: GroupKind
    block_tokens: int
    hashes_per_block: int = 1
    drops_last_block: bool = False
    """Speculation computes the last block of every hit anew: a hit is a block shorter than what is there."""

    @property
    def hash_tokens(self) -> int:
        """Tokens of a prefix hash."""
        return self.block_tokens // self.hashes_per_block

    def names(self, block_hashes: Sequence[bytes]) -> Sequence[bytes]:
        """The names of the whole blocks of a prefix, of which these are all hashes."""
        if self.hashes_per_block == 1:
            return block_hashes
        return list(block_hashes)[self.hashes_per_block - 1 :: self.hashes_per_block]

    def tail_tokens(self, prompt_tokens: int) -> int | None:
        """Where a prompt's last hash ends, as far as a hit of the same prompt can use it, if that is inside a
        block.
        """
        usable = prompt_tokens if self.drops_last_block else prompt_tokens - 1
        end = usable // self.hash_tokens * self.hash_tokens
        return end if end % self.block_tokens else None


@dataclass(frozen=True, slots=True)
class CacheShape:
    """All groups that are kept, and what the engine makes of a hit in them."""

    groups: tuple[CacheGroup, ...]
    hash_tokens: int
    """Tokens of a prefix hash."""
    hit_tokens: int
    """A hit's length is a multiple of this."""
    unsettled_tokens: int = 0
    """So many of the last computed tokens may be computed anew by speculation, and are not stored yet."""

    @property
    def is_chain(self) -> bool:
        """Whether a hit is a run of blocks from the first on, and nothing else: then any part of a load that
        has worked is of use.
        """
        return len(self.groups) == 1 and self.groups[0].kind is GroupKind.FULL

    @property
    def is_fine(self) -> bool:
        """Whether hits may end inside a block."""
        return any(group.block_tokens > self.hit_tokens for group in self.groups)

    @property
    def counted(self) -> CacheGroup:
        """The group by whose blocks tokens are counted: one that needs them all, where there is one."""
        return self.counted_among({group.group_id for group in self.groups})

    def counted_among(self, group_ids: Container[int]) -> CacheGroup:
        """The same where only these groups have layers, as on a pipeline stage."""
        groups = [group for group in self.groups if group.group_id in group_ids]
        return next((group for group in groups if group.kind is GroupKind.FULL), groups[0])

    @property
    def least_block_tokens(self) -> int:
        """The fewest tokens that make a block in some group."""
        return min(group.block_tokens for group in self.groups)
