"""The scheduler's view of node pools with a store behind them."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence

from umbp.data import BlockIdentityCodec, Rank, RankTopology, UMBPNamespace
from umbp.errors import SegmentError
from umbp.pool import Pool
from umbp.runtime.base import HandshakeExtra, LookupState, Wanted
from umbp.runtime.far.counts import FarCounts
from umbp.runtime.far.lookup import FarLookups
from umbp.runtime.far.room import FarRoom
from umbp.runtime.pool_scheduler import PoolBinding, PoolSchedulerHandle
from umbp.store.base import ClusterStore, Outcome
from umbp.store.gate import StoreGate, StoreUnavailable

CLEAR_TIMEOUT_S = 10.0
"""How long a clear of the store is waited for; it is tried again until it has been done."""

HELD_PATIENCE_S = 1.0
"""How long a clear waits for what is just being sent, which takes milliseconds."""

HELD_PAUSE_S = 0.001

LEAVE_S = 2.0


class Clearing:
    """Whether the namespace must be removed from the store before anything there may be believed again. One
    thread owes, any may pay.

    What is just being put when the pools are cleared would come to the store after the removal. Whoever puts
    it holds it in the pool, so the removal waits until nothing that was cleared away is held any more.
    """

    def __init__(self, namespace: UMBPNamespace) -> None:
        self._prefix = BlockIdentityCodec(namespace).namespace_prefix
        self._lock = threading.Lock()
        self._cleared: Collection[tuple[Pool, int]] = ()
        self._owed = 0
        self._paid = 0

    @property
    def is_owed(self) -> bool:
        return self._paid < self._owed

    def owe(self, cleared: Collection[tuple[Pool, int]] = ()) -> None:
        """All that is there by now must go, and what is still on its way there from these pools, which have
        been cleared. A removal that has begun already does not count.
        """
        with self._lock:
            self._cleared = cleared
            self._owed += 1

    def __call__(self, store: ClusterStore) -> bool:
        """Remove it if that is owed; False if it is still owed. The gate asks before it lets anyone in."""
        owed = self._owed
        if self._paid < owed and self._is_let_go() and store.remove_prefix(self._prefix) is Outcome.DONE:
            with self._lock:
                self._paid = max(self._paid, owed)
                if not self.is_owed:
                    self._cleared = ()
        return not self.is_owed

    def wait_let_go(self, patience_s: float) -> bool:
        """Whether nothing that was cleared away is held any more; waits so long for it."""
        until_s = time.monotonic() + patience_s
        while not self._is_let_go():
            if time.monotonic() >= until_s:
                return False
            time.sleep(HELD_PAUSE_S)
        return True

    def _is_let_go(self) -> bool:
        return not any(_is_held(pool, number) for pool, number in self._cleared)


def _is_held(pool: Pool, namespace_id: int) -> bool:
    try:
        return pool.lingering(namespace_id) != 0
    except SegmentError:
        return False  # left, or damaged: nobody can tell any more


class DistributedSchedulerHandle(PoolSchedulerHandle):
    """Asks the pools first, and the store for what they lack."""

    def __init__(
        self,
        namespace: UMBPNamespace,
        topology: RankTopology,
        binding: PoolBinding,
        stored_as: Mapping[Rank, Rank],
        gate: StoreGate,
        clearing: Clearing,
        *,
        timeout_s: float,
        lease_s: float,
        is_async: bool,
        is_shared: bool,
    ) -> None:
        """The gate becomes its own; `clearing` is what that asks before it lets anyone in; `is_shared`: other
        engines store into the same pools.
        """
        self._is_shared = is_shared
        super().__init__(namespace, topology, binding, stored_as)
        self._gate = gate
        self._clearing = clearing
        self._counts = FarCounts(gate.name)
        self._lookups = FarLookups(
            gate,
            self._codec.key_prefix,
            self._counts,
            timeout_s=timeout_s,
            lease_s=lease_s,
            is_async=is_async,
            stored_as=stored_as,
        )
        self.beyond = self._lookups
        self.room = self._far_room = FarRoom()

    @property
    def gate(self) -> StoreGate:
        """The way to the store."""
        return self._gate

    def bind_workers(self, extras: Mapping[Rank, HandshakeExtra]) -> None:
        self._far_room.learn(extras.values())
        super().bind_workers(extras)

    def prepare(self, request_id: str, wanted: Sequence[Wanted], patience_s: float = 0.0) -> bool:
        return self._lookups.prepare(request_id, wanted, self._binding.pools(), patience_s)

    def unprepare(self, request_id: str) -> None:
        self._lookups.forget(request_id)

    def take_counts(self) -> Mapping[tuple[str, ...], float]:
        return self._counts.take(self._gate)

    def lookup(self, keys: Sequence[str]) -> Sequence[bool]:
        hits = list(super().lookup(keys))
        missing = [position for position, hit in enumerate(hits) if not hit]
        names = {position: found[1] for position in missing if (found := self._name_of(keys[position]))}
        if names and self._binding.pools():
            # Several ranks' keys may be of one object.
            asked = list(dict.fromkeys(names.values()))
            found_there = dict(zip(asked, self._lookups.ask_now(asked), strict=True))
            for position, name in names.items():
                hits[position] = found_there[name]
        return hits

    def lookup_states(self, keys: Sequence[str]) -> Sequence[LookupState]:
        states = list(super().lookup_states(keys))
        for row, state in enumerate(states):
            if state is LookupState.MISS and self._is_far(keys[row]):
                states[row] = LookupState.HIT
        return states

    def _is_far(self, key: str) -> bool:
        """Whether the store was found to have it, lately."""
        if (found := self._name_of(key)) is None or not self._binding.pools():
            return False
        prefix, _, name = found[1].rpartition(":")
        try:
            group_id, block_hash = int(prefix.rpartition(":g")[2]), bytes.fromhex(name)
        except ValueError:
            return False
        return bool(self._lookups.knows(found[0], group_id, [block_hash])[0])

    def is_cut_off(self) -> bool:
        return not self._is_shared and not self._gate.is_well

    def disbelieve(self, blocks: Collection[tuple[int, bytes]]) -> None:
        self._lookups.disbelieve(self._binding.pools().keys(), blocks)

    def clear_soon(self) -> None:
        super().clear()
        self._lookups.forget_all()
        self._clearing.owe(self._binding.namespaces())
        # The gate removes what is there before it lets anyone in again.
        self._gate.report_broken()

    def clear(self) -> bool:
        # The pools once more at the end: what is fetched between the two would be old.
        cleared = [super().clear(), self._clear_store(), super().clear()]
        self._lookups.forget_all()
        return all(cleared)

    def _clear_store(self) -> bool:
        self._clearing.owe(self._binding.namespaces())
        if not self._clearing.wait_let_go(HELD_PATIENCE_S):
            self._gate.report_broken()
            return True
        try:
            is_done = self._gate.call(self._clearing, CLEAR_TIMEOUT_S)
        except StoreUnavailable:
            is_done = False
        if not is_done:
            self._gate.report_broken()
        return is_done

    def close(self) -> None:
        super().close()
        self._gate.close(LEAVE_S)
