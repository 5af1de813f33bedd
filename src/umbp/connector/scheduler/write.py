"""When blocks are stored: `write_policy: through` as soon as they have been computed.

(`lazy.py` has the other answer.) Scheduler thread only. Source blocks are pinned in the engine's pool from
the plan until every rank has reported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from umbp.connector import compat
from umbp.connector.scheduler.account import StoreEntry
from umbp.connector.scheduler.plan import BlockSpan, Planner
from umbp.connector.scheduler.state import RequestState
from umbp.connector.stats import UMBPStats
from umbp.data import BlockStoreBatch

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.output import SchedulerOutput

Requests = Mapping[str, RequestState]


@dataclass(frozen=True, slots=True)
class StorePlan:
    """What one step stores, by request, and the account of it."""

    batches: dict[str, BlockStoreBatch]
    entry: StoreEntry


class Writer(Protocol):
    """Decides what a step stores, and pins it."""

    def plan(self, output: SchedulerOutput, unfinished: dict[str, RequestState]) -> StorePlan | None:
        """What the workers shall store after this step's forward; its blocks are pinned. `unfinished` are the
        requests that may still complete blocks; who can't any more is taken out.
        """
        ...

    def give_back(self, entry: StoreEntry, failed: set[bytes], requests: Requests) -> None:
        """Every rank has reported, and `failed` could not be stored on some: take the pins away."""
        ...

    def note_load(self, blocks: int, loaded_blocks: int) -> None:
        """A request that loads was given so many blocks, so many of them to be filled by the load."""
        ...

    def forget(self) -> None:
        """The pool was cleared: nothing that was computed before is stored any more."""
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

    def __init__(self, planner: Planner, block_pool: BlockPool, block_tokens: int, stats: UMBPStats) -> None:
        self._planner = planner
        self._block_pool = block_pool
        self._block_tokens = block_tokens
        self._stats = stats

    def plan(self, output: SchedulerOutput, unfinished: dict[str, RequestState]) -> StorePlan | None:
        spans: dict[str, BlockSpan] = {}
        for request_id, state, computed_tokens in storing_requests(self._planner, output, unfinished):
            if state.has_lost_store:
                self._stats.add("dropped_store_tokens", self._planner.skip(state, computed_tokens))
                continue
            span = self._planner.completed(state, computed_tokens, output)
            if span is not None and (lacking := self._planner.lacking(span)) is not None:
                spans[request_id] = lacking
        if not spans:
            return None
        pinned = [block_id for span in spans.values() for block_id in span.block_ids]
        compat.pin_blocks(self._block_pool, pinned)
        hashes = tuple((request_id, span.block_hashes) for request_id, span in spans.items())
        return StorePlan(
            {request_id: self._planner.store_batch(request_id, span) for request_id, span in spans.items()},
            StoreEntry(tuple(pinned), self._block_tokens, hashes),
        )

    def give_back(self, entry: StoreEntry, failed: set[bytes], requests: Requests) -> None:
        compat.unpin_blocks(self._block_pool, entry.block_ids)
        for request_id, block_hashes in entry.hashes_by_request:
            state = requests.get(request_id)
            if state is not None and not failed.isdisjoint(block_hashes):
                state.has_lost_store = True

    def note_load(self, blocks: int, loaded_blocks: int) -> None:
        """A block that is taken has been stored long ago."""

    def forget(self) -> None:
        """Each request knows by itself whether it is older than a reset."""

    @property
    def delays_allocations(self) -> bool:
        """False: hardly any of what is pinned here would be free otherwise."""
        return False

    def audit(self) -> None:
        """Nothing is kept here."""


def storing_requests(
    planner: Planner, output: SchedulerOutput, unfinished: dict[str, RequestState]
) -> Iterator[tuple[str, RequestState, int]]:
    """The unfinished requests of this step, with their tokens after it. A request that can't complete any
    more blocks worth storing is taken out of `unfinished`: most requests of most steps only generate.

    A step that waits for a request's load computes garbage on every rank if the load fails on one, and only
    that rank knows in time: what it computes is stored once all have reported.
    """
    if not unfinished:
        return
    for request_id, computed_tokens in list(compat.scheduled_requests(output, unfinished)):
        state = unfinished[request_id]
        if state.is_loading:
            continue
        yield request_id, state, computed_tokens
        if planner.is_done(state):
            del unfinished[request_id]
