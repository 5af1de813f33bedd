"""A thread that works at several jobs in turns: a short one doesn't wait for the end of a long one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

from umbp.errors import UMBPError, no_thread


class Lane:
    """One thread. A job is an iterator that does a part of its work whenever it is asked for an item."""

    def __init__(self, name: str, initializer: Callable[[], None]) -> None:
        """`UMBPError`, one sentence, where the system has no thread for it: now, not with the first job."""
        self._thread = ThreadPoolExecutor(1, name, initializer)
        try:
            self._thread.submit(_nothing)
        except RuntimeError as error:
            raise UMBPError(no_thread(name, error)) from error
        self._lock = threading.Lock()
        self._jobs: deque[tuple[Iterator[object], Future[None]]] = deque()
        self._unfinished: set[Future[None]] = set()

    def start(self, job: Iterator[object]) -> Future[None]:
        """Begin a job, which must not raise; the future ends with it."""
        done: Future[None] = Future()
        with self._lock:
            self._jobs.append((job, done))
            self._unfinished.add(done)
        self._thread.submit(self._take_a_turn)
        return done

    def unfinished(self) -> list[Future[None]]:
        """The jobs that have been started and have not ended."""
        with self._lock:
            return list(self._unfinished)

    def finish_all(self) -> None:
        """Return when all jobs that have been started have ended."""
        wait(self.unfinished())

    def close(self) -> None:
        """Return when all jobs have ended. Nothing may be started any more."""
        self._thread.shutdown(wait=True)

    def _take_a_turn(self) -> None:
        while True:
            with self._lock:
                job, done = self._jobs.popleft()
            if next(job, _ENDED) is _ENDED:
                with self._lock:
                    self._unfinished.discard(done)
                done.set_result(None)
                return
            with self._lock:
                self._jobs.append((job, done))
            try:
                self._thread.submit(self._take_a_turn)
            except RuntimeError:  # the lane is being closed: jobs, which may wait for others, take turns here
                continue
            return


_ENDED = object()


def _nothing() -> None:
    """A first job, so that there is a thread."""
