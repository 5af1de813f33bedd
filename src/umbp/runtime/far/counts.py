"""What a process has done at its store, counted by several threads."""

from __future__ import annotations

import threading
from collections.abc import Mapping


class FarCounts:
    """Running totals by name; they never fall."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, float] = {}

    def add(self, name: str, amount: float) -> None:
        if amount:
            with self._lock:
                self._totals[name] = self._totals.get(name, 0.0) + amount

    def totals(self) -> Mapping[str, float]:
        with self._lock:
            return dict(self._totals)
