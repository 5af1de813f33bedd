"""How much of a prompt is stored on every rank, and the promise that it stays there until it is loaded.

Scheduler thread only. The engine asks again every step while it can't allocate; an unchanged question is
answered from the request's state without touching the pool.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

from umbp.connector import compat
from umbp.connector.groups import CacheShape
from umbp.connector.scheduler.count import Counts
from umbp.connector.scheduler.find import PrefixFinder
from umbp.connector.scheduler.handover import HandOvers
from umbp.connector.scheduler.pool_view import PoolView
from umbp.connector.scheduler.state import Answer, Promise, RequestState
from umbp.connector.scheduler.wait import Wait
from umbp.connector.scheduler.worth import LoadWorth

IDLE_PATIENCE_S = 0.002
"""How long all answers together are waited for in a step of an engine that computes nothing: a store often
answers sooner than the next step comes.
"""


class Matcher:
    """Answers "how many tokens beyond the engine's own hit?", and owns the promises that follow from it."""

    def __init__(
        self,
        pool: PoolView,
        finder: PrefixFinder,
        shape: CacheShape,
        worth: LoadWorth,
        hand_overs: HandOvers,
        counts: Counts,
        *,
        reads: bool,
        awaits_writers: bool,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`awaits_writers`: what is just being written is waited for, as if its writer had handed the request
        over; `timeout_s`: how long at most, from a request's first question on.
        """
        self._pool = pool
        self._hand_overs = hand_overs
        self._counts = counts
        self._awaits_writers = awaits_writers
        self._timeout_s = timeout_s
        self._clock = clock
        self._dropped_tokens = max(
            min(group.block_tokens, shape.hit_tokens) * group.drops_last_block for group in shape.groups
        )
        self._finder = finder
        self._shape = shape
        self._worth = worth
        self._reads = reads
        self._owners = itertools.count()
        self._patience_s = 0.0

    def begin_step(self, *, is_idle: bool) -> None:
        """The questions of the next step follow; `is_idle`: nobody's tokens wait for their answers."""
        self._patience_s = IDLE_PATIENCE_S if is_idle else 0.0

    def match(self, state: RequestState, computed_tokens: int) -> int | None:
        """Tokens that can be loaded beyond `computed_tokens`; at least one token is left to compute. None:
        that is being found out, ask again in the next step.

        A positive answer is a promise: the objects stay in the pool until `withdraw` or until their load
        ends.
        """
        request = state.request
        if not self._reads or state.has_failed_load or state.is_loading:
            return 0
        if not compat.reads_prefix_cache(request):
            return 0
        hashed_tokens = len(request.block_hashes) * self._shape.hash_tokens
        limit = min(request.num_tokens - 1, hashed_tokens) // self._shape.hit_tokens * self._shape.hit_tokens
        answer = state.answer
        if answer is None or answer.local_tokens != computed_tokens or answer.limit_tokens != limit:
            if not self._is_ready(state, computed_tokens, limit):
                return None
            answer = Answer(computed_tokens, limit, self._promise(state, computed_tokens, limit))
            state.answer = answer
        return answer.tokens

    def _is_ready(self, state: RequestState, start: int, limit: int) -> bool:
        """Whether to answer now: what can be known is known, and what is to come has come, or was waited for
        long enough. Looking costs time and is done now and then; in the steps between nothing is asked.
        """
        if limit <= start or self._still_serves(state, start, limit):
            return True
        now = self._clock()
        if state.first_asked_s is None:
            state.first_asked_s = now
        wait = state.wait
        if wait is not None and not wait.is_due(now):
            return False
        if wait is not None and wait.has_looked and now < wait.until_s:
            wait.has_looked = False
            self._unprepare(state)
        if self._pool.prepares and not self._is_prepared(state, start, limit):
            if wait is None or wait.is_over or now < wait.until_s:
                return False
            self._give_up(wait)
            return True
        return self._has_come(state, start, limit, now)

    def _has_come(self, state: RequestState, start: int, limit: int, now: float) -> bool:
        """Whether nothing is waited for, any more or at all; else the wait goes on."""
        wait = state.wait
        if wait is not None and wait.is_over:
            return True
        if not self._lacks_what_is_to_come(state, start, limit):
            if wait is not None:
                wait.is_over = True
            return True
        assert state.first_asked_s is not None
        is_in_vain = self._pool.is_cut_off
        if wait is None and is_in_vain:
            return True
        if wait is None:
            wait = state.wait = Wait(state.first_asked_s + self._timeout_s)
            self._counts.request_that_waits()
        if is_in_vain or now >= wait.until_s:
            self._give_up(wait)
        wait.begin_pause(now)
        return wait.is_over

    def _give_up(self, wait: Wait) -> None:
        wait.is_over = True
        self._counts.request_that_waited_in_vain()

    def _lacks_what_is_to_come(self, state: RequestState, start: int, limit: int) -> bool:
        promised = self._hand_overs.promised_tokens(state)
        if not promised and not self._awaits_writers:
            return False
        hashes = state.request.block_hashes
        expected = min(promised, limit) - self._dropped_tokens
        expected -= expected % self._shape.hit_tokens
        if promised and not (expected > start and self._worth.pays(expected - start)):
            return False
        end = self._finder.reach(hashes, start, limit)
        if promised:
            return end < expected
        return end < limit and self._finder.is_written(hashes, end)

    def _is_prepared(self, state: RequestState, start: int, limit: int) -> bool:
        state.is_prepared = True
        wanted = self._finder.wanted(state.request.block_hashes, start, limit)
        if self._patience_s <= 0:
            return self._pool.prepare(state.request.request_id, wanted)
        begun_s = self._clock()
        try:
            return self._pool.prepare(state.request.request_id, wanted, self._patience_s)
        finally:
            self._patience_s -= self._clock() - begun_s

    @staticmethod
    def _still_serves(state: RequestState, start: int, limit: int) -> bool:
        promise = state.promise
        return promise is not None and start >= promise.start and limit >= promise.end

    def _promise(self, state: RequestState, start: int, limit: int) -> int:
        """Tokens from `start` that are promised, at most up to `limit`; keeps a promise that still serves."""
        promise = state.promise
        if not self._still_serves(state, start, limit):
            self.withdraw(state)
            promise = self._hold(state, start, limit)
        tokens = 0 if promise is None else promise.end - start
        state.promise = promise
        is_far = promise is not None and promise.far_tokens > 0
        is_worth = tokens <= 0 or self._worth.is_worth(tokens, is_far=is_far)
        state.passed_tokens = 0 if is_worth else tokens
        if tokens <= 0 or not is_worth:
            self.withdraw(state)
            return 0
        return tokens

    def _hold(self, state: RequestState, start: int, limit: int) -> Promise | None:
        if limit <= start:
            return None
        owner = f"{state.request.request_id}#{next(self._owners)}"
        hit = self._finder.hold(owner, state.request.block_hashes, start, limit)
        if hit.end <= start:
            return None
        counted = self._shape.counted
        far_tokens = self._pool.to_fetch(owner, counted.group_id) * counted.block_tokens
        return Promise(owner, start, hit.end, hit.tails, min(far_tokens, hit.end - start))

    def withdraw(self, state: RequestState) -> None:
        """Give back what was promised to this request and not handed over to a load."""
        state.answer = None
        self._unprepare(state)
        if state.promise is not None:
            self._pool.unhold(state.promise.owner)
            state.promise = None

    def _unprepare(self, state: RequestState) -> None:
        if state.is_prepared:
            self._pool.unprepare(state.request.request_id)
            state.is_prepared = False
