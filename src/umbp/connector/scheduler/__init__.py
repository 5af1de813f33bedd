"""The scheduler's half of the connector: its questions, each in a module of its own, wired here.

*match*, *find*: how much of a prompt is stored. *copies*: which hits of the engine's own have to wait.
*handover*, *wait*: what another engine stores of it, and waiting for that. *plan*: what a step can load and
store. *write*, *lazy*: when it is stored. *account*: what is in flight. *count*: what came of it. *events*:
telling others of it.
Runs in the engine core's process, on its one thread; nothing here blocks longer than the runtime's lookups
do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from umbp.connector import compat
from umbp.connector.groups import CacheShape, GroupKind
from umbp.connector.hits import HitRules
from umbp.connector.scheduler.account import Ledger, LoadEntry, Quarantine, StoreEntry
from umbp.connector.scheduler.copies import EarlyCopies
from umbp.connector.scheduler.count import Counts
from umbp.connector.scheduler.events import KVEvents
from umbp.connector.scheduler.find import ChainFinder, GroupsFinder
from umbp.connector.scheduler.handover import HandOvers
from umbp.connector.scheduler.lazy import LazyWriter
from umbp.connector.scheduler.match import Matcher
from umbp.connector.scheduler.plan import Planner
from umbp.connector.scheduler.pool_view import PoolView
from umbp.connector.scheduler.state import RequestState
from umbp.connector.scheduler.worth import LoadWorth, StepTimer
from umbp.connector.scheduler.write import ThroughWriter, Writer
from umbp.connector.stats import UMBPStats
from umbp.connector.wire import (
    UMBPConnectorMetadata,
    UMBPConnectorWorkerMetadata,
    UMBPHandshakeMetadata,
)
from umbp.data import BlockLoadBatch, LossReason, Rank, StoreEventResult
from umbp.errors import InvariantError, UMBPError
from umbp.options import Options

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


logger = init_logger("vllm.umbp")

NO_NEWS = UMBPConnectorWorkerMetadata()
"""What a step's results say where the workers had nothing to report."""


class SchedulerSide:
    """What vLLM's scheduler asks of the connector, in the order that it asks."""

    def __init__(
        self,
        pool: PoolView,
        options: Options,
        shape: CacheShape,
        hits: HitRules,
        *,
        step_tokens: int,
        ranks: int,
        reads: bool,
        writes: bool,
        is_lazy: bool = False,
        events: KVEvents | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`step_tokens`: how many tokens the engine computes in a step at most; `is_lazy`: store what it is
        about to evict, where its block pool tells that; `events`: tell of what can be loaded.
        """
        self._shape = shape
        # Only a run of blocks can be loaded within a step: the engine hears of a failure there by its blocks.
        self._load_async = options.load_async or not shape.is_chain
        self._pool = pool
        self._clock = clock
        self._quarantine = Quarantine(clock)
        finder = (
            ChainFinder(pool, self._quarantine, shape)
            if shape.is_chain
            else GroupsFinder(pool, self._quarantine, shape, hits)
        )
        self._worth = LoadWorth(options.min_load_tokens)
        self._timer = StepTimer(self._worth, clock) if options.min_load_tokens is None else None
        self._counts = Counts(pool, shape, hits)
        self._early_copies = EarlyCopies(shape)
        self._hand_overs = HandOvers(
            pool, shape, options.mode, always_tells=writes and not reads, clock=clock
        )
        self._matcher = Matcher(
            pool,
            finder,
            shape,
            self._worth,
            self._hand_overs,
            self._counts,
            reads=reads and options.enable_lookup,
            awaits_writers=reads and not writes,
            timeout_s=options.lookup_timeout_ms / 1000,
            clock=clock,
        )
        self._planner = Planner(pool, options, shape, hits, writes=writes)
        self._loads: Ledger[LoadEntry] = Ledger(ranks, self._close_load)
        self._stores: Ledger[StoreEntry] = Ledger(ranks, self._close_store)
        self._requests: dict[str, RequestState] = {}
        self._unfinished: dict[str, RequestState] = {}
        """Those whose blocks the writer may still have to look at."""
        self._admitted: dict[str, tuple[int, BlockLoadBatch, bool]] = {}
        self._filling: set[bytes] = set()
        self._stores_before_reset: frozenset[int] = frozenset()
        self._loads_before_reset: frozenset[int] = frozenset()
        self._reset_s = float("-inf")
        self._is_lazy = is_lazy
        self._events = events
        self._step_blocks = -(-step_tokens // shape.counted.block_tokens) + 1
        self._block_pool: BlockPool | None = None
        self._writer: Writer | None = None
        self._awaits_hello = False

    # Start

    def bind_cache(self, cache: KVCacheManager) -> None:
        self._early_copies.bind(cache)

    def bind_block_pool(self, block_pool: BlockPool) -> None:
        self._block_pool = block_pool
        if self._is_lazy and not compat.tells_evictions(block_pool):
            logger.warning(
                "UMBP: write_policy 'lazy' can't tell what this vLLM's block pool is about to evict: every "
                "block is stored when it has been computed"
            )
            self._is_lazy = False
        if self._is_lazy:
            if self._events is not None:
                self._events.keep(block_pool.num_gpu_blocks)
            self._writer = LazyWriter(
                self._planner,
                self._pool,
                block_pool,
                block_tokens=self._shape.counted.block_tokens,
                step_blocks=self._step_blocks,
            )
        else:
            runs = frozenset(g.group_id for g in self._shape.groups if g.kind is GroupKind.FULL)
            self._writer = ThroughWriter(self._planner, block_pool, self._counts, runs)

    def bind_workers(self, reports: Mapping[Rank, UMBPHandshakeMetadata]) -> None:
        """Adopt the workers' namespace and attach to their pools; called at start, and again after a
        sleep. Without any report, as where another connector's stand in their place, the workers' first step
        brings them.
        """
        self._awaits_hello = not reports
        if reports:
            self._pool.open(reports)

    def _open_late(self, reports: Mapping[Rank, UMBPHandshakeMetadata]) -> None:
        """An engine that runs is not stopped any more for a pool that it can't have."""
        self._awaits_hello = False
        try:
            self._pool.open(reports)
        except UMBPError as error:
            logger.error("UMBP: nothing is stored or restored: %s", error)

    # One request

    def match(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """How many tokens beyond `computed_tokens` the pool can restore, and whether beside the engine's
        steps; None for "ask again in the next step".
        """
        if self._is_filling(request, computed_tokens) or self._is_copied_early(request, computed_tokens):
            return None, False
        state = self._state(request)
        state.local_tokens = computed_tokens
        if self._is_resetting:
            return 0, False
        tokens = self._matcher.match(state, computed_tokens)
        return tokens, bool(tokens) and self._load_async

    def admit(self, request: Request, tables: Sequence[list[int]], external_tokens: int) -> None:
        """The engine has blocks for the request, by cache group, and wants `external_tokens` of what was
        promised, or none.
        """
        state = self._state(request)
        # Also one that comes back, from a preemption or with more prompt.
        self._unfinished[request.request_id] = state
        is_again = state.was_counted
        if not is_again:
            state.was_counted = True
            self._counts.admission(state, external_tokens)
            self._note(state, "admit")
        if external_tokens == 0:
            # The second call of a finished asynchronous load, or a hit that is not wanted.
            self._matcher.withdraw(state)
            return
        if state.promise is None or state.answer is None:
            raise InvariantError(f"request {request.request_id} is given {external_tokens} unpromised tokens")
        start = state.answer.local_tokens
        end = start + external_tokens
        spans = self._planner.load_spans(request.block_hashes, tables, state.promise, start, end)
        batch = self._planner.load_batch(request.request_id, spans)
        entry = LoadEntry(
            request.request_id,
            state.promise.owner,
            tuple(batch.block_ids),
            tuple((span.group_id, name) for span in spans for name in span.block_hashes),
            external_tokens,
            self._clock(),
            # What a synchronous load and its step fill is in the engine's own cache before it is filled.
            () if self._load_async else tuple(tables[0][start // self._shape.counted.block_tokens :]),
            is_again,
            len(self._loads),
            min(state.promise.far_tokens, external_tokens),
        )
        # The load owns the promise from here on: it outlives the request if that is aborted.
        state.promise = None
        state.answer = None
        state.is_loading = True
        self._admitted[request.request_id] = (self._loads.open(entry), batch, is_again)
        if self._writer is not None:
            self._writer.note_load(len(tables[0]), len(entry.block_ids))
        if not self._load_async:
            self._filling.update(name for _, name in entry.objects)

    def finish(self, request: Request) -> dict[str, Any] | None:
        """The request has ended or was aborted, at whatever point; its loads and stores settle by
        themselves. What its response shall tell the engine that goes on with it, if anything.
        """
        state = self._requests.pop(request.request_id, None)
        self._unfinished.pop(request.request_id, None)
        if state is None:
            return None
        told = None if self._is_lazy else self._hand_overs.told(state)
        if self._events is not None:
            self._events.close(request.request_id)
        self._matcher.withdraw(state)
        if state.was_counted:
            self._note(state, "end")
        return told

    def leave_states(self, request: Request, offers: Sequence[tuple[int, int, int]]) -> None:
        """The request is about to end with these states in its blocks, as `(group, block id, tokens)`, and
        would take them along.
        """
        state = self._requests.get(request.request_id)
        if state is None or self._writer is None:
            return
        if spans := self._planner.left_behind(state, offers):
            self._writer.leave(request.request_id, spans)

    # One step

    def plan_step(self, output: SchedulerOutput) -> UMBPConnectorMetadata:
        """What the workers shall do in this step; the stores' source blocks are pinned until all have
        reported.
        """
        meta = UMBPConnectorMetadata(
            async_load=self._load_async, has_forward=output.total_num_scheduled_tokens > 0
        )
        for request_id in compat.preempted_requests(output):
            meta.preempted_request_ids.add(request_id)
            if (state := self._requests.get(request_id)) is not None:
                self._matcher.withdraw(state)
                state.forget_blocks()
        for request_id, (event, batch, is_again) in self._admitted.items():
            meta.load_requests[request_id] = batch
            meta.load_events[request_id] = event
            if is_again:
                meta.reloads.add(request_id)
        self._admitted = {}
        compat.straighten_copies(output)
        self._plan_stores(output, meta)
        self._matcher.begin_step(is_idle=not meta.has_forward)
        if self._timer is not None and meta.has_forward:
            meta.timed_step = self._timer.begin(compat.prompt_tokens(output))
        return meta

    def _plan_stores(self, output: SchedulerOutput, meta: UMBPConnectorMetadata) -> None:
        entry = self._writer.plan(output, self._unfinished) if self._writer is not None else None
        if entry is not None:
            meta.store_requests.update(entry.batches)
            meta.store_event = self._stores.open(entry)
            if self._events is not None:
                self._events.stores_planned(entry)

    def settle(self, output: KVConnectorOutput) -> None:
        """Take in what the workers report."""
        if output.invalid_block_ids:
            self._remember_failures(output.invalid_block_ids)
        if output.failed_recving:
            # Beside other connectors some of them may be theirs.
            for request_id in {entry.request_id for entry in self._loads.entries()} & output.failed_recving:
                self._remember_failure(request_id)
        report = output.kv_connector_worker_meta
        if not isinstance(report, UMBPConnectorWorkerMetadata):
            report = NO_NEWS
        if report.hello and self._awaits_hello:
            self._open_late(report.hello)
        if self._timer is not None:
            self._timer.end(report.timed_step)
        for event, result in report.load_events.items():
            self._loads.report(event, result, report.load_reasons.get(event))
        for event, result in report.store_events.items():
            self._stores.report(event, result, report.store_reasons.get(event))
        if self._is_resetting:
            self._settle_reset()

    def has_pending_stores(self) -> bool:
        """Whether source blocks are pinned, so that the engine must keep stepping to get them back."""
        return len(self._stores) > 0 or (self._writer is not None and self._writer.waits_for_step)

    def delays_allocations(self) -> bool:
        """Whether the engine should rather wait for blocks than take them away from a request."""
        return self._writer is not None and self._writer.delays_allocations

    # The whole pool

    def reset(self) -> bool:
        """Remove the namespace's objects; what was computed before is neither stored nor promised any more.

        Stores that are under way may still publish old bytes, and loads may still fetch them: until all have
        ended nothing is promised, and then the pool is cleared once more.
        """
        for state in self._requests.values():
            self._matcher.withdraw(state)
            state.is_stale = state.tracker.saved_tokens > 0 or state.is_loading or state.was_counted
        self._stores_before_reset, self._loads_before_reset = self._stores.events(), self._loads.events()
        self._reset_s = self._clock()
        self._quarantine.clear()
        if self._writer is not None:
            self._writer.forget()
        return self._pool.clear()

    @property
    def _is_resetting(self) -> bool:
        return bool(self._stores_before_reset or self._loads_before_reset)

    def _settle_reset(self) -> None:
        self._stores_before_reset &= self._stores.events()
        self._loads_before_reset &= self._loads.events()
        if not self._is_resetting:
            self._pool.clear_soon()

    def take_events(self) -> Sequence[KVCacheEvent]:
        """What has come to be loadable, and what is so no more, since the last call."""
        return () if self._events is None else self._events.take()

    def take_stats(self) -> UMBPStats | None:
        return self._counts.take()

    def close(self) -> None:
        self._pool.close()

    def audit(self) -> None:
        """Raise `InvariantError` on a broken account; a drained scheduler has nothing open and nothing
        promised.
        """
        self._loads.audit()
        self._stores.audit()
        if self._writer is not None:
            self._writer.audit()
        if self._events is not None:
            self._events.audit()
        if not self._unfinished.keys() <= self._requests.keys():
            raise InvariantError(f"requests that are gone are to be stored: {sorted(self._unfinished)}")
        for request_id, state in self._requests.items():
            if state.promise is not None and state.is_loading:
                raise InvariantError(f"request {request_id} loads and is promised more: {state}")
            if state.request.request_id != request_id:
                raise InvariantError(f"request {request_id} is kept as {state.request.request_id}")

    # Inside

    def _state(self, request: Request) -> RequestState:
        state = self._requests.get(request.request_id)
        if state is None:
            state = self._requests[request.request_id] = RequestState(request)
            if self._events is not None:
                self._events.open(request)
        return state

    def _note(self, state: RequestState, phase: str) -> None:
        request = state.request
        reason: Any = request.get_finished_reason() if phase == "end" else None
        output_tokens = request.num_output_tokens if phase == "end" else 0
        finish = "" if reason is None else str(reason)
        for group in self._shape.groups if self._pool.takes_notes else ():
            names = group.names(request.block_hashes)
            if self._shape.is_fine and (tail := group.tail_tokens(request.num_prompt_tokens)) is not None:
                # Before the others: a prompt's last block is what its conversation goes on from.
                names = [request.block_hashes[tail // group.hash_tokens - 1], *names]
            self._pool.note(group.group_id, request.request_id, phase, names, output_tokens, finish)

    def _is_filling(self, request: Request, computed_tokens: int) -> bool:
        """Whether the engine's own hit has blocks that a synchronous load, of this step or one under way,
        will fill: whoever takes such a block now is lost with it if the load fails.
        """
        if not self._filling:
            return False
        return not self._filling.isdisjoint(
            request.block_hashes[: computed_tokens // self._shape.hash_tokens]
        )

    def _is_copied_early(self, request: Request, computed_tokens: int) -> bool:
        others = (state.request for state in self._requests.values())
        return self._early_copies.is_one_for(request, computed_tokens, others)

    def _remember_failures(self, invalid_block_ids: set[int]) -> None:
        """Mark every request with a failed load, so that it is computed and not promised the same again.

        The engine's own cache must not hand out what a failed load left unfilled, nor what its step computed
        from that: the request may end before it has computed those blocks anew.
        """
        for entry in self._loads.entries():
            if invalid_block_ids.isdisjoint(entry.block_ids):
                continue
            self._remember_failure(entry.request_id)
            if entry.exposed_block_ids:
                assert self._block_pool is not None
                exposed = entry.exposed_block_ids
                first = min(exposed.index(block_id) for block_id in invalid_block_ids.intersection(exposed))
                compat.hide_blocks(self._block_pool, exposed[first:])

    def _remember_failure(self, request_id: str) -> None:
        state = self._requests.get(request_id)
        if state is not None and not state.has_failed_load:
            state.has_failed_load = True
            self._counts.request_with_a_failed_load()

    def _close_load(self, entry: LoadEntry, result: StoreEventResult, reason: LossReason) -> None:
        self._filling.difference_update(name for _, name in entry.objects)
        self._pool.unhold(entry.owner)
        if entry.planned_s > self._reset_s:
            # What a reset has taken from a load will be stored anew, and be good.
            for one in result.failed_objects:
                self._quarantine.add(one)
            self._pool.disbelieve(result.failed_objects)
        if self._events is not None:
            self._events.load_ended(entry)
        failed_tokens = self._counts.load_ended(entry, result, reason)
        if not failed_tokens and self._load_async:
            others = (entry.others + len(self._loads)) / 2
            seconds = self._clock() - entry.planned_s
            self._worth.observe_load(entry.tokens, seconds, others, is_far=entry.far_tokens > 0)
        if (state := self._requests.get(entry.request_id)) is not None:
            state.is_loading = False

    def _close_store(self, entry: StoreEntry, result: StoreEventResult, reason: LossReason) -> None:
        assert self._writer is not None
        for request_id in self._writer.give_back(entry, result.failed_objects, reason, self._requests):
            self._unfinished[request_id] = self._requests[request_id]
        if len(self._quarantine):
            # What was lost and has been stored anew is as good as any.
            for one in entry.objects():
                if one not in result.failed_objects:
                    self._quarantine.remove(one)
        if self._events is not None:
            self._events.stores_ended(entry)
        self._counts.store_ended(entry, result, reason)
