"""How much of a prompt is stored on every rank, and the promise that it stays there until it is loaded.

Scheduler thread only. The engine asks again every step while it can't allocate; an unchanged question is
answered from the request's state without touching the pool.
"""

from __future__ import annotations

import itertools

from umbp.connector import compat
from umbp.connector.groups import CacheShape
from umbp.connector.scheduler.find import PrefixFinder
from umbp.connector.scheduler.pool_view import PoolView
from umbp.connector.scheduler.state import Answer, Promise, RequestState
from umbp.connector.scheduler.worth import LoadWorth


class Matcher:
    """Answers "how many tokens beyond the engine's own hit?", and owns the promises that follow from it."""

    def __init__(
        self, pool: PoolView, finder: PrefixFinder, shape: CacheShape, worth: LoadWorth, *, reads: bool
    ) -> None:
        self._pool = pool
        self._finder = finder
        self._shape = shape
        self._worth = worth
        self._reads = reads
        self._owners = itertools.count()

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
            if self._pool.prepares and not self._is_prepared(state, computed_tokens, limit):
                return None
            answer = Answer(computed_tokens, limit, self._promise(state, computed_tokens, limit))
            state.answer = answer
        return answer.tokens

    def _is_prepared(self, state: RequestState, start: int, limit: int) -> bool:
        if limit <= start or self._still_serves(state, start, limit):
            return True
        state.is_prepared = True
        wanted = self._finder.wanted(state.request.block_hashes, start, limit)
        return self._pool.prepare(state.request.request_id, wanted)

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
        is_worth = tokens <= 0 or self._worth.is_worth(tokens)
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
        if state.is_prepared:
            self._pool.unprepare(state.request.request_id)
            state.is_prepared = False
        if state.promise is not None:
            self._pool.unhold(state.promise.owner)
            state.promise = None
