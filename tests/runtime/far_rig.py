"""A pool with a cluster in memory behind it, for tests of what moves objects between the two."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence

import numpy as np

from umbp.pool import Pool
from umbp.runtime.far.worker import WorkerFar
from umbp.runtime.mover import Moved, ObjectMover
from umbp.runtime.moves import Move
from umbp.store.base import ClusterStore, Outcome, StoreTraits
from umbp.store.gate import StoreGate
from umbp.testing.stores.memory import TRAITS, MemoryCluster, MemoryStore
from umbp.transfer import BlockRuns, CopyEngine

SIZE = 4096
LONG_S = 30.0
"""More than any of these tests takes."""


class RigStore(MemoryStore):
    """Tells when it has removed something, and may have no time for it at first."""

    def __init__(self, cluster: MemoryCluster, removed: threading.Event, laters: int) -> None:
        super().__init__(cluster)
        self._removed = removed
        self._laters = laters

    def remove(self, keys: Sequence[str]) -> list[Outcome]:
        if self._laters:
            self._laters -= 1
            return [Outcome.LATER] * len(keys)
        outcomes = super().remove(keys)
        self._removed.set()
        return outcomes


class Rig:
    """A pool, and a cluster behind it."""

    def __init__(self, traits: StoreTraits = TRAITS) -> None:
        self.cluster = MemoryCluster(traits)
        self.pool = Pool.create_memfd(1 << 20, slab_bytes=1 << 16, min_object_bytes=SIZE)
        self.ns = self.pool.namespace("n")
        self.removed = threading.Event()
        self.laters = 0
        """So many removals of a connection are not possible at first."""
        self.gates: list[StoreGate] = []

    def connect(self) -> MemoryStore:
        self.cluster.stores.append(RigStore(self.cluster, self.removed, self.laters))
        return self.cluster.stores[-1]

    def gate(self, before_return: Callable[[ClusterStore], bool] | None = None) -> StoreGate:
        self.gates.append(StoreGate("memory", self.connect, before_return=before_return))
        self.gates[-1].open(LONG_S)
        return self.gates[-1]

    def far(self, timeout_s: float = LONG_S) -> WorkerFar:
        return WorkerFar(self.gate, self.cluster.traits, timeout_s=timeout_s, has_checksums=True)

    def put(self, names: Sequence[str], fill: int) -> None:
        tickets, _ = self.pool.reserve(self.ns, names, SIZE)
        for address in self.pool.payload(tickets)[0].tolist():
            ctypes.memset(address, fill, SIZE)
        self.pool.publish(tickets)

    def load(self, far: WorkerFar, names: Sequence[str]) -> Moved:
        """Fetch objects, and load them into an engine's blocks."""
        memory = np.zeros(len(names) * SIZE, np.uint8)
        runs = BlockRuns.from_columns([int(memory.ctypes.data)], [SIZE], [SIZE], [0], len(names))
        move = Move(runs, names, range(len(names)), names)
        with CopyEngine(1) as engine:
            mover = ObjectMover(self.pool, self.ns, engine, has_checksums=False, told_damaged=far.discard)
            brought = far.fetch(self.pool, self.ns, move, far.deadline_s())
            return mover.load_held(move, brought.tickets, brought.is_held, None)

    def clear(self) -> None:
        """As a reset does: the pool, then the store."""
        self.pool.clear(self.ns)
        self.cluster.objects.clear()

    def close(self) -> None:
        self.cluster.go_on()
        for gate in self.gates:
            gate.close(1.0)
        assert not self.cluster.misuses


def move_of(names: Sequence[str]) -> Move:
    """These objects, into the blocks of an engine whose memory nobody touches."""
    runs = BlockRuns.from_columns([1 << 20], [SIZE], [SIZE], [0], len(names))
    return Move(runs, names, range(len(names)), names)
