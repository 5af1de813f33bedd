"""Blocks that were promised to requests and aren't in the pools yet. Scheduler thread only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from umbp.errors import InvariantError


class ToFetch:
    """By request, and all together: a block that several requests wait for is fetched once."""

    def __init__(self) -> None:
        self._by_request: dict[str, list[tuple[int, Sequence[bytes]]]] = {}
        self._by_group: dict[int, Counter[bytes]] = {}
        """How many promises there are of each block."""

    def add(self, request_id: str, group_id: int, block_hashes: Sequence[bytes]) -> None:
        """What one request has adds up."""
        self._by_request.setdefault(request_id, []).append((group_id, block_hashes))
        self._by_group.setdefault(group_id, Counter()).update(block_hashes)

    def forget(self, request_id: str) -> None:
        """It has been fetched, or isn't wanted any more; a request without any is fine."""
        for group_id, block_hashes in self._by_request.pop(request_id, ()):
            promises = self._by_group[group_id]
            for each in block_hashes:
                promises[each] -= 1
                if not promises[each]:
                    del promises[each]

    def of(self, request_id: str) -> Mapping[int, int]:
        """How many blocks of each cache group the request waits for."""
        blocks: Counter[int] = Counter()
        for group_id, block_hashes in self._by_request.get(request_id, ()):
            blocks[group_id] += len(block_hashes)
        return blocks

    def new(self, group_id: int, block_hashes: Sequence[bytes]) -> list[int]:
        """The rows of those that nobody waits for yet."""
        promises = self._by_group.get(group_id, Counter())
        return [row for row, each in enumerate(block_hashes) if each not in promises]

    def all(self) -> Mapping[int, int]:
        """How many different blocks of each cache group are waited for."""
        return {group_id: len(promises) for group_id, promises in self._by_group.items()}

    def audit(self) -> None:
        counted: dict[int, Counter[bytes]] = {group_id: Counter() for group_id in self._by_group}
        for told in self._by_request.values():
            for group_id, block_hashes in told:
                counted[group_id].update(block_hashes)
        if counted != self._by_group:
            raise InvariantError("promises of blocks that are to be fetched do not add up")
