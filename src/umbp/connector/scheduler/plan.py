"""What the workers shall move in one step: loads that were admitted, stores of blocks that the step
completes.

Scheduler thread only. What is stored of a request is always a contiguous prefix, so that all of it can be
found again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from umbp.connector import compat
from umbp.connector.scheduler.pool_view import GROUP, PoolView
from umbp.connector.scheduler.state import RequestState
from umbp.data import BlockLoadBatch, BlockStoreBatch
from umbp.options import Options

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """Consecutive blocks of one request: engine block ids, and hashes beginning with the first block's
    parent.
    """

    block_ids: tuple[int, ...]
    block_hashes: tuple[bytes, ...]
    parent_hash: bytes | None


class Planner:
    """Turns spans of blocks into batches, and decides which blocks a step's stores take."""

    def __init__(self, pool: PoolView, options: Options, block_tokens: int, writes: bool) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self._writes = writes
        self._with_output = options.save_decode_cache

    def load_batch(self, request_id: str, span: BlockSpan) -> BlockLoadBatch:
        """The load of one span, in keys of rank 0."""
        groups = (GROUP,) * len(span.block_ids)
        return BlockLoadBatch(
            self._pool.codec.keys(span.block_hashes, GROUP), span.block_ids, groups, request_id
        )

    def store_batch(self, request_id: str, span: BlockSpan) -> BlockStoreBatch:
        """The store of one span, in keys of rank 0; each block's parent is the block before it."""
        count = len(span.block_ids)
        return BlockStoreBatch(
            keys=self._pool.codec.keys(span.block_hashes, GROUP),
            block_ids=span.block_ids,
            group_ids=(GROUP,) * count,
            block_hashes=span.block_hashes,
            parent_block_hashes=(span.parent_hash, *span.block_hashes[:-1]),
            token_ids=((),) * count,
            block_sizes=(self._block_tokens,) * count,
            request_id=request_id,
        )

    def storable(
        self, state: RequestState, computed_tokens: int, output: SchedulerOutput
    ) -> BlockSpan | None:
        """Blocks that are full once this step has run and that some rank lacks; moves the request's mark past
        them.

            0 ....... saved ....... present ....... full ....... table's end
                                    | stored now   |
        """
        if not self._writes or state.is_stale or not self._pool.is_open:
            return None
        request = state.request
        hashes = request.block_hashes
        saved, full = self._unsaved(state, computed_tokens)
        if full <= saved:
            return None
        table = compat.block_table(output, request.request_id)
        if table is None:
            return None
        full = min(full, len(table))
        state.tracker.mark_saved(full * self._block_tokens, self._block_tokens)
        first = saved + self._pool.present(hashes[saved:full])
        if first >= full:
            return None
        parent = hashes[first - 1] if first else None
        return BlockSpan(tuple(table[first:full]), tuple(hashes[first:full]), parent)

    def skip(self, state: RequestState, computed_tokens: int) -> int:
        """Move the request's mark past the blocks that are full once this step has run; returns their
        tokens.
        """
        saved, full = self._unsaved(state, computed_tokens)
        state.tracker.mark_saved(full * self._block_tokens, self._block_tokens)
        return (full - saved) * self._block_tokens

    def _unsaved(self, state: RequestState, computed_tokens: int) -> tuple[int, int]:
        """The span `[saved, full)` of blocks beyond the request's mark that are full once this step has
        run.
        """
        request = state.request
        tokens = computed_tokens if self._with_output else min(computed_tokens, request.num_prompt_tokens)
        full = min(tokens // self._block_tokens, len(request.block_hashes))
        return min(state.tracker.saved_tokens // self._block_tokens, full), full
