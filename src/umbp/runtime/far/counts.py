"""What a process does at its store, counted by several threads."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from umbp.store.gate import StoreGate


class FarCounts:
    """Amounts by counter and labels, collected between two calls of `take`."""

    def __init__(self, tier: str) -> None:
        """`tier` is the first label of all."""
        self._tier = tier
        self._lock = threading.Lock()
        self._amounts: dict[tuple[str, ...], float] = {}
        self._failures_before = 0
        self._open_s_before = 0.0

    def add(self, name: str, amount: float, *reason: str) -> None:
        if amount:
            series = (name, self._tier, *map(str, reason))
            with self._lock:
                self._amounts[series] = self._amounts.get(series, 0.0) + amount

    def take(self, gate: StoreGate) -> Mapping[tuple[str, ...], float]:
        """What was counted since the last call, what befell the gate included."""
        if not gate.is_well or gate.openings != self._failures_before:
            now = gate.counts()
            self.add("store_failures", now.openings - self._failures_before)
            self.add("store_away_seconds", max(now.seconds_open - self._open_s_before, 0.0))
            self._failures_before, self._open_s_before = now.openings, now.seconds_open
        with self._lock:
            taken, self._amounts = self._amounts, {}
        return taken
