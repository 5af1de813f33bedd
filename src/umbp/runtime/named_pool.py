"""One process's view of a pool that lives in a file, which others may destroy and make again meanwhile."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

from umbp.errors import SegmentError, UMBPError
from umbp.kinds import format_size
from umbp.pool import Pool, slot_bytes

logger = logging.getLogger("vllm.umbp")

LOOK_AGAIN_S = 1.0
"""How often the file is looked for, where the pool itself doesn't tell."""


class NamedPool:
    """The pool at a path, whichever it is now. One thread uses it.

    A pool that was destroyed says so itself; that its file was deleted or replaced by hand shows within
    `LOOK_AGAIN_S`. A file that is there again is tried at once, so that an engine's scheduler and its workers
    don't differ for long; one that can't be attached is tried again after `LOOK_AGAIN_S`.
    """

    CLOCK = staticmethod(time.monotonic)

    def __init__(
        self,
        path: str,
        namespace: str,
        *,
        quota: float | None = None,
        lock_patience_s: float,
        object_bytes: int = 0,
        found_again: Callable[[Pool], None] | None = None,
    ) -> None:
        """`quota`, if given, becomes the namespace's share of the pool; `object_bytes` is the largest object
        that must fit; `found_again` hears of each pool that comes after the one `attach` found.
        """
        self.path = path
        self._namespace = namespace
        self._quota = quota
        self._lock_patience_s = lock_patience_s
        self._object_bytes = object_bytes
        self._found_again = found_again
        self._clock = self.CLOCK
        self._found: tuple[Pool, int] | None = None
        self._next_look_s = float("-inf")
        self._tried: tuple[int, int] | None = None
        self._is_closed = False

    def attach(self) -> tuple[Pool, int]:
        """The pool and the namespace's number in it. `UMBPError`, one sentence, where it isn't there, can't
        be trusted, or has no room for one object.
        """
        pool = Pool.attach(self.path, lock_patience_s=self._lock_patience_s)
        try:
            require_room_for(pool, self._object_bytes)
            number = pool.namespace(self._namespace)
            if self._quota is not None:
                pool.set_quota(number, int(self._quota * pool.capacity_bytes))
        except UMBPError:
            pool.close()
            raise
        self._found = pool, number
        self._next_look_s = self._clock() + LOOK_AGAIN_S
        return self._found

    def current(self) -> tuple[Pool, int] | None:
        """The pool that is at the path now, or None. Whoever has work in one that was replaced closes it."""
        if self._found is not None and self._has_gone(self._found[0]):
            logger.warning("UMBP: the pool %s is gone; nothing is restored until it is back", self.path)
            self._found = None
            self._next_look_s = float("-inf")
        if self._found is None and not self._is_closed and self._may_be_there():
            self._look_for_it()
        return self._found

    def close(self) -> None:
        """Leave the pool for good."""
        self._is_closed = True
        if self._found is not None:
            self._found[0].close()
            self._found = None

    def _has_gone(self, pool: Pool) -> bool:
        return pool.is_destroyed or (self._is_due() and pool.is_replaced(0.0))

    def _may_be_there(self) -> bool:
        try:
            info = os.stat(self.path)
        except OSError:
            return False
        tried, self._tried = self._tried, (info.st_dev, info.st_ino)
        return self._is_due() or self._tried != tried

    def _look_for_it(self) -> None:
        try:
            pool, _ = self.attach()
        except UMBPError as error:
            logger.debug("UMBP: %s", error)
        else:
            logger.info(
                "UMBP: the pool %s is there again, of %s", self.path, format_size(pool.capacity_bytes)
            )
            if self._found_again is not None:
                self._found_again(pool)

    def _is_due(self) -> bool:
        now = self._clock()
        if now < self._next_look_s:
            return False
        self._next_look_s = now + LOOK_AGAIN_S
        return True


def require_room_for(pool: Pool, object_bytes: int) -> None:
    """`SegmentError` where no slab of the pool can hold such an object."""
    needed = slot_bytes(object_bytes)
    if needed > pool.slab_bytes:
        raise SegmentError(
            f"a block of this model takes {needed} bytes, more than a slab of the pool has "
            f"({pool.slab_bytes} bytes): make the pool anew with --slab-size {needed} or more"
        )
