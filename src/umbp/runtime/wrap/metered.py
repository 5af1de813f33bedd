"""A runtime that is counted: calls, items and seconds by verb and outcome.

The connector wraps its runtime once and reads the meter when the engine asks for statistics. Both sides of an
engine may share one process, so the meter has a lock; it is held for additions only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from umbp.data import BlockTransferPlan, RankTopology, TensorLike, TransferJobState
from umbp.runtime.base import IUMBPRuntime, LookupState, UMBPSchedulerHandle, UMBPWorkerHandle
from umbp.runtime.wrap.passing import NotesByJob, PassingRuntime, PassingSchedulerHandle, PassingWorkerHandle

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Tally:
    """The sum of one verb's calls with one outcome; a call's seconds count under each outcome it had."""

    calls: int = 0
    items: int = 0
    seconds: float = 0.0
    bytes: int = 0


class Meter:
    """Tallies by (verb, outcome): the contract's verbs, and hit or miss, completed or failed, or ok."""

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._tallies: dict[tuple[str, str], Tally] = {}

    def add(self, verb: str, outcome: str, items: int, seconds: float, moved_bytes: int = 0) -> None:
        with self._lock:
            old = self._tallies.get((verb, outcome), Tally())
            self._tallies[verb, outcome] = Tally(
                old.calls + 1, old.items + items, old.seconds + seconds, old.bytes + moved_bytes
            )

    def add_split(self, verb: str, good: tuple[str, int], bad: tuple[str, int], seconds: float) -> None:
        """One call that ended both ways for so many items each; a call about nothing counts as good."""
        if good[1] or not bad[1]:
            self.add(verb, good[0], good[1], seconds)
        if bad[1]:
            self.add(verb, bad[0], bad[1], seconds)

    def snapshot(self) -> dict[tuple[str, str], Tally]:
        with self._lock:
            return dict(self._tallies)

    def __repr__(self) -> str:
        lines = (f"{verb} {outcome}: {tally}" for (verb, outcome), tally in sorted(self.snapshot().items()))
        return f"Meter({'; '.join(lines)})"


class MeteredRuntime(PassingRuntime):
    """A runtime whose handles all count into one meter."""

    def __init__(self, inner: IUMBPRuntime, meter: Meter | None = None) -> None:
        super().__init__(inner)
        self.meter = meter or Meter()

    def _around_scheduler(self, inner: UMBPSchedulerHandle, topology: RankTopology) -> UMBPSchedulerHandle:
        return MeteredSchedulerHandle(inner, self.meter)

    def _around_worker(self, inner: UMBPWorkerHandle, topology: RankTopology) -> UMBPWorkerHandle:
        return MeteredWorkerHandle(inner, self.meter)


class MeteredSchedulerHandle(PassingSchedulerHandle):
    """Counts what was asked and how much of it was there."""

    def __init__(self, inner: UMBPSchedulerHandle, meter: Meter) -> None:
        super().__init__(inner)
        self._meter = meter

    def lookup(self, keys: Sequence[str]) -> Sequence[bool]:
        begun = self._meter.clock()
        hits = super().lookup(keys)
        self._count("lookup", sum(hits), len(keys), begun)
        return hits

    def lookup_raw(self, group_id: int, block_hashes: Sequence[bytes]) -> int:
        begun = self._meter.clock()
        hits = super().lookup_raw(group_id, block_hashes)
        self._count("lookup_raw", hits, len(block_hashes), begun)
        return hits

    def present_raw(self, group_id: int, block_hashes: Sequence[bytes]) -> Sequence[bool]:
        begun = self._meter.clock()
        hits = super().present_raw(group_id, block_hashes)
        self._count("present_raw", sum(hits), len(block_hashes), begun)
        return hits

    def lookup_states(self, keys: Sequence[str]) -> Sequence[LookupState]:
        begun = self._meter.clock()
        states = super().lookup_states(keys)
        self._count("lookup_states", sum(s is LookupState.HIT for s in states), len(keys), begun)
        return states

    def hold(self, request_id: str, keys: Sequence[str]) -> int:
        begun = self._meter.clock()
        held = super().hold(request_id, keys)
        self._count("hold", held, len(keys), begun)
        return held

    def hold_raw(self, request_id: str, group_id: int, block_hashes: Sequence[bytes]) -> int:
        begun = self._meter.clock()
        held = super().hold_raw(request_id, group_id, block_hashes)
        self._count("hold_raw", held, len(block_hashes), begun)
        return held

    def unhold(self, request_id: str) -> None:
        begun = self._meter.clock()
        super().unhold(request_id)
        self._meter.add("unhold", "ok", 1, self._meter.clock() - begun)

    def clear(self) -> bool:
        begun = self._meter.clock()
        cleared = super().clear()
        self._meter.add("clear", "ok" if cleared else "failed", 1, self._meter.clock() - begun)
        return cleared

    def take_evicted_keys(self) -> Sequence[str]:
        begun = self._meter.clock()
        keys = super().take_evicted_keys()
        self._meter.add("take_evicted_keys", "ok", len(keys), self._meter.clock() - begun)
        return keys

    def watch(self, group_id: int, block_hashes: Sequence[bytes]) -> Sequence[bool]:
        begun = self._meter.clock()
        hits = super().watch(group_id, block_hashes)
        self._count("watch", sum(hits), len(block_hashes), begun)
        return hits

    def take_lost(self) -> Sequence[tuple[int, bytes]]:
        begun = self._meter.clock()
        lost = super().take_lost()
        self._meter.add("take_lost", "ok", len(lost), self._meter.clock() - begun)
        return lost

    def _count(self, verb: str, hits: int, asked: int, begun: float) -> None:
        self._meter.add_split(verb, ("hit", hits), ("miss", asked - hits), self._meter.clock() - begun)


class MeteredWorkerHandle(PassingWorkerHandle):
    """Counts a job once, when its end is first told, with the seconds since it was begun."""

    def __init__(self, inner: UMBPWorkerHandle, meter: Meter) -> None:
        super().__init__(inner)
        self._meter = meter
        self._begun: NotesByJob[tuple[str, float]] = NotesByJob()

    def register_buffers(self, kv_caches: Mapping[str, TensorLike]) -> None:
        begun = self._meter.clock()
        super().register_buffers(kv_caches)
        self._meter.add("register_buffers", "ok", len(kv_caches), self._meter.clock() - begun)

    def load(self, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        begun = self._meter.clock()
        job = super().load(plans)
        self._begun[job] = ("load", begun)
        return job

    def store(self, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        begun = self._meter.clock()
        job = super().store(plans)
        self._begun[job] = ("store", begun)
        return job

    def wait(self, job: TransferJobState) -> TransferJobState:
        return self._ended(super().wait(job))

    def poll(self, job: TransferJobState) -> TransferJobState | None:
        final = super().poll(job)
        return None if final is None else self._ended(final)

    def publish(self, job: TransferJobState) -> None:
        begun = self._meter.clock()
        published = False
        try:
            super().publish(job)
            published = True
        finally:
            outcome = "ok" if published else "failed"
            self._meter.add("publish", outcome, len(job.completed_keys), self._meter.clock() - begun)

    def _ended(self, job: TransferJobState) -> TransferJobState:
        note = self._begun.pop(job)
        if note is not None:
            verb, begun = note
            seconds = self._meter.clock() - begun
            lost = len(job.keys - job.completed_keys)
            if lost < len(job.keys) or not lost:
                moved = len(job.keys) - lost
                self._meter.add(verb, "completed", moved, seconds, job.completed_bytes)
            if lost:
                self._meter.add(verb, "failed", lost, seconds)
        return job
