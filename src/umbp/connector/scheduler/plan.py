"""What the workers shall move in one step: loads that were admitted, stores of blocks that the step
completes.

Scheduler thread only. What a step completes of a request is, group by group, a contiguous prefix but for
blocks that no hit can ever need.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from umbp.connector import compat
from umbp.connector.groups import CacheGroup, CacheShape, GroupKind
from umbp.connector.hits import HitRules
from umbp.connector.scheduler.account import StoredObject
from umbp.connector.scheduler.pool_view import PoolView
from umbp.connector.scheduler.state import Promise, RequestState
from umbp.data import BlockLoadBatch, BlockStoreBatch
from umbp.options import Options

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

NO_BLOCK = 0
"""The block id that stands in a table where a request has no block, as none is needed there."""


NOT_STORED = bytes(32)
"""The name of no block."""


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """Blocks of one request and one cache group, in order: engine block ids, names, and the names of the
    blocks before each.
    """

    group_id: int
    block_ids: Sequence[int]
    block_hashes: Sequence[bytes]
    parent_hashes: Sequence[bytes | None]
    filled_tokens: int | None = None
    """Of a block that is filled so far only; others are whole."""

    def __len__(self) -> int:
        return len(self.block_ids)

    def rows(self, chosen: Sequence[int]) -> BlockSpan:
        """These rows of it alone."""
        return BlockSpan(
            self.group_id,
            [self.block_ids[row] for row in chosen],
            [self.block_hashes[row] for row in chosen],
            [self.parent_hashes[row] for row in chosen],
            self.filled_tokens,
        )

    def rest(self, first: int) -> BlockSpan:
        """It from that row on."""
        return BlockSpan(
            self.group_id,
            self.block_ids[first:],
            self.block_hashes[first:],
            self.parent_hashes[first:],
            self.filled_tokens,
        )


class Planner:
    """Turns spans of blocks into batches, and decides which blocks a step's stores take."""

    def __init__(
        self, pool: PoolView, options: Options, shape: CacheShape, hits: HitRules, *, writes: bool
    ) -> None:
        self._pool = pool
        self._shape = shape
        self._is_fine = shape.is_fine
        self._hits = hits
        self._writes = writes
        self._with_output = options.save_decode_cache

    def load_spans(
        self,
        block_hashes: Sequence[bytes],
        tables: Sequence[Sequence[int]],
        promise: Promise,
        start: int,
        end: int,
    ) -> list[BlockSpan]:
        """Where the engine wants tokens `[start, end)` of what a request was promised: its blocks there, of
        every group.

        What it has no block for, it doesn't need.
        """
        is_cut = end < promise.end
        spans = []
        for group in self._shape.groups:
            table = tables[group.group_id]
            names = group.names(block_hashes)
            if (tail := promise.tails.get(group.group_id)) is not None:
                names = [*names[: promise.end // group.block_tokens], tail]
            first = start // group.block_tokens
            last = min(-(-end // group.block_tokens), len(names), len(table))
            rows = [row for row in range(first, last) if table[row] != NO_BLOCK]
            if not rows:
                continue
            span = _span(group, table, names, rows)
            if group.kind is GroupKind.STATE and is_cut and end % group.block_tokens:
                # The engine has cut the hit short of a block's end, and no state is stored for that.
                span = BlockSpan(group.group_id, span.block_ids, [NOT_STORED] * len(rows), span.parent_hashes)
            spans.append(span)
        return spans

    def load_batch(self, request_id: str, spans: Sequence[BlockSpan]) -> BlockLoadBatch:
        """The load of these spans, in keys of rank 0."""
        return BlockLoadBatch(
            [key for span in spans for key in self._pool.codec.keys(span.block_hashes, span.group_id)],
            [block_id for span in spans for block_id in span.block_ids],
            [span.group_id for span in spans for _ in span.block_ids],
            request_id,
        )

    def store_batch(self, request_id: str, spans: Sequence[BlockSpan]) -> BlockStoreBatch:
        """The store of these spans, in keys of rank 0; each block's ancestors stand before it."""
        whole = {group.group_id: group.block_tokens for group in self._shape.groups}
        return BlockStoreBatch(
            keys=[key for span in spans for key in self._pool.codec.keys(span.block_hashes, span.group_id)],
            block_ids=[block_id for span in spans for block_id in span.block_ids],
            group_ids=[span.group_id for span in spans for _ in span.block_ids],
            block_hashes=[block_hash for span in spans for block_hash in span.block_hashes],
            parent_block_hashes=[parent for span in spans for parent in span.parent_hashes],
            token_ids=((),) * sum(map(len, spans)),
            block_sizes=[
                span.filled_tokens or whole[span.group_id] for span in spans for _ in span.block_ids
            ],
            request_id=request_id,
        )

    def is_done(self, state: RequestState, computed_tokens: int) -> bool:
        """Whether nothing that this request may still compute is to be stored; cheap, asked in every step."""
        if self._with_output:
            return False
        if self._is_fine:
            # The state before the prompt's last tokens comes with the step that computes these.
            return computed_tokens - self._shape.unsettled_tokens >= state.request.num_prompt_tokens
        return state.request.num_prompt_tokens - state.tracker.saved_tokens < self._shape.least_block_tokens

    def completed(
        self, state: RequestState, computed_tokens: int, output: SchedulerOutput
    ) -> list[BlockSpan]:
        """Blocks beyond the request's mark that are whole once this step has run, and the one that its prompt
        ends inside of; moves the mark past them.

        Those of the engine's own prefix hit are among them at the request's first step.
        """
        if not self._writes or state.is_stale or not self._pool.is_open:
            return []
        request_id = state.request.request_id
        spans = self._offered(state, compat.offered_states(output, request_id))
        saved, tokens = self._unsaved(state, computed_tokens)
        if not self._completes_any(state, saved, tokens):
            return spans
        tables = compat.block_tables(output, request_id)
        if tables is None:
            return spans
        tokens = min(tokens, *(len(tables[g.group_id]) * g.block_tokens for g in self._shape.groups))
        self._mark(state, tokens)
        for group in self._shape.groups:
            if group.kind is GroupKind.STATE:
                continue
            first, last = saved // group.block_tokens, tokens // group.block_tokens
            span = self._full_blocks(group, tables[group.group_id], state.request.block_hashes, first, last)
            if span is not None:
                spans.append(span)
            if self._is_fine:
                spans += self._tail(group, tables[group.group_id], state.request, saved, tokens)
        return spans

    def _completes_any(self, state: RequestState, saved: int, tokens: int) -> bool:
        """Whether tokens `[saved, tokens)` fill a block, or one as far as the prompt does."""
        for group in self._shape.groups:
            if tokens // group.block_tokens > saved // group.block_tokens:
                return True
            tail = group.tail_tokens(state.request.num_prompt_tokens) if self._is_fine else None
            if tail is not None and saved < tail <= tokens:
                return True
        return False

    def _tail(
        self, group: CacheGroup, table: Sequence[int], request: Request, saved: int, tokens: int
    ) -> list[BlockSpan]:
        """The block that a prompt ends inside of, if tokens `[saved, tokens)` fill it that far. The request
        may go on to write behind that while it is copied: nobody reads it there under this name.
        """
        end = group.tail_tokens(request.num_prompt_tokens)
        if end is None or not saved < end <= tokens:
            return []
        return [self._ending_at(group, table[end // group.block_tokens], request.block_hashes, end)]

    def _ending_at(
        self, group: CacheGroup, block_id: int, block_hashes: Sequence[bytes], tokens: int
    ) -> BlockSpan:
        """The block that holds the last of so many tokens, whole or not."""
        row, filled = divmod(tokens - 1, group.block_tokens)
        parent = block_hashes[row * group.hashes_per_block - 1] if row else None
        name = block_hashes[tokens // group.hash_tokens - 1]
        return BlockSpan(group.group_id, [block_id], [name], [parent], filled + 1)

    def _full_blocks(
        self, group: CacheGroup, table: Sequence[int], block_hashes: Sequence[bytes], first: int, last: int
    ) -> BlockSpan | None:
        if first >= last:
            return None
        names = group.names(block_hashes)
        if group.kind is GroupKind.FULL:
            parent = names[first - 1] if first else None
            own = names[first:last]
            return BlockSpan(group.group_id, table[first:last], own, (parent, *own[:-1]))
        mask = self._hits.reachable(group.group_id, first, last)
        rows = [
            row
            for row in range(first, last)
            if table[row] != NO_BLOCK and (mask is None or mask[row - first])
        ]
        return _span(group, table, names, rows) if rows else None

    def _offered(self, state: RequestState, offers: Sequence[tuple[int, int, int]]) -> list[BlockSpan]:
        """States, at places where hits may end, that the engine hands over."""
        spans = []
        for group_id, block_id, tokens in offers:
            group = self._shape.groups[group_id]
            is_output = tokens > state.request.num_prompt_tokens
            if tokens % min(group.block_tokens, self._shape.hit_tokens) or (
                is_output and not self._with_output
            ):
                continue
            hashes = state.request.block_hashes
            if tokens <= len(hashes) * self._shape.hash_tokens:
                spans.append(self._ending_at(group, block_id, hashes, tokens))
                state.state_ends.setdefault(group_id, set()).add(tokens)
        return spans

    def left_behind(self, state: RequestState, offers: Sequence[tuple[int, int, int]]) -> Sequence[BlockSpan]:
        """States that a request leaves in its own blocks as it ends; offers are as in `offered_states`."""
        if not self._writes or state.is_stale or state.has_lost_store or not self._pool.is_open:
            return ()
        return self._offered(state, offers)

    def lacking(self, spans: Sequence[BlockSpan], *, has_gaps: bool = False) -> list[BlockSpan]:
        """What of these spans some rank lacks.

        Where a hit is a run of blocks, what follows the first that is lacking is of use only with it, and is
        mostly lacking too, but where a store has left gaps (`has_gaps`):

        0 ....... saved ....... present ....... full
                  | span                       |
                                | lacking      |
        """
        lacking = []
        for span in spans:
            if self._shape.groups[span.group_id].kind is GroupKind.FULL and not has_gaps:
                rest = span.rest(self._pool.present(span.group_id, span.block_hashes))
            else:
                found = self._pool.stored(span.group_id, span.block_hashes)
                rest = span.rows([row for row, is_there in enumerate(found) if not is_there])
            if len(rest):
                lacking.append(rest)
        return lacking

    def set_back(self, state: RequestState, lost: Collection[StoredObject]) -> None:
        """Set the request's mark back to where the first of these blocks begins, so that all from there on
        are looked at again. Those that the request has no more are left alone.
        """
        hashes = state.request.block_hashes
        ends: dict[bytes, int] = {
            name: (place + 1) * self._shape.hash_tokens for place, name in enumerate(hashes)
        }
        sizes = {group.group_id: group.block_tokens for group in self._shape.groups}
        starts = [
            (ends[name] - 1) // sizes[group_id] * sizes[group_id] for group_id, name in lost if name in ends
        ]
        mark = min([state.tracker.saved_tokens, *starts])
        state.tracker.saved_tokens = mark
        self._name_mark(state, mark)

    def _unsaved(self, state: RequestState, computed_tokens: int) -> tuple[int, int]:
        """The tokens `[saved, settled)` beyond the request's mark that are settled once this step has run.

        Drafts are not among them: only tokens that the request keeps are hashed.
        """
        request = state.request
        tokens = max(computed_tokens - self._shape.unsettled_tokens, 0)
        if not self._with_output:
            tokens = min(tokens, request.num_prompt_tokens)
        hashes = request.block_hashes
        tokens = min(tokens, len(hashes) * self._shape.hash_tokens)
        saved = state.tracker.saved_tokens
        if saved and (saved > tokens or hashes[saved // self._shape.hash_tokens - 1] != state.mark_hash):
            saved = self._take_back(state)
        return min(saved, tokens), tokens

    def _mark(self, state: RequestState, tokens: int) -> None:
        mark = state.tracker.mark_saved(tokens, self._shape.hash_tokens)
        self._name_mark(state, mark)

    def _name_mark(self, state: RequestState, mark: int) -> None:
        state.mark_hash = state.request.block_hashes[mark // self._shape.hash_tokens - 1] if mark else None

    def _take_back(self, state: RequestState) -> int:
        """Set the mark back to the start where the tokens before it have been replaced, as by more input to a
        session that drops what was generated. What is stored already is found there.
        """
        hashes, place = state.request.block_hashes, state.tracker.saved_tokens // self._shape.hash_tokens
        if place <= len(hashes) and hashes[place - 1] == state.mark_hash:
            return state.tracker.saved_tokens
        state.tracker.reset()
        state.state_ends.clear()
        state.mark_hash = None
        return 0


def _span(group: CacheGroup, table: Sequence[int], names: Sequence[bytes], rows: Sequence[int]) -> BlockSpan:
    return BlockSpan(
        group.group_id,
        [table[row] for row in rows],
        [names[row] for row in rows],
        [names[row - 1] if row else None for row in rows],
    )
