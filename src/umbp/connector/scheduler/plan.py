"""What the workers shall move in one step: loads that were admitted, stores of blocks that the step
completes.

Scheduler thread only. What a step completes of a request is always a contiguous prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from umbp.connector import compat
from umbp.connector.scheduler.pool_view import PoolView
from umbp.connector.scheduler.state import RequestState
from umbp.data import BlockLoadBatch, BlockStoreBatch
from umbp.options import Options

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


GROUP = 0
"""The one cache group that this version keeps."""


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
        parents = (span.parent_hash, *span.block_hashes[:-1])
        return self.loose_batch(request_id, span.block_ids, span.block_hashes, parents)

    def loose_batch(
        self,
        request_id: str,
        block_ids: Sequence[int],
        block_hashes: Sequence[bytes],
        parents: Sequence[bytes | None],
    ) -> BlockStoreBatch:
        """The same of blocks that need not be one prefix; each block's ancestors stand before it."""
        count = len(block_ids)
        return BlockStoreBatch(
            keys=self._pool.codec.keys(block_hashes, GROUP),
            block_ids=block_ids,
            group_ids=(GROUP,) * count,
            block_hashes=block_hashes,
            parent_block_hashes=parents,
            token_ids=((),) * count,
            block_sizes=(self._block_tokens,) * count,
            request_id=request_id,
        )

    def is_done(self, state: RequestState) -> bool:
        """Whether nothing that this request may still compute is to be stored; cheap, asked in every step."""
        if self._with_output:
            return False
        return state.request.num_prompt_tokens - state.tracker.saved_tokens < self._block_tokens

    def completed(
        self, state: RequestState, computed_tokens: int, output: SchedulerOutput
    ) -> BlockSpan | None:
        """Blocks beyond the request's mark that are full once this step has run; moves the mark past them.

        Those of the engine's own prefix hit are among them at the request's first step.
        """
        if not self._writes or state.is_stale or not self._pool.is_open:
            return None
        hashes = state.request.block_hashes
        saved, full = self._unsaved(state, computed_tokens)
        if full <= saved:
            return None
        table = compat.block_table(output, state.request.request_id)
        if table is None:
            return None
        full = min(full, len(table))
        state.tracker.mark_saved(full * self._block_tokens, self._block_tokens)
        parent = hashes[saved - 1] if saved else None
        return BlockSpan(tuple(table[saved:full]), tuple(hashes[saved:full]), parent)

    def lacking(self, span: BlockSpan) -> BlockSpan | None:
        """The rest of a span from its first block on that some rank lacks.

        0 ....... saved ....... present ....... full
                  | span                       |
                                | lacking      |
        """
        present = self._pool.present(GROUP, span.block_hashes)
        if present >= len(span.block_ids):
            return None
        parent = span.block_hashes[present - 1] if present else span.parent_hash
        return BlockSpan(span.block_ids[present:], span.block_hashes[present:], parent)

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
