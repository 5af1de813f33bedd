"""What questions cost, part of `umbp bench store`: of a request whose blocks are in the store, and of one
whose blocks are all in the pool.
"""

from __future__ import annotations

import contextlib
import mmap
import secrets
import statistics
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from umbp.cli.bench.report import Row, rounded
from umbp.cli.bench.stock import HASH_BYTES, OBJECT_BYTES, make_pool, require
from umbp.cli.bench.store_clients import TIMEOUT_MS, BareClient, bare_client
from umbp.cli.bench.timing import Times, timed
from umbp.data import Rank
from umbp.errors import InvariantError
from umbp.options import Options
from umbp.pool import Outcome, Pool
from umbp.runtime.base import Wanted
from umbp.runtime.far.counts import FarCounts
from umbp.runtime.far.lookup import FarLookups
from umbp.store import base
from umbp.store.base import ClusterStore, StoreTraits
from umbp.store.factory import create_store
from umbp.store.gate import StoreGate

RANK: Rank = (0, 0, 0, 0)


class CountedStore:
    """A store whose questions are counted; the verbs are those of `ClusterStore`."""

    def __init__(self, inner: ClusterStore) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self.asked = 0
        """Calls of `exists`, each one round trip."""

    @property
    def traits(self) -> StoreTraits:
        return self._inner.traits

    def open(self) -> None:
        self._inner.open()

    def register(self, address: int, size: int) -> None:
        self._inner.register(address, size)

    def unregister(self, address: int, size: int) -> None:
        self._inner.unregister(address, size)

    def exists(self, keys: Sequence[str]) -> Sequence[base.Outcome]:
        with self._lock:
            self.asked += 1
        return self._inner.exists(keys)

    def put(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> Sequence[base.Outcome]:
        return self._inner.put(keys, addresses, sizes)

    def get(
        self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
    ) -> Sequence[base.Outcome]:
        return self._inner.get(keys, addresses, sizes)

    def remove(self, keys: Sequence[str]) -> Sequence[base.Outcome]:
        return self._inner.remove(keys)

    def remove_prefix(self, prefix: str) -> base.Outcome:
        return self._inner.remove_prefix(prefix)

    def probe(self) -> bool:
        return self._inner.probe()

    def describe(self) -> Mapping[str, str]:
        return self._inner.describe()

    def close(self) -> None:
        self._inner.close()


@dataclass(frozen=True, slots=True)
class _Asker:
    """One scheduler's questions, and the bare client's."""

    lookups: FarLookups
    store: CountedStore
    bare: BareClient
    prefix: str

    def ask(self, hashes: Sequence[bytes], pool: Pool) -> tuple[float, int]:
        """Seconds and round trips of one request's question."""
        self.lookups.forget_all()
        before = self.store.asked
        wanted = [Wanted(0, hashes, is_chain=True)]
        is_over, taken_s = timed(lambda: self.lookups.prepare("bench", wanted, {RANK: pool}))
        if not is_over:
            raise InvariantError("the questions had not been answered in time")
        return taken_s, self.store.asked - before

    def ask_bare(self, hashes: Sequence[bytes]) -> float:
        found, taken_s = timed(lambda: self.bare.count([self.prefix + each.hex() for each in hashes]))
        if found != len(hashes):
            raise InvariantError("the bare client did not find a stored key")
        return taken_s


def lookup_rows(keys: Sequence[int], options: Options, where: str, rounds: int) -> Iterator[Row]:
    """Rows for so many keys each: what the pool lacks and the store has, and what the pool has."""
    most = max(keys)
    raw = np.random.default_rng().bytes(most * HASH_BYTES)
    hashes = [raw[at : at + HASH_BYTES] for at in range(0, len(raw), HASH_BYTES)]
    with _asker(hashes, options, where) as asker, make_pool(1) as empty, make_pool(most) as full:
        tickets, outcomes = full.reserve_raw(full.namespace("bench"), asker.prefix, hashes, OBJECT_BYTES)
        require(outcomes, Outcome.RESERVED)
        require(full.publish(tickets), Outcome.PUBLISHED)
        for count in keys:
            asked = hashes[:count]
            far, near, bare = [], [], []
            trips: dict[str, int] = {}
            for number in range(rounds + 1):
                far_s, trips["far"] = asker.ask(asked, empty)
                if not asker.lookups.knows(RANK, 0, asked).all():
                    raise InvariantError("a stored key was not found")
                bare_s = asker.ask_bare(asked)
                near_s, trips["near"] = asker.ask(asked, full)
                if number:
                    far.append(far_s)
                    bare.append(bare_s)
                    near.append(near_s)
            ratios = [theirs / ours for theirs, ours in zip(bare, far, strict=True)]
            yield _row("lookup", count, far, trips["far"]) | {
                "ratio_to_bare_client": rounded(statistics.median(ratios)),
            }
            yield _row("near_lookup", count, near, trips["near"])


def _row(op: str, keys: int, seconds: Sequence[float], round_trips: int) -> dict[str, str | int | float]:
    times = Times(tuple(seconds))
    return {
        "op": op,
        "objects": keys,
        "object_bytes": OBJECT_BYTES,
        "ms": rounded(times.median_s * 1e3),
        "round_trips": round_trips,
        "spread": rounded(times.spread),
    }


@contextlib.contextmanager
def _asker(hashes: Sequence[bytes], options: Options, where: str) -> Iterator[_Asker]:
    """The hashes are stored, as objects of the same few bytes, while the context lasts."""
    prefix = f"umbp:vllm:v1:{secrets.token_hex(16)}:tp0:pcp0:dcp0:pp0:g0:"
    keys = [prefix + each.hex() for each in hashes]
    content = np.frombuffer(mmap.mmap(-1, OBJECT_BYTES), np.uint8)
    address = int(content.ctypes.data)
    store = CountedStore(create_store(options, serves_memory=False))
    gate = StoreGate(store.traits.name, lambda: store)
    gate.open(TIMEOUT_MS / 1000)
    try:
        with bare_client(options.store or "", where, address, content.size) as bare:
            bare.put(keys, [address] * len(keys), OBJECT_BYTES)
            lookups = FarLookups(
                gate,
                lambda group_id, rank: prefix,
                FarCounts("bench"),
                timeout_s=TIMEOUT_MS / 1000,
                lease_s=store.traits.lease_s,
                is_async=False,
            )
            yield _Asker(lookups, store, bare, prefix)
            bare.remove(keys)
    finally:
        gate.close(TIMEOUT_MS / 1000)
