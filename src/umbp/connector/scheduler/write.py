"""When blocks are stored: `write_policy: through` as soon as they have been computed.

(`lazy.py` has the other answer.) Scheduler thread only. Source blocks are pinned in the engine's pool from
the plan until every rank has reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from umbp.connector import compat
from umbp.connector.scheduler.account import StoredObject, StoreEntry
from umbp.connector.scheduler.count import Counts
from umbp.connector.scheduler.plan import BlockSpan, Planner
from umbp.connector.scheduler.state import RequestState
from umbp.data import LossReason
from umbp.errors import InvariantError

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput

Requests = Mapping[str, RequestState]

PASSING = frozenset({LossReason.BUSY, LossReason.FAILED})
"""Losses that may not come again at once. A full pool is full in the next step too, and what was computed
before a clear isn't stored after it."""

STORE_TRIES = 3
"""How often a request stores what it has lost, at most: each time in vain costs a step's copies."""


class Writer(Protocol):
    """Decides what a step stores, and pins it."""

    def plan(self, output: SchedulerOutput, unfinished: dict[str, RequestState]) -> StoreEntry | None:
        """What the workers shall store after this step's forward; its blocks are pinned. `unfinished` are the
        requests that may still complete blocks; who can't any more is taken out.
        """
        ...

    def give_back(
        self, entry: StoreEntry, failed: set[StoredObject], reason: LossReason, requests: Requests
    ) -> list[str]:
        """Every rank has reported, and `failed` could not be stored on some, for this reason: take the pins
        away. Returns the requests whose lost blocks shall be tried again.
        """
        ...

    def leave(self, request_id: str, spans: Sequence[BlockSpan]) -> None:
        """A request ends, and these blocks of its go with it unless they are pinned now, to be stored by the
        next step.
        """
        ...

    def note_load(self, blocks: int, loaded_blocks: int) -> None:
        """A request that loads was given so many blocks, so many of them to be filled by the load."""
        ...

    def forget(self) -> None:
        """The pool was cleared: nothing that was computed before is stored any more."""
        ...

    @property
    def waits_for_step(self) -> bool:
        """Whether blocks are pinned that no step has been told to store yet."""
        ...

    @property
    def delays_allocations(self) -> bool:
        """Whether blocks that nobody but this writer needs are pinned."""
        ...

    def audit(self) -> None:
        """Raise `InvariantError` on a broken account."""
        ...


class ThroughWriter:
    """Stores each block in the step that completes it.

    What is stored of a request is always a contiguous prefix, so that all of it can be found again.
    """

    def __init__(self, planner: Planner, block_pool: BlockPool, counts: Counts, runs: frozenset[int]) -> None:
        """`runs`: the cache groups in which a block is of use only with all before it."""
        self._planner = planner
        self._block_pool = block_pool
        self._counts = counts
        self._runs = runs
        self._left: dict[str, list[BlockSpan]] = {}
        """What requests that have ended left to be stored, pinned already."""

    def plan(self, output: SchedulerOutput, unfinished: dict[str, RequestState]) -> StoreEntry | None:
        lacking = {request_id: self._planner.lacking(spans) for request_id, spans in self._left.items()}
        for request_id, state, computed_tokens in storing_requests(self._planner, output, unfinished):
            spans = self._planner.completed(state, computed_tokens, output)
            if state.has_lost_store:
                self._counts.left_out(spans)
            elif spans:
                # A request of this name may have ended just before.
                fresh = self._planner.lacking(spans, has_gaps=state.stores_again > 0)
                lacking.setdefault(request_id, []).extend(fresh)
        batches = {one: self._planner.store_batch(one, spans) for one, spans in lacking.items() if spans}
        if not batches:
            self._unpin_left()
            return None
        entry = StoreEntry(batches)
        compat.pin_blocks(self._block_pool, entry.block_ids)
        self._unpin_left()
        return entry

    def leave(self, request_id: str, spans: Sequence[BlockSpan]) -> None:
        for span in spans:
            compat.pin_blocks(self._block_pool, span.block_ids)
        self._left.setdefault(request_id, []).extend(spans)

    def _unpin_left(self) -> None:
        left, self._left = self._left, {}
        for spans in left.values():
            for span in spans:
                compat.unpin_blocks(self._block_pool, span.block_ids)

    def give_back(
        self, entry: StoreEntry, failed: set[StoredObject], reason: LossReason, requests: Requests
    ) -> list[str]:
        compat.unpin_blocks(self._block_pool, entry.block_ids)
        lost = {one for one in failed if one[0] in self._runs}
        again = []
        for request_id, batch in entry.batches.items() if lost else ():
            state = requests.get(request_id)
            mine = lost.intersection(zip(batch.group_ids, batch.block_hashes, strict=True))
            if state is None or state.has_lost_store or not mine:
                continue
            # What follows a lost block can only be found with it, and the request still has it.
            if reason in PASSING and state.stores_again < STORE_TRIES - 1:
                state.stores_again += 1
                self._planner.set_back(state, mine)
                again.append(request_id)
            else:
                state.has_lost_store = True
        return again

    def note_load(self, blocks: int, loaded_blocks: int) -> None:
        """A block that is taken has been stored long ago."""

    def forget(self) -> None:
        """Each request knows by itself whether it is older than a reset."""
        self._unpin_left()

    @property
    def waits_for_step(self) -> bool:
        return bool(self._left)

    @property
    def delays_allocations(self) -> bool:
        """False: hardly any of what is pinned here would be free otherwise."""
        return False

    def audit(self) -> None:
        for request_id, spans in self._left.items():
            for block_id in (block_id for span in spans for block_id in span.block_ids):
                if self._block_pool.blocks[block_id].ref_cnt < 1:
                    raise InvariantError(f"block {block_id} of {request_id} is to be stored and not pinned")


def storing_requests(
    planner: Planner, output: SchedulerOutput, unfinished: dict[str, RequestState]
) -> Iterator[tuple[str, RequestState, int]]:
    """The unfinished requests of this step, with their tokens after it. A request that can't complete any
    more blocks worth storing is taken out of `unfinished`: most requests of most steps only generate.

    A step that waits for a request's load computes garbage on every rank if the load fails on one, and only
    that rank knows in time: what it computes is stored once all have reported, be the load ours or another
    connector's.
    """
    if not unfinished:
        return
    waiting = _within_others_loads(output, unfinished)
    for request_id, computed_tokens in list(compat.scheduled_requests(output, unfinished)):
        state = unfinished[request_id]
        if state.is_loading or request_id in waiting:
            continue
        yield request_id, state, computed_tokens
        if planner.is_done(state, computed_tokens):
            del unfinished[request_id]


def _within_others_loads(output: SchedulerOutput, unfinished: Requests) -> set[str]:
    """Who begins in this step with what another connector fills in it: whose load that is, and whoever takes
    the same blocks from the engine's cache, which has them already.
    """
    begun = compat.begun_within_loads(output)
    if all(
        tokens <= unfinished[request_id].local_tokens or unfinished[request_id].is_loading
        for request_id, tokens in begun.items()
        if request_id in unfinished
    ):
        return set()
    return {request_id for request_id, tokens in begun.items() if tokens}
