"""Which objects a connector has reason to doubt: a model, apart from its own, of what failed loads teach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from umbp.connector.scheduler import SchedulerSide
from umbp.connector.scheduler.account import LoadEntry, StoreEntry
from umbp.data import LossReason, StoreEventResult

DOUBTED_S = 30.0


@dataclass(frozen=True, slots=True)
class _Moment:
    """When something was, also among what was at the same time."""

    number: int
    now_s: float


class Doubts:
    """Watches a scheduler's half: what a load has lost may not be promised again for a while, unless it has
    been stored anew or the whole pool was emptied.
    """

    def __init__(self, side: SchedulerSide, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._moments = 0
        self._lost: dict[tuple[int, bytes], _Moment] = {}
        self._promised: dict[str, _Moment] = {}
        self._reset_s = float("-inf")
        watched: Any = side
        before(watched._matcher._finder, "hold", self._promise)
        before(watched._loads, "open", self._load)
        before(watched._loads, "_close", self._load_ended)
        before(watched._stores, "_close", self._store_ended)
        before(watched, "reset", self._forget)

    def _now(self) -> _Moment:
        self._moments += 1
        return _Moment(self._moments, self._clock())

    def _promise(self, owner: str, *rest: object) -> None:
        self._promised[owner] = self._now()

    def _load(self, entry: LoadEntry) -> None:
        promised = self._promised[entry.owner]
        for one in entry.objects:
            lost = self._lost.get(one)
            assert (
                lost is None or promised.number < lost.number or promised.now_s >= lost.now_s + DOUBTED_S
            ), f"request {entry.request_id} is promised {one}, which was lost at {lost} and not stored since"

    def _load_ended(self, entry: LoadEntry, result: StoreEventResult, reason: LossReason) -> None:
        if entry.planned_s > self._reset_s:
            self._lost.update(dict.fromkeys(result.failed_objects, self._now()))

    def _store_ended(self, entry: StoreEntry, result: StoreEventResult, reason: LossReason) -> None:
        for one in set(entry.objects()) - result.failed_objects:
            self._lost.pop(one, None)

    def _forget(self) -> None:
        self._lost.clear()
        self._reset_s = self._clock()


def before(watched: Any, name: str, see: Callable[..., None]) -> None:
    """Let `see` have a look at the arguments of a method first."""
    method = getattr(watched, name)

    def seen(*arguments: Any) -> Any:
        see(*arguments)
        return method(*arguments)

    setattr(watched, name, seen)
