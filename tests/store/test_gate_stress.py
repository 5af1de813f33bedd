"""Many threads, real time, and a store that hangs, breaks and comes back under them: each call ends once."""

from __future__ import annotations

import contextlib
import random
import threading
from collections import Counter

import pytest

from umbp.store.base import ClusterStore, Outcome, StoreError
from umbp.store.gate import Backoff, GateLimits, StoreGate, StoreUnavailable
from umbp.testing.stores.memory import VERBS, MemoryCluster

WAIT_S = 60.0
CALLERS = 4
CALLS = 150
FAST = Backoff(first_s=0.001, most_s=0.004, steady_s=0.05)
LIMITS = GateLimits(
    most_threads=3,
    most_waiting=3,
    most_held=2,
    patience=2,
    least_silence_s=0.001,
    probe_timeout_s=0.004,
    open_timeout_s=0.01,
)


class Ledger:
    """How each call ended for whoever lent it memory, and which verbs are inside the store."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.ends: Counter[str] = Counter()
        self.inside: set[str] = set()
        self.faults: list[str] = []

    def goes_in(self, token: str) -> None:
        with self._changed:
            self.inside.add(token)
            if self.ends[token]:
                self.faults.append(f"{token} went in after its end")

    def comes_out(self, token: str) -> None:
        with self._changed:
            self.inside.remove(token)

    def ended(self, token: str) -> None:
        """Its memory is the caller's again."""
        with self._changed:
            self.ends[token] += 1
            if token in self.inside:
                self.faults.append(f"{token} ended while it was inside the store")
            self._changed.notify_all()

    def wait_all(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.ends) == count, WAIT_S)
        assert set(self.ends.values()) == {1}
        assert self.faults == []
        assert self.inside == set()


class Caller:
    """One thread that asks, waits, gives up, and now and then changes what is wrong with the cluster."""

    def __init__(self, gate: StoreGate, cluster: MemoryCluster, ledger: Ledger, rng: random.Random) -> None:
        self._gate = gate
        self._cluster = cluster
        self._ledger = ledger
        self._rng = rng

    def run(self, name: str) -> None:
        try:
            for number in range(CALLS):
                if self._rng.random() < 0.1:
                    self._disturb()
                self._ask(f"{name}.{number}")
                if not self._gate.is_well and self._rng.random() < 0.8:
                    self._await_return()
                self._gate.audit()
        except BaseException as error:  # noqa: BLE001 # told by the test
            self._ledger.faults.append(repr(error))

    def _await_return(self) -> None:
        if self._rng.random() < 0.5:
            self._gate.wait_probed(0.01)
            return
        with contextlib.suppress(StoreError):
            self._gate.open(0.01)

    def _disturb(self) -> None:
        what = self._rng.random()
        if what < 0.25:
            self._cluster.hang(self._rng.choice(VERBS))
        elif what < 0.35:
            self._cluster.is_down = True
        elif what < 0.45:
            self._cluster.stores[-1].is_broken = True
        else:
            self._cluster.is_down = False
            self._cluster.go_on()

    def _ask(self, token: str) -> None:
        def verb(store: ClusterStore) -> list[Outcome]:
            self._ledger.goes_in(token)
            try:
                outcomes = list(store.exists([token]))
                if token.endswith("77"):
                    raise OSError(token)
                return outcomes
            finally:
                self._ledger.comes_out(token)

        call = self._gate.start(
            verb, self._rng.choice([0.0, 0.001, 0.005]), lambda _: self._ledger.ended(token)
        )
        if self._rng.random() < 0.2:
            call.give_up()
            return
        try:
            assert len(call.result()) == 1
        except StoreUnavailable:
            return
        self._ledger.ended(token)


def comes_back(gate: StoreGate) -> bool:
    """Whether the store answers after some calls at most: the connection may be broken without anybody's
    knowing.
    """
    for _ in range(10):
        gate.open(WAIT_S)
        with contextlib.suppress(StoreUnavailable):
            if gate.call(lambda store: store.exists(["k"]), WAIT_S) == [Outcome.MISS]:
                return True
    return False


def one_run(seed: int) -> None:
    rng = random.Random(seed)
    cluster, ledger = MemoryCluster(), Ledger()
    gate = StoreGate("memory", cluster.connect, limits=LIMITS, backoff=FAST, seed=seed)
    gate.open(WAIT_S)
    callers = [Caller(gate, cluster, ledger, random.Random(rng.random())) for _ in range(CALLERS)]
    threads = [threading.Thread(target=caller.run, args=(f"{seed}.{n}",)) for n, caller in enumerate(callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    cluster.is_down = False
    cluster.go_on()
    ledger.wait_all(CALLERS * CALLS)
    assert comes_back(gate)
    gate.audit()
    assert gate.close(WAIT_S)
    gate.audit()
    assert all(store.is_closed or "open" not in store.calls for store in cluster.stores)
    assert cluster.misuses == []


@pytest.mark.parametrize("seed", range(2))
def test_each_call_ends_once_whatever_becomes_of_the_store(seed: int) -> None:
    one_run(seed)


@pytest.mark.slow
def test_each_call_ends_once_in_many_runs() -> None:
    for seed in range(100, 110):
        one_run(seed)
