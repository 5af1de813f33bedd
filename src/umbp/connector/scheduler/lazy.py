"""`write_policy: lazy`: a block is stored when the engine is about to give it to somebody else.

What the engine still has needs no copy, so a pool beside it holds more, and blocks that are never evicted are
never written. The engine's free blocks wait in the order in which it gives them away:

    given away next -> | cushion: stored, or not to be | looked through | unknown ... | just freed
                       |<- about two steps' worth    ->|

After each step's plan the cushion is filled up: the next blocks behind it are pinned, which takes them out of
that order, stored by the step, and put back in their place when every rank has reported. So what is given
away has been stored before, the engine's own order stays as it is, and a stored block goes before one that is
not. Scheduler thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from umbp.connector import compat
from umbp.connector.scheduler.account import StoredObject, StoreEntry
from umbp.connector.scheduler.plan import BlockSpan, Planner
from umbp.connector.scheduler.pool_view import PoolView
from umbp.connector.scheduler.state import RequestState
from umbp.connector.scheduler.write import Requests, storing_requests
from umbp.data import LossReason
from umbp.errors import InvariantError

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput

GROUP = 0
"""The one cache group of an engine whose blocks can be stored lazily."""

LAZY_REQUEST = ""
"""Stands for the request of a store that no request asked for; the engine's own have a name."""

FADING = 0.99
"""How much of the largest need of late is still expected a step later."""


@dataclass(frozen=True, slots=True)
class Origin:
    """What the connector itself has seen being computed into a block: the name that the engine cached it
    under at that time, and the hash of the block before it.
    """

    name: bytes
    parent_hash: bytes | None


@dataclass(frozen=True, slots=True)
class _Pick:
    block_id: int
    origin: Origin
    behind: tuple[int, bytes | None] | None


class LazyWriter:
    """Keeps a cushion of stored blocks at the head of the engine's free ones."""

    def __init__(
        self,
        planner: Planner,
        pool: PoolView,
        block_pool: BlockPool,
        *,
        block_tokens: int,
        step_blocks: int,
    ) -> None:
        """`step_blocks`: how many blocks a step of computing alone takes at most, or about so many."""
        self._planner = planner
        self._pool = pool
        self._block_pool = block_pool
        self._block_tokens = block_tokens
        self._step_blocks = step_blocks
        self._origins: dict[int, Origin] = {}
        self._settled: set[bytes] = set()
        """Names of waiting blocks that are stored, or were tried: giving them away loses nothing more."""
        self._pinned: dict[int, bytes] = {}
        """Blocks under way, with their names."""
        self._cushion = 0
        """How many of the free blocks, from the first on, may be given away; never too high."""
        self._taken_by_loads = self._filled_by_loads = 0
        self._need = float(step_blocks)
        self._outlast_steps = False
        """Stores have been seen that were under way when the next step was planned."""

    def plan(self, output: SchedulerOutput, unfinished: dict[str, RequestState]) -> StoreEntry | None:
        for _, state, computed_tokens in storing_requests(self._planner, output, unfinished):
            for span in self._planner.completed(state, computed_tokens, output):
                self._remember(span)
        taken, fresh = compat.taken_blocks(output, self._block_tokens)
        taken += self._taken_by_loads
        fresh += self._filled_by_loads
        self._taken_by_loads = self._filled_by_loads = 0
        self._need = max(self._step_blocks, fresh, self._need * FADING)
        self._outlast_steps |= bool(self._pinned)
        # What a preempted request gave back is only known to be somewhere among the free ones.
        is_mixed = any(True for _ in compat.preempted_requests(output))
        self._cushion = 0 if is_mixed else max(self._cushion - taken, 0)
        if not self._pool.is_open or self._cushion >= min(self._wanted, self._free):
            return None
        return self._store_next(max(2 * fresh, self._step_blocks // 4, 1))

    def give_back(
        self, entry: StoreEntry, failed: set[StoredObject], reason: LossReason, requests: Requests
    ) -> list[str]:
        block_ids = entry.block_ids[::-1]
        for block_id in block_ids:
            del self._pinned[block_id]
        self._cushion += compat.unpin_evictable(self._block_pool, block_ids, entry.behind)
        return []

    def leave(self, request_id: str, spans: Sequence[BlockSpan]) -> None:
        """An engine whose blocks can be stored lazily has no states."""

    @property
    def waits_for_step(self) -> bool:
        """False: what is pinned is pinned by a step's plan."""
        return False

    def note_load(self, blocks: int, loaded_blocks: int) -> None:
        self._taken_by_loads += blocks
        self._filled_by_loads += loaded_blocks

    def forget(self) -> None:
        self._origins.clear()
        self._settled.clear()
        self._cushion = 0

    @property
    def delays_allocations(self) -> bool:
        return bool(self._pinned)

    def audit(self) -> None:
        for block_id in self._pinned:
            if self._block_pool.blocks[block_id].ref_cnt < 1:
                raise InvariantError(f"block {block_id} is being stored and is not pinned")
        for block_id in self._origins:
            if not 0 <= block_id < self._block_pool.num_gpu_blocks:
                raise InvariantError(f"the engine has no block {block_id}")

    # Inside

    @property
    def _free(self) -> int:
        return self._block_pool.get_num_free_blocks()

    @property
    def _wanted(self) -> int:
        """The cushion for two steps like the largest of late; at most half of what there is."""
        return min(int(2 * self._need), self._block_pool.num_gpu_blocks // 2)

    def _remember(self, span: BlockSpan) -> None:
        rows = zip(span.block_ids, span.block_hashes, span.parent_hashes, strict=True)
        for block_id, block_hash, parent_hash in rows:
            name = compat.cached_name(self._block_pool, block_id)
            if name is not None and compat.hash_of_name(name) == block_hash:
                self._origins[block_id] = Origin(name, parent_hash)

    def _unsaved(self, block_id: int, name: bytes | None) -> Origin | None:
        """The origin of a free block that should be stored before it goes.

        None where the engine doesn't cache it, where it is settled, and where the connector hasn't seen what
        it holds: generated tokens, what was computed before a reset, and blocks that the engine has cached
        for a request that it then didn't run.
        """
        if name is None or name in self._settled:
            return None
        origin = self._origins.get(block_id)
        return origin if origin is not None and origin.name is name else None

    def _store_next(self, most: int) -> StoreEntry | None:
        """Fill the cushion up to twice what is wanted, with at most so many stores."""
        waiting = compat.next_evicted(self._block_pool, 2 * self._wanted)
        self._settle(waiting)
        limit = min(most, self._room_for_pins())
        picks: list[_Pick] = []
        behind: tuple[int, bytes | None] | None = None
        self._cushion = 0
        for block_id, name in waiting:
            origin = self._unsaved(block_id, name)
            if origin is None:
                self._cushion += 1
            elif len(picks) < limit:
                picks.append(_Pick(block_id, origin, behind))
                self._settled.add(origin.name)
            else:
                break
            behind = block_id, name
        return self._pinned_plan(picks) if picks else None

    def _settle(self, waiting: Sequence[tuple[int, bytes | None]]) -> None:
        """Ask the pool for the blocks that nothing is known of; forget those that don't wait any more."""
        known = self._settled
        self._settled = {name for _, name in waiting if name is not None and name in known}
        self._settled.update(self._pinned.values())
        unknown = [origin.name for one in waiting if (origin := self._unsaved(*one)) is not None]
        if unknown:
            stored = self._pool.stored(GROUP, [compat.hash_of_name(name) for name in unknown])
            self._settled.update(name for name, is_stored in zip(unknown, stored, strict=True) if is_stored)

    def _room_for_pins(self) -> int:
        """How many blocks may be taken out of the free ones in this step.

        Pins that end with their step are in nobody's way. Others leave half of what would be free without
        them; an allocation that fails all the same waits for them and preempts nobody.
        """
        pinned = len(self._pinned)
        if not self._outlast_steps:
            return self._free
        return max(min((self._free + pinned) // 2, self._wanted) - pinned, 0)

    def _pinned_plan(self, picks: Sequence[_Pick]) -> StoreEntry:
        block_ids = tuple(pick.block_id for pick in picks)
        compat.pin_blocks(self._block_pool, block_ids)
        self._pinned.update((pick.block_id, pick.origin.name) for pick in picks)
        # The engine gives away ends before beginnings; the pool wants parents before children.
        chained = picks[::-1]
        span = BlockSpan(
            GROUP,
            [pick.block_id for pick in chained],
            [compat.hash_of_name(pick.origin.name) for pick in chained],
            [pick.origin.parent_hash for pick in chained],
        )
        batch = self._planner.store_batch(LAZY_REQUEST, [span])
        # They go back in the order in which they were taken: `give_back` reverses the batch's.
        return StoreEntry({LAZY_REQUEST: batch}, behind=tuple(pick.behind for pick in picks))
