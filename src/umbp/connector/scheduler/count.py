"""What the scheduler's half counts: what was asked, found, restored and stored, in tokens once an engine, and
in the bytes that those stand for on all ranks.

Scheduler thread only. Bytes that really move are counted where they move, by each worker.
"""

from __future__ import annotations

from collections.abc import Sequence

from umbp.connector.groups import CacheShape
from umbp.connector.hits import HitRules
from umbp.connector.scheduler.account import LoadEntry, StoreEntry
from umbp.connector.scheduler.plan import BlockSpan
from umbp.connector.scheduler.pool_view import PoolView
from umbp.connector.scheduler.state import RequestState
from umbp.connector.stats import UMBPStats
from umbp.data import LossReason, StoreEventResult


class Counts:
    """Collects amounts between two calls of `take`; each fact is told to it once."""

    def __init__(self, pool: PoolView, shape: CacheShape, hits: HitRules) -> None:
        self._pool = pool
        self._shape = shape
        self._hits = hits
        self._stats = UMBPStats()

    def take(self) -> UMBPStats | None:
        """What was counted since the last call, or None."""
        for counts in self._pool.take_counts():
            self._stats.add_all(counts)
        return self._stats.take()

    # Loads

    def admission(self, state: RequestState, hit_tokens: int) -> None:
        """A request is admitted for the first time, with so many tokens of what it was promised.

        0 ......... local ......... hit ......... limit
        | the engine's own | asked for                |
                           | hit, or passed over |
        """
        answer = state.answer
        if answer is None:
            return
        start = answer.local_tokens
        asked_tokens = max(answer.limit_tokens - start, 0)
        tier = self._pool.tier
        self._stats.add("asked_tokens", asked_tokens)
        self._stats.add("asked_bytes", self._hit_bytes(start, asked_tokens))
        far_tokens = 0 if state.promise is None else min(state.promise.far_tokens, hit_tokens)
        hit_bytes = self._hit_bytes(start, hit_tokens)
        far_bytes = hit_bytes * far_tokens // hit_tokens if far_tokens else 0
        self._stats.add("hit_tokens", hit_tokens - far_tokens, tier)
        self._stats.add("hit_bytes", hit_bytes - far_bytes, tier)
        self._stats.add("hit_tokens", far_tokens, self._pool.far_tier)
        self._stats.add("hit_bytes", far_bytes, self._pool.far_tier)
        self._stats.add("passed_hit_tokens", state.passed_tokens, tier)
        self._stats.add("passed_hit_bytes", self._hit_bytes(start, state.passed_tokens), tier)

    def _hit_bytes(self, start: int, tokens: int) -> int:
        """All objects that the ranks load for a hit of so many tokens beyond the first `start`: in some
        groups these are only the last blocks of it.
        """
        if not tokens:
            return 0
        end = start + tokens
        size = 0
        for group in self._shape.groups:
            needed = self._hits.needed(group.group_id, end)
            blocks = needed.stop - max(needed.start, start // group.block_tokens)
            size += max(blocks, 0) * self._pool.block_bytes(group.group_id)
        return size

    def request_with_a_failed_load(self) -> None:
        """One more request has a block that could not be restored."""
        self._stats.add("failed_load_requests", 1)

    def request_that_waits(self) -> None:
        """One more request waits for what another engine stores."""
        self._stats.add("awaited_requests", 1)

    def request_that_waited_in_vain(self) -> None:
        """One of those goes on without some of it."""
        self._stats.add("awaited_in_vain_requests", 1)

    def load_ended(self, entry: LoadEntry, result: StoreEventResult, reason: LossReason) -> int:
        """Every rank has reported; returns how many of the promised tokens the engine must compute."""
        failed_tokens = self._failed_tokens(entry, len(result.failed_objects))
        tier = self._pool.tier
        # What the pool has itself fails last of all.
        failed_far = min(failed_tokens, entry.far_tokens)
        loaded = "reloaded_tokens" if entry.is_again else "loaded_tokens"
        for where, tokens, failed in (
            (tier, entry.tokens - entry.far_tokens, failed_tokens - failed_far),
            (self._pool.far_tier, entry.far_tokens, failed_far),
        ):
            self._stats.add("failed_load_tokens", failed, where, reason)
            self._stats.add(loaded, tokens - failed, where)
        return failed_tokens

    def _failed_tokens(self, entry: LoadEntry, failed_blocks: int) -> int:
        """Where a hit isn't a run of blocks, the engine drops all of a load that has lost one."""
        if self._shape.is_chain:
            return min(failed_blocks * self._shape.counted.block_tokens, entry.tokens)
        return entry.tokens if failed_blocks else 0

    # Stores

    def store_ended(self, entry: StoreEntry, result: StoreEventResult, reason: LossReason) -> None:
        """Every rank has reported."""
        counted = self._shape.counted.group_id
        tokens = entry.tokens_of(counted)
        dropped = entry.tokens_of(counted, result.failed_objects) if result.failed_objects else 0
        tier = self._pool.tier
        self._stats.add("dropped_store_tokens", dropped, tier, reason)
        self._stats.add("stored_tokens", tokens - dropped, tier)

    def left_out(self, spans: Sequence[BlockSpan]) -> None:
        """These blocks are not stored, as one before them was lost: no worker hears of them."""
        counted = self._shape.counted
        tokens = sum(
            len(span) * (span.filled_tokens or counted.block_tokens)
            for span in spans
            if span.group_id == counted.group_id
        )
        size = sum(len(span) * self._pool.block_bytes(span.group_id) for span in spans)
        tier = self._pool.tier
        self._stats.add("dropped_store_tokens", tokens, tier, LossReason.BEHIND)
        self._stats.add("dropped_store_bytes", size, tier, LossReason.BEHIND)
