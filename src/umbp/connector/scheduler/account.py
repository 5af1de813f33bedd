"""What is in flight between a plan and the reports of all ranks: loads with their promises, stores with their
pins.

Scheduler thread only. An entry is opened once, and closed by the last rank's report.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

from umbp.data import BlockStoreBatch, LossReason, StoreEventResult
from umbp.errors import InvariantError

StoredObject: TypeAlias = tuple[int, bytes]
"""A cache group and the name of a block in it."""


@dataclass(frozen=True, slots=True)
class LoadEntry:
    """One request's load: the blocks it fills, and the promise that keeps its objects in the pool."""

    request_id: str
    owner: str
    block_ids: tuple[int, ...]
    objects: tuple[StoredObject, ...]
    tokens: int
    planned_s: float
    exposed_block_ids: tuple[int, ...] = ()
    """The blocks from the load's first on, where the engine's own cache offers them already."""
    is_again: bool = False
    """The request was admitted before, and what it hit was counted then."""
    others: int = 0
    """How many loads were under way when this one was planned."""
    far_tokens: int = 0
    """So many of its tokens had to be fetched into the pool first."""


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """One step's stores by request: their source blocks are pinned in the engine's pool."""

    batches: Mapping[str, BlockStoreBatch]
    behind: tuple[tuple[int, bytes | None] | None, ...] = ()
    """For blocks that were about to be evicted: the one before each in that order, by id and name."""

    @property
    def block_ids(self) -> list[int]:
        """Every source block, once for each time that it was pinned."""
        return [block_id for batch in self.batches.values() for block_id in batch.block_ids]

    def objects(self) -> Iterator[StoredObject]:
        """What is stored, of every request."""
        for batch in self.batches.values():
            for group_id, name in zip(batch.group_ids, batch.block_hashes, strict=True):
                if name is not None:
                    yield group_id, name

    def tokens_of(self, group_id: int, among: Collection[StoredObject] | None = None) -> int:
        """The tokens of its blocks of one cache group, or of those that are `among` these objects."""
        return sum(
            tokens
            for batch in self.batches.values()
            for group, name, tokens in zip(
                batch.group_ids, batch.block_hashes, batch.block_sizes, strict=True
            )
            if group == group_id and (among is None or (group, name) in among)
        )


Entry = TypeVar("Entry", LoadEntry, StoreEntry)

Close: TypeAlias = Callable[[Entry, StoreEventResult, LossReason], None]


@dataclass(slots=True)
class _Open(Generic[Entry]):
    entry: Entry
    result: StoreEventResult = field(default_factory=StoreEventResult)
    reason: LossReason | None = None


class Ledger(Generic[Entry]):
    """Entries by event number, open until each of `ranks` workers has reported.

    `close(entry, result, reason)` is called exactly once an entry, when the last report is in; `reason` is
    the first that was told for what has failed.
    """

    def __init__(self, ranks: int, close: Close[Entry]) -> None:
        self._ranks = ranks
        self._close: Close[Entry] = close
        self._open: dict[int, _Open[Entry]] = {}
        self._next_event = 0

    def __len__(self) -> int:
        return len(self._open)

    def __repr__(self) -> str:
        return f"Ledger(open={sorted(self._open)}, ranks={self._ranks})"

    def open(self, entry: Entry) -> int:
        """Start an entry; returns its event number, which workers report under."""
        event = self._next_event
        self._next_event += 1
        self._open[event] = _Open(entry)
        return event

    def report(self, event: int, result: StoreEventResult, reason: LossReason | None = None) -> None:
        """Take in what some workers say; a number that isn't open is ignored, as its entry is settled."""
        opened = self._open.get(event)
        if opened is None:
            return
        opened.result.merge(result)
        opened.reason = opened.reason or reason
        if opened.result.completed_workers >= self._ranks:
            del self._open[event]
            self._close(opened.entry, opened.result, opened.reason or LossReason.FAILED)

    def events(self) -> frozenset[int]:
        """The numbers that are open now."""
        return frozenset(self._open)

    def entries(self) -> Iterator[Entry]:
        """What is in flight, oldest first."""
        return (opened.entry for opened in self._open.values())

    def audit(self) -> None:
        """Raise `InvariantError` where an entry should have been closed, or was numbered wrongly."""
        for event, opened in self._open.items():
            if not 0 <= event < self._next_event:
                raise InvariantError(f"event {event} was never opened (next is {self._next_event})")
            if opened.result.completed_workers >= self._ranks:
                raise InvariantError(f"event {event} has all reports and is still open: {opened}")


class Quarantine:
    """Objects that failed to load, not to be promised again for a while. Bounded: the oldest leave first."""

    def __init__(self, clock: Callable[[], float], seconds: float = 30.0, limit: int = 65_536) -> None:
        self._clock = clock
        self._seconds = seconds
        self._limit = limit
        self._until: dict[StoredObject, float] = {}

    def __len__(self) -> int:
        return len(self._until)

    def add(self, one: StoredObject) -> None:
        self._until.pop(one, None)
        while len(self._until) >= self._limit:
            del self._until[next(iter(self._until))]
        self._until[one] = self._clock() + self._seconds

    def clear(self) -> None:
        """Whatever comes under these names from now on is new."""
        self._until.clear()

    def remove(self, one: StoredObject) -> None:
        self._until.pop(one, None)

    def has(self, group_id: int, name: bytes) -> bool:
        self._expire()
        return (group_id, name) in self._until

    def healthy_prefix(self, group_id: int, names: Sequence[bytes]) -> int:
        """How many of a group's leading blocks aren't in quarantine."""
        self._expire()
        if not self._until:
            return len(names)
        return next((i for i, name in enumerate(names) if (group_id, name) in self._until), len(names))

    def _expire(self) -> None:
        now = self._clock()
        while self._until:
            oldest = next(iter(self._until))
            if self._until[oldest] > now:
                return
            del self._until[oldest]
