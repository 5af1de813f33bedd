"""One engine and what may happen to it, act by act. Whoever chooses the acts, chance or a state machine,
finds here which of them are possible now.

A life is one engine of one shape with one pool. The scripted engine compares every byte that a forward reads
with the model, spoils what changes hands and watches what nobody owns; *engine_checks* says what else must
hold after each act, and at the end.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import scripted_runtime
from engine_choices import FAULTS, Admission, Nature, Prompt
from engine_doubts import Doubts
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from umbp.errors import UMBPError
from umbp.options import parse_options
from umbp.pool import Pool
from umbp.pool.sharing import pool_path
from umbp.runtime.base import IUMBPRuntime
from umbp.runtime.embedded import EmbeddedRuntime
from umbp.runtime.standalone import StandaloneRuntime
from umbp.runtime.wrap.faulty import FaultyRuntime
from umbp.testing.clock import TickClock
from umbp.testing.engine import ScriptedEngine, Shape
from umbp.testing.reference import ReferenceRuntime
from umbp.testing.runtimes import (
    EagerRuntime,
    MortalRuntime,
    PickyRuntime,
    WatchedRuntime,
    plain,
    slowly,
)

MOST_LIVE = 7
LONGEST_SESSION_TOKENS = 120

Around = Callable[[IUMBPRuntime], IUMBPRuntime]


def make_pool(kind: str, objects: int, folder: Path) -> IUMBPRuntime:
    """A pool with room for so many objects."""
    if kind == "reference":
        return ReferenceRuntime(objects)
    if kind == "embedded":
        options = parse_options({"capacity_bytes": objects * 4096, "num_workers": 1})
        return EmbeddedRuntime(options)
    path = pool_path(folder, "p")
    if not Path(path).exists():
        Pool.create(path, objects * 4096, slab_bytes=4096, min_object_bytes=512).close()
    options = parse_options({"mode": "standalone", "pool": "p", "pool_dir": str(folder), "num_workers": 1})
    return StandaloneRuntime(options)


def unchanged(runtime: IUMBPRuntime) -> IUMBPRuntime:
    return runtime


class EngineLife:
    """One engine's life. Each act is a method; what asks first whether it is possible is `may_...`."""

    def __init__(
        self, nature: Nature, shape: Shape, root: Path, folder: Path, around: Around = unchanged
    ) -> None:
        """`folder` is where a shared pool lies; `around` gives the pool's runtime other properties."""
        self.nature = nature
        self.clock = TickClock()
        self.admitted_tokens = 0
        """How many tokens the engine has wanted of what it was promised."""
        self.sessions: dict[str, Request] = {}
        self.borrowed: list[KVCacheBlock] = []
        self.loses_each = 0
        """Of each load one object in so many is lost; none where it is 0."""
        self._folder = folder
        self._ended: set[str] = set()
        self._ids = itertools.count()
        self.pool = WatchedRuntime(self._make_pool())
        self._table_key = f"life {id(self)}"
        scripted_runtime.TABLE[self._table_key] = self._runtime(around)
        extra = {"mode": scripted_runtime.MODE, "plugin_options": {"runtime": self._table_key}}
        self.shape = replace(shape, extra=extra | dict(shape.extra))
        self.engine = ScriptedEngine(root, self.shape)
        self._count_admissions()
        use_clock(self.engine, self.clock)
        self.doubts = Doubts(self.engine.connector.scheduler_side, self.clock)

    def _make_pool(self) -> IUMBPRuntime:
        return make_pool(self.nature.pool, self.nature.objects, self._folder)

    def _runtime(self, around: Around) -> IUMBPRuntime:
        nature = self.nature
        runtime: Any = PickyRuntime(around(EagerRuntime(self.pool)), self._is_lost)
        if nature.load_s or nature.store_s:
            runtime = slowly(runtime, self.clock, load=nature.load_s, store=nature.store_s)
        runtime = self.backend = MortalRuntime(runtime)
        if nature.lacks:
            plain(runtime, **{nature.lacks: False})
        if nature.is_faulty:
            runtime = FaultyRuntime(runtime, replace(FAULTS, seed=nature.fault_seed))
        return runtime  # type: ignore[no-any-return]

    def _count_admissions(self) -> None:
        connector = self.engine.connector
        admit = connector.update_state_after_alloc

        def counted(request: Request, blocks: Any, external_tokens: int) -> None:
            self.admitted_tokens += external_tokens
            admit(request, blocks, external_tokens)

        connector.update_state_after_alloc = counted  # type: ignore[method-assign, assignment]

    def __str__(self) -> str:
        return f"{self.nature}, {self.shape}"

    def close(self) -> None:
        self.engine.close()
        scripted_runtime.TABLE.pop(self._table_key, None)

    # Time

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def step(self, between: Callable[[], None] = lambda: None) -> None:
        """One step of the engine; `between` is what happens between its forward and its results."""
        self.engine.between = between
        self.engine.step()

    def land(self) -> None:
        """What is in flight ends."""
        self.engine.land()

    # What users do

    def live(self) -> list[Request]:
        return [one for one in self.engine.scheduler.requests.values() if not one.is_finished()]

    def may_admit(self) -> bool:
        return len(self.live()) < MOST_LIVE

    def admit(self, one: Admission) -> Request:
        return self.engine.add(
            one.prompt.tokens(),
            one.max_tokens,
            salt=one.salt,
            reads_cache=one.reads_cache,
            priority=one.priority,
        )

    def ask_again(self, served: Request, max_tokens: int = 1) -> Request:
        """For all of what was served before, so that there is something to find."""
        return self.engine.add(list(served.all_token_ids), max_tokens, salt=served.cache_salt)

    def abort(self, *requests: Request) -> None:
        self.engine.abort(*[request.request_id for request in requests])

    def may_begin_session(self) -> bool:
        # With steps in flight vLLM loses the tokens of a session that is preempted as its turn ends.
        in_flight = self.shape.depth * self.shape.stages > 1
        return not self.shape.drafts and not in_flight and self.may_admit()

    def begin_session(self, prompt: Prompt, max_tokens: int) -> None:
        request = self.engine.add(
            prompt.tokens(90), max_tokens, request_id=f"s{next(self._ids)}", resumable=True
        )
        self.sessions[request.request_id] = request

    def open_sessions(self) -> list[Request]:
        return [
            one
            for one in self.sessions.values()
            if not one.is_finished() and one.request_id not in self._ended
        ]

    def may_continue(self, session: Request) -> bool:
        """Whether it may have more than its end."""
        return session.num_tokens < LONGEST_SESSION_TOKENS and not session.streaming_queue

    def continue_session(self, session: Request, prompt: Prompt, max_tokens: int) -> None:
        self._feed(session, prompt.tokens(40), max_tokens, is_last=False)

    def end_session(self, session: Request, max_tokens: int = 1) -> None:
        self._ended.add(session.request_id)
        self._feed(session, [1], max_tokens, is_last=True)

    def _feed(self, session: Request, more: Sequence[int], max_tokens: int, *, is_last: bool) -> None:
        self.engine.add(more, max_tokens, request_id=session.request_id, resumable=not is_last)

    # What an operator does

    def may_preempt_all(self) -> bool:
        """vLLM takes blocks away from running requests only: not from a load, nor from one that waits to run
        after its load, nor from a store.
        """
        scheduler = self.engine.scheduler
        holders = [
            request
            for request in scheduler.requests.values()
            if any(scheduler.kv_cache_manager.get_block_ids(request.request_id))
        ]
        return all(request.status == RequestStatus.RUNNING for request in holders) and not (
            self.engine.connector.has_pending_push_work() or self.engine.is_in_flight or self.borrowed
        )

    def reset(self, *, preempts: bool) -> None:
        """The engine's own cache is emptied, with whatever runs."""
        self.engine.scheduler.reset_prefix_cache(reset_running_requests=preempts)

    def clear(self) -> None:
        self.engine.scheduler.reset_prefix_cache(reset_connector=True)

    def may_change_weights(self) -> bool:
        return self.nature.clears and self.may_preempt_all()

    def change_weights(self) -> None:
        self.engine.change_weights()

    # What goes wrong

    def _is_lost(self, rank: int, index: int, key: str) -> bool:
        return self.loses_each > 0 and index % self.loses_each == self.loses_each - 1

    def borrow(self, blocks: int) -> None:
        """Others take blocks, so that allocation fails and requests are preempted."""
        self.borrowed = self.engine.pool.get_new_blocks(blocks)

    def free_blocks(self) -> int:
        return self.engine.pool.get_num_free_blocks()

    def give_back(self) -> None:
        self.engine.pool.free_blocks(self.borrowed)
        self.borrowed = []

    def may_die(self) -> bool:
        return self.nature.is_mortal and not self.backend.is_dead

    def may_be_destroyed(self) -> bool:
        return self.nature.is_mortal and self.nature.is_shared

    def destroy(self) -> None:
        """Somebody destroys the pool's file; it does not come back."""
        with contextlib.suppress(UMBPError), Pool.attach(pool_path(self._folder, "p")) as pool:
            pool.destroy()

    def evictable(self) -> list[str]:
        """What the pool may lose: what nobody holds."""
        inner = self.pool._inner
        if not isinstance(inner, ReferenceRuntime):
            return []
        held = inner.shelf.held_keys()
        return [key for key in inner.shelf.objects if key not in held]

    def evict(self, keys: Sequence[str]) -> None:
        inner = self.pool._inner
        assert isinstance(inner, ReferenceRuntime)
        for key in keys:
            inner.shelf.remove(key)

    # The end

    def drain(self) -> None:
        """Everybody is served to the end, however long it takes."""
        for session in self.open_sessions():
            self.end_session(session)
        self.give_back()
        self.loses_each = 0
        self.pass_time(10)
        self.engine.between = lambda: self.pass_time(1)
        self.engine.drain(limit=2000)

    def served(self) -> list[Request]:
        """What is short enough to be asked for again."""
        return [one for one in self.engine.finished.values() if one.num_tokens < 240]

    def sweep(self, served: Sequence[Request]) -> None:
        """Ask for what was served once more, now that only the pool has it."""
        self.backend.revive()
        self.engine.scheduler.reset_prefix_cache()
        for one in served:
            self.ask_again(one)
        self.engine.drain(limit=2000)


def use_clock(engine: ScriptedEngine, clock: TickClock) -> None:
    """The connector's time is the life's, so that a life is the same in every run."""
    side: Any = engine.connector.scheduler_side
    side._clock = side._quarantine._clock = clock
    for rank in engine.ranks:
        assert rank.connector is not None
        worker: Any = rank.connector.worker_side
        worker._clock = clock
        worker._nap = lambda seconds: None


def counters(life: EngineLife) -> Counter[str]:
    """What the connector has counted, and what the engine has wanted of it."""
    told = {what: int(count) for what, count in life.engine.stats.counters.items()}
    return Counter(told | {"admitted_tokens": life.admitted_tokens})
