"""What was cleared away while it was being sent, and must not stay in the store."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

from umbp.store import base
from umbp.store.base import ClusterStore


class Debts:
    """What must be removed from the store before anything may be fetched from it again. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[int, str] = {}
        """By a number of its own: what was put again while it was being removed is owed again."""
        self._numbers = itertools.count()

    def owe(self, names: Sequence[str]) -> None:
        """These were cleared away from the pool while they were being sent."""
        with self._lock:
            self._names.update({next(self._numbers): name for name in names})

    def repay(self, store: ClusterStore) -> bool:
        """Remove them; False if they couldn't be."""
        with self._lock:
            owed = dict(self._names)
        names = list(dict.fromkeys(owed.values()))
        most = store.traits.most_keys
        for first in range(0, len(names), most):
            if any(outcome is not base.Outcome.DONE for outcome in store.remove(names[first : first + most])):
                return False
        with self._lock:
            # Somebody else may have paid some of them meanwhile.
            for number in owed:
                self._names.pop(number, None)
        return True

    @property
    def is_owed(self) -> bool:
        """Whether something is still to be removed."""
        return bool(self._names)

    def names(self) -> set[str]:
        """What is still to be removed."""
        with self._lock:
            return set(self._names.values())
