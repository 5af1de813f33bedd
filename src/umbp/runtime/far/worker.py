"""A worker's store: fetches what its pools lack, sends what they get."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from umbp.data import LossReason
from umbp.pool import Pool
from umbp.runtime.far.counts import FarCounts
from umbp.runtime.far.debts import Debts
from umbp.runtime.far.fetch import REMOVE_TIMEOUT_S, Brought, Fetcher, why_unavailable
from umbp.runtime.far.registry import RegisteredPools
from umbp.runtime.far.send import Sender
from umbp.runtime.far.turns import Turns
from umbp.runtime.moves import Move
from umbp.store.base import ClusterStore, Outcome, StoreError, StoreTraits
from umbp.store.gate import StoreGate, StoreUnavailable

logger = logging.getLogger("vllm.umbp")

LAST_SENDS_S = 5.0
"""How long an engine that ends still sends what waits."""

LEAVE_S = 2.0
"""How long it waits for a store that may hang."""


class WorkerFar:
    """Implements `umbp.runtime.far.side.FarSide`; its pools are those of one namespace."""

    def __init__(
        self,
        open_gate: Callable[[Callable[[ClusterStore], bool]], StoreGate],
        traits: StoreTraits,
        *,
        timeout_s: float,
        has_checksums: bool,
        sends: bool = True,
    ) -> None:
        """`open_gate` takes what is to be done before the store is used again after a failure; `sends` is
        false where another rank sends the same objects under the same names.
        """
        self._sends = sends
        self._timeout_s = timeout_s
        self._has_checksums = has_checksums
        self._counts = FarCounts(traits.name)
        self._lock = threading.Lock()
        self._fetchers: dict[Pool, Fetcher] = {}
        self._debts = Debts()
        self._gate = open_gate(self._debts.repay)
        self._traits = traits
        self._gets = Turns(traits.calls_at_once)
        self._registered = RegisteredPools(self._gate, traits)
        self._sender = Sender(
            self._gate,
            traits,
            self._counts,
            self._debts,
            self._registered.tell,
            timeout_s=timeout_s,
            has_checksums=has_checksums,
        )

    @property
    def sends_checksums(self) -> bool:
        return self._sends and self._has_checksums

    def flush(self, timeout_s: float) -> bool:
        return self._sender.flush(timeout_s)

    def deadline_s(self) -> float:
        return time.monotonic() + self._timeout_s

    def fetch(self, pool: Pool, namespace_id: int, move: Move, deadline_s: float) -> Brought:
        with self._lock:
            if pool not in self._fetchers:
                fetcher = Fetcher(
                    self._gate,
                    self._traits,
                    self._gets,
                    pool,
                    namespace_id,
                    self._counts,
                    has_checksums=self._has_checksums,
                    doubtful=self._sender.doubtful,
                )
                self._fetchers[pool] = fetcher
            fetcher = self._fetchers[pool]
        try:
            if self._gate.wait_probed(self._probed_until_s(deadline_s) - time.monotonic()):
                self._registered.tell(pool, deadline_s - time.monotonic())
            brought = fetcher.bring(move, deadline_s)
        except StoreUnavailable as unavailable:
            brought = Brought.nothing(len(move.names), why_unavailable(unavailable))
        except StoreError as error:
            brought = Brought.nothing(len(move.names), f"{LossReason.GONE}: {error}")
        self._counts.add("fetched_bytes", int(brought.is_held.sum()) * move.runs.object_bytes)
        for reason, count in brought.reasons().items():
            self._counts.add("failed_fetch_objects", count, reason)
        return brought

    def _probed_until_s(self, deadline_s: float) -> float:
        """How long a load may wait for a store that is left alone to be probed: it was promised, so the
        scheduler found the store well a moment ago. All parts of a load together wait for one probe's time.
        """
        begun_s = deadline_s - self._timeout_s
        return min(deadline_s, begun_s + self._gate.limits.probe_timeout_s)

    def offer(self, pool: Pool, names: Sequence[str]) -> None:
        if self._sends:
            self._sender.offer(pool, names)

    def discard(self, names: Sequence[str]) -> None:
        """Make room in the store for whole ones; nobody waits for it."""
        self._counts.add("failed_fetch_objects", len(names), LossReason.DAMAGED)
        most = self._traits.most_keys

        def remove(store: ClusterStore) -> Sequence[Outcome]:
            parts = (names[first : first + most] for first in range(0, len(names), most))
            return [outcome for part in parts for outcome in store.remove(part)]

        self._gate.start(remove, REMOVE_TIMEOUT_S)

    def leave(self, pool: Pool, close: Callable[[], None]) -> None:
        is_unused = self._sender.forget(pool)
        with self._lock:
            self._fetchers.pop(pool, None)
        # A store that hangs in a transfer may come back to these slots at any time.
        is_unused &= not self._gate.counts().stuck_threads
        if is_unused and self._registered.forget(pool):
            close()
        else:
            logger.warning("UMBP: the store does not let a pool go that isn't used any more; it stays mapped")

    def usage(self) -> Mapping[str, float]:
        return {"send_waiting_objects": float(self._sender.waiting)}

    def take_counts(self) -> Mapping[tuple[str, ...], float]:
        return self._counts.take(self._gate)

    def close(self) -> bool:
        self._sender.close(LAST_SENDS_S if self._gate.is_well else 0.0)
        is_left = self._gate.close(LEAVE_S)
        if is_left:
            self._registered.close()
        else:
            logger.warning("UMBP: the store does not let go; what it may still touch stays mapped")
        return is_left
