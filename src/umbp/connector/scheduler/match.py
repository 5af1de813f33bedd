"""How much of a prompt is stored on every rank, and the promise that it stays there until it is loaded.

Scheduler thread only. The engine asks again every step while it can't allocate; an unchanged question is
answered from the request's state without touching the pool.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from umbp.connector import compat
from umbp.connector.scheduler.account import Quarantine
from umbp.connector.scheduler.plan import GROUP
from umbp.connector.scheduler.pool_view import PoolView
from umbp.connector.scheduler.state import Answer, Promise, RequestState
from umbp.options import Options


class Matcher:
    """Answers "how many tokens beyond the engine's own hit?", and owns the promises that follow from it."""

    def __init__(
        self, pool: PoolView, quarantine: Quarantine, options: Options, block_tokens: int, reads: bool
    ) -> None:
        self._pool = pool
        self._quarantine = quarantine
        self._block_tokens = block_tokens
        self._min_load_tokens = options.min_load_tokens or 0
        self._reads = reads and options.enable_lookup
        self._owners = itertools.count()

    def match(self, state: RequestState, computed_tokens: int) -> int:
        """Tokens of whole blocks that can be loaded beyond `computed_tokens`; at least one token is left to
        compute.

        A positive answer is a promise: the objects stay in the pool until `withdraw` or until their load
        ends.
        """
        request = state.request
        if not self._reads or state.has_failed_load or state.is_loading:
            return 0
        if not compat.reads_prefix_cache(request):
            return 0
        start = computed_tokens // self._block_tokens
        limit = min((request.num_tokens - 1) // self._block_tokens, len(request.block_hashes))
        answer = state.answer
        if answer is None or answer.local_blocks != start or answer.limit_blocks != limit:
            answer = Answer(start, limit, self._promise(state, start, limit))
            state.answer = answer
        return answer.blocks * self._block_tokens

    def _promise(self, state: RequestState, start: int, limit: int) -> int:
        """Blocks from `start` that are promised, at most up to `limit`; keeps a promise that still serves."""
        promise = state.promise
        if promise is None or start < promise.start:
            self.withdraw(state)
            promise = self._hold(state.request.request_id, state.request.block_hashes, start, limit)
        blocks = 0 if promise is None else min(promise.end, limit) - start
        if blocks <= 0 or blocks * self._block_tokens < self._min_load_tokens:
            state.promise = promise
            self.withdraw(state)
            return 0
        state.promise = promise
        return blocks

    def _hold(self, request_id: str, hashes: Sequence[bytes], start: int, limit: int) -> Promise | None:
        wanted = hashes[start:limit]
        wanted = wanted[: self._quarantine.healthy_prefix(wanted)]
        if not wanted:
            return None
        owner = f"{request_id}#{next(self._owners)}"
        held = self._pool.hold(owner, GROUP, wanted)
        return Promise(owner, start, start + held) if held else None

    def withdraw(self, state: RequestState) -> None:
        """Give back what was promised to this request and not handed over to a load."""
        state.answer = None
        if state.promise is not None:
            self._pool.unhold(state.promise.owner)
            state.promise = None
