"""A pool with any number of small objects under keys that are known, and fresh spellings of those keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from umbp.errors import InvariantError
from umbp.pool import Outcome, Pool, slot_bytes
from umbp.runtime.mover import pool_geometry

PREFIX = f"umbp:vllm:v1:{'0123456789abcdef' * 2}:tp0:pcp0:dcp0:pp0:g0:"
"""As long as the prefix of a real key."""
HASH_BYTES = 32
OBJECT_BYTES = 256
BATCH = 4096


@dataclass(frozen=True, slots=True)
class Stock:
    """`count` block hashes, the same in every process. Key number i is the prefix and hash i in hex."""

    count: int
    hashes: bytes

    @classmethod
    def of(cls, count: int, seed: int = 1) -> Stock:
        return cls(count, np.random.default_rng(seed).bytes(count * HASH_BYTES))

    def raw(self, numbers: Sequence[int]) -> list[bytes]:
        """New bytes objects for these hashes."""
        return [self.hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES] for at in numbers]

    def keys(self, numbers: Sequence[int]) -> list[str]:
        """New strings, whose hash nobody has computed yet."""
        return [PREFIX + each.hex() for each in self.raw(numbers)]


def make_pool(objects: int, object_bytes: int = OBJECT_BYTES, *, processes: int = 2) -> Pool:
    """A pool with room for so many objects, its memory mapped."""
    slab_bytes, smallest = pool_geometry(1 << 62, [object_bytes])
    per_slab = slab_bytes // slot_bytes(object_bytes)
    pool = Pool.create_memfd(
        -(-objects // per_slab) * slab_bytes,
        slab_bytes=slab_bytes,
        min_object_bytes=smallest,
        lock_patience_s=5.0,
        processes=processes,
    )
    pool.prefault()
    return pool


def fill(pool: Pool, stock: Stock) -> None:
    """Publishes an object for every key, each chain of a batch from its root to its leaf."""
    ns = pool.namespace("bench")
    for begin in range(0, stock.count, BATCH):
        hashes = stock.raw(range(begin, min(begin + BATCH, stock.count)))
        tickets, outcomes = pool.reserve_raw(ns, PREFIX, hashes, OBJECT_BYTES, [None, *hashes[:-1]])
        require(outcomes, Outcome.RESERVED)
        require(pool.publish(tickets), Outcome.PUBLISHED)


def require(outcomes: npt.NDArray[np.uint8], wanted: int) -> None:
    """A measurement of anything but success would be a lie."""
    if not (outcomes == wanted).all():
        raise InvariantError(f"the pool answered {set(outcomes.tolist())}, not {wanted!r}")
