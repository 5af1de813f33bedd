"""Who owns a block of KV memory, and what must not happen to one that nobody owns."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from vllm.v1.core.sched.scheduler import Scheduler

from umbp.testing.engine.memory import Memory

NOBODY: frozenset[str] = frozenset()


@dataclass(slots=True)
class Spoils:
    """The blocks to spoil before the step of one plan runs."""

    plan: int
    handed_out: list[int] = field(default_factory=list)
    nobodys: list[int] = field(default_factory=list)


class Owners:
    """Finds the blocks that change hands in a step, and spoils them before it runs: what isn't written or
    restored then is wrong.

    A block that is neither a request's, nor anybody's who holds it, nor in the engine's prefix cache is
    spoiled too, and nobody may write it until it has an owner again.
    """

    def __init__(self, scheduler: Scheduler, memories: Sequence[Memory]) -> None:
        self._manager = scheduler.kv_cache_manager
        self._blocks = self._manager.block_pool.blocks
        self._memories = memories
        self._before: dict[int, set[str]] = {}
        self._hashes: list[object] = []
        self._clean: set[int] = set()
        """Blocks that nobody owns and that have been spoiled."""
        self._plans = 0
        self._last_owned: dict[int, int] = {}
        """The last plan in which each block had an owner."""

    def before_schedule(self) -> None:
        self._before = self._requests()
        self._hashes = [block.block_hash for block in self._blocks]

    def forget_uncomputed(self, copied: Collection[int]) -> None:
        """Mend a fault of vLLM's: by priority it may take back what it has given out in the same step, and
        then blocks are in its prefix cache that nobody will have computed, nor have been `copied`.
        """
        for block, before in zip(self._blocks, self._hashes, strict=True):
            if block.block_hash is not None and block.block_hash != before and block.ref_cnt == 0:
                if block.block_id in copied:
                    continue
                self._manager.block_pool._maybe_evict_cached_block(block)

    def after_schedule(self) -> Spoils:
        """The blocks to spoil before this step runs."""
        self._plans += 1
        now = self._requests()
        self._last_owned.update(dict.fromkeys(now, self._plans))
        spoils = Spoils(self._plans)
        for block in self._blocks:
            block_id = block.block_id
            owners = now.get(block_id)
            if owners is None:
                if block.ref_cnt or block.is_null or block.block_hash:
                    self._clean.discard(block_id)
                elif block_id not in self._clean:
                    spoils.nobodys.append(block_id)
                continue
            is_handed_on = block.block_hash is not None and block.block_hash == self._hashes[block_id]
            if not is_handed_on and not owners & self._before.get(block_id, NOBODY):
                spoils.handed_out.append(block_id)
        return spoils

    def spoil(self, spoils: Spoils) -> list[int]:
        """Spoil them; returns which have been written since they were spoiled as nobody's."""
        blocks = spoils.handed_out + spoils.nobodys
        if not blocks:
            return []
        touched = self._touched([block for block in blocks if block in self._clean])
        for memory in self._memories:
            memory.spoil(blocks)
        self._clean.difference_update(blocks)
        # What a later step, planned already, has handed out will be written.
        self._clean.update(block for block in spoils.nobodys if self._last_owned.get(block, 0) < spoils.plan)
        return touched

    def check(self) -> None:
        """Nobody has written what nobody owns."""
        touched = self._touched(sorted(self._clean))
        assert not touched, f"nobody's blocks {touched} have been written"

    def _touched(self, blocks: Sequence[int]) -> list[int]:
        if not blocks:
            return []
        return sorted({block for memory in self._memories for block in memory.touched(blocks)})

    def _requests(self) -> dict[int, set[str]]:
        """The requests that have each block in a table."""
        found: dict[int, set[str]] = {}
        for manager in self._manager.coordinator.single_type_managers:
            for request_id, blocks in manager.req_to_blocks.items():
                for block in blocks:
                    if not block.is_null:
                        found.setdefault(block.block_id, set()).add(request_id)
        return found
