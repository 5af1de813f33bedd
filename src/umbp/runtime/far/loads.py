"""The rest of a load that the pool could not do by itself: fetched on threads of its own, then copied on the
thread that copies all loads."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from umbp.data import LossReason, TransferJobState
from umbp.runtime.far.fetch import Brought
from umbp.runtime.far.side import FarSide
from umbp.runtime.lane import Lane
from umbp.runtime.mover import Moved, ObjectMover, settle
from umbp.runtime.moves import Move

logger = logging.getLogger("vllm.umbp")

LOADS_AT_ONCE = 4
"""So many loads of a worker fetch side by side; further ones wait for their turn."""

PARTS_AT_ONCE = 2
"""So many parts of one load: while one is published the store brings the next one."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Rows of a move that the pool did not have."""

    moved: Moved
    rows: npt.NDArray[np.intp]
    move: Move
    """These rows alone."""


@dataclass(slots=True)
class _Load:
    """What a load still lacks. The threads that fetch for it take parts from the front; the last of them to
    find none ends the load.
    """

    job: TransferJobState
    moves: Sequence[Moved]
    missing: deque[Missing]
    mover: ObjectMover
    fence: object
    deadline_s: float
    done: Future[None]
    waiting: set[int]
    """The shares, by number, that no thread has begun."""
    working: int = 0
    """Threads that are at it."""
    copies: list[Future[None]] = field(default_factory=list)
    error: str | None = None


class FarLoads:
    """Ends loads whose objects are partly in the store. Every job gets its outcome and its future its end,
    whatever happens.
    """

    def __init__(self, far: FarSide, lane: Lane) -> None:
        self._far = far
        self._lane = lane
        self._threads = ThreadPoolExecutor(LOADS_AT_ONCE * PARTS_AT_ONCE, "umbp-fetch")
        self._lock = threading.Lock()
        self._unfinished: set[Future[None]] = set()

    def finish(
        self,
        job: TransferJobState,
        moves: Sequence[Moved],
        missing: Sequence[Missing],
        mover: ObjectMover,
        fence: object,
        deadline_s: float,
        done: Future[None],
    ) -> None:
        """Fetch and copy what is missing, then settle the job and end `done`. May be called on the lane's
        thread.
        """
        shares = range(min(PARTS_AT_ONCE, len(missing)))
        load = _Load(job, moves, deque(missing), mover, fence, deadline_s, done, set(shares))
        with self._lock:
            self._unfinished.add(done)
        for share in shares:
            try:
                self._threads.submit(self._run, load, share)
            except RuntimeError as refused:  # closed meanwhile, or the system has no thread for it
                if self._take_back(load, share, str(refused)):
                    # This thread may be the one that copies: what waits for copies stands behind them.
                    self._lane.start(self._end_on_lane(load))

    def unfinished(self) -> list[Future[None]]:
        """The loads that have been handed over and have not ended."""
        with self._lock:
            return list(self._unfinished)

    def close(self) -> None:
        """Return when all have ended, which their deadlines see to."""
        self._threads.shutdown(wait=True)

    def _run(self, load: _Load, share: int) -> None:
        if not self._begin(load, share):
            return
        mover = load.mover
        try:
            while (part := self._next(load)) is not None:
                brought = self._far.fetch(mover.pool, mover.namespace_id, part.move, load.deadline_s)
                load.copies.append(self._lane.start(_copy(part, brought, mover, load.fence)))
        except Exception as broken:
            # The top of the thread: an outcome for every key that has none, and one line in the log.
            logger.exception("UMBP: fetching for a load of %d objects broke", len(load.job.keys))
            load.error = str(broken)
            load.missing.clear()
        if self._leave(load):
            self._end(load)

    def _begin(self, load: _Load, share: int) -> bool:
        with self._lock:
            if share not in load.waiting:
                return False
            load.waiting.remove(share)
            load.working += 1
            return True

    def _take_back(self, load: _Load, share: int, why: str) -> bool:
        """A share was refused, though it may be in the threads' queue all the same: they must find it gone
        when the load is over. Whether it was the last.
        """
        with self._lock:
            if share not in load.waiting:  # one of them has begun it
                return False
            load.waiting.remove(share)
            load.error = why
            return not load.waiting and not load.working

    def _next(self, load: _Load) -> Missing | None:
        with self._lock:
            return load.missing.popleft() if load.missing else None

    def _leave(self, load: _Load) -> bool:
        """A thread has done its share of a load; whether it was the last, who ends it."""
        with self._lock:
            load.working -= 1
            return not load.waiting and not load.working

    def _end(self, load: _Load) -> None:
        for copy in load.copies:
            copy.result()
        settle(load.job, load.moves, load.error)
        with self._lock:
            self._unfinished.discard(load.done)
        load.done.set_result(None)

    def _end_on_lane(self, load: _Load) -> Iterator[None]:
        yield from ()
        self._end(load)


def _copy(part: Missing, brought: Brought, mover: ObjectMover, fence: object) -> Iterator[None]:
    """On the loading thread: copy what has come, and note it with the move that lacked it."""
    yield from ()
    try:
        copied = mover.load_held(part.move, brought.tickets, brought.is_held, fence)
    except Exception as broken:
        logger.exception("UMBP: copying %d fetched objects broke", len(part.rows))
        part.moved.error = f"{LossReason.FAILED}: {broken}"
        return
    part.moved.is_done[part.rows] = copied.is_done
    part.moved.copied_bytes[part.rows] = copied.copied_bytes
    # What has come after all was lost to nobody, and what the pool lost by itself still is.
    error = copied.error if copied.absent is None else (brought.error or copied.error)
    part.moved.error = None if part.moved.is_done.all() else (error or part.moved.error)
