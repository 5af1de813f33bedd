"""A pool that is made anew while a worker uses it."""

from __future__ import annotations

from umbp.pool import Pool
from umbp.runtime.base import HandshakeExtra
from umbp.runtime.moves import GroupRuns


class ReplacedPools:
    """A keeper whose pool is another one whenever a test says so."""

    def __init__(self) -> None:
        self.pool = self._make()

    def open(self, groups: GroupRuns) -> None:
        pass

    def current(self) -> tuple[Pool, int] | None:
        return self.pool, self.pool.namespace("n")

    def handshake_extra(self) -> HandshakeExtra:
        return {}

    def replace(self) -> None:
        self.pool = self._make()

    def close(self) -> None:
        self.pool.close()

    def _make(self) -> Pool:
        return Pool.create_memfd(1 << 20, slab_bytes=1 << 16, min_object_bytes=4096)
