"""What a store has of the blocks that a scheduler asks for, found out beside it. Scheduler thread, but for
the questions themselves.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from umbp.data import Rank
from umbp.pool import Pool
from umbp.runtime.base import Wanted
from umbp.runtime.far.counts import FarCounts
from umbp.store.base import ClusterStore, Outcome, for_each
from umbp.store.gate import Call, StoreGate, StoreUnavailable

SHORTEST_TRUST_S = 1.0
"""How long an answer counts of a store that gives no lease."""

MOST_KNOWN = 1 << 18
"""Of more answers than so many, those that have expired go."""

PrefixOf = Callable[[int, Rank], str]

Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class _Question:
    """Blocks of one cache group: for each rank under whose keys there are objects, the rows that some pool
    lacks.
    """

    group_id: int
    hashes: Sequence[bytes]
    is_chain: bool
    lacking: Mapping[Rank, npt.NDArray[np.bool_]]


@dataclass(frozen=True, slots=True)
class _About:
    """What a request wants of one cache group, in few words."""

    group_id: int
    blocks: int
    last: bytes


@dataclass(slots=True)
class _Ask:
    """One request's questions, on their way or answered."""

    about: Sequence[_About]
    since_s: float
    """When the request began to wait."""
    call: Call[bool] | None = None
    found: list[tuple[Rank, int, bytes]] = field(default_factory=list)
    """Grows on the gate's thread, batch by batch; what is there at the deadline counts."""
    taken: int = 0

    def covers(self, about: Sequence[_About]) -> bool:
        """Whether these blocks were asked for: the same, or the last of them, as the engine has found more of
        a prompt itself.
        """
        return len(about) == len(self.about) and all(
            new.group_id == old.group_id and new.last == old.last and new.blocks <= old.blocks
            for new, old in zip(about, self.about, strict=True)
        )


class FarLookups:
    """The store's answers, as long as they are good for. What is known of a block is a hint: it protects
    nothing beyond the store's lease, and a load may find the object gone.
    """

    def __init__(
        self,
        gate: StoreGate,
        prefix_of: PrefixOf,
        counts: FarCounts,
        *,
        timeout_s: float,
        lease_s: float,
        is_async: bool,
        stored_as: Mapping[Rank, Rank] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`is_async`: `prepare` returns at once and is to be called again; else it waits for the answers.
        `stored_as` names the rank under whose keys another one's objects are stored; `prefix_of` is asked
        for those alone.
        """
        self._stored_as = stored_as or {}
        self._gate = gate
        self._prefix_of = prefix_of
        self._counts = counts
        self._timeout_s = timeout_s
        self._is_async = is_async
        self._clock = clock
        self._trust_s = max(lease_s / 2, SHORTEST_TRUST_S)
        self._known: dict[tuple[Rank, int, bytes], float] = {}
        """Until when each answer counts; the first to expire stand first."""
        self._asks: dict[str, _Ask] = {}

    def prepare(
        self,
        request_id: str,
        wanted: Sequence[Wanted],
        pools: Mapping[Rank, Pool],
        patience_s: float = 0.0,
    ) -> bool:
        """Whether all is known that can be by now, or after so long, of what the pools lack; False: ask
        again. The same question of the same request is put to the store once, until the request is forgotten.
        Another one, while the first is not answered, has what is left of its time.
        """
        about = [_about(one) for one in wanted]
        ask = self._asks.get(request_id)
        if ask is None or not ask.covers(about):
            since_s = self._clock()
            if ask is not None and not self._take_in(ask):
                since_s = ask.since_s
            questions = [question for one in wanted if (question := self._question(one, pools)) is not None]
            ask = self._asks[request_id] = self._begin(about, questions, since_s)
        if patience_s > 0 and ask.call is not None:
            ask.call.wait(patience_s)
        return self._take_in(ask)

    def forget(self, request_id: str) -> None:
        """The request doesn't ask any more."""
        self._asks.pop(request_id, None)

    def disbelieve(self, ranks: Collection[Rank], blocks: Collection[tuple[int, bytes]]) -> None:
        """These could not be fetched, or not by every rank."""
        for rank in {self._stored(rank) for rank in ranks} if self._known else ():
            for group_id, block_hash in blocks:
                self._known.pop((rank, group_id, block_hash), None)

    def forget_all(self) -> None:
        """Nothing that was found counts any more."""
        self._asks.clear()
        self._known.clear()

    @property
    def known(self) -> int:
        """How many answers are kept."""
        return len(self._known)

    def knows(self, rank: Rank, group_id: int, hashes: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Which of these blocks the store was found to have, lately."""
        if not self._known or not self._gate.is_well:
            return np.zeros(len(hashes), dtype=np.bool_)
        now, known, rank = self._clock(), self._known, self._stored(rank)
        return np.array([known.get((rank, group_id, each), 0.0) > now for each in hashes], dtype=np.bool_)

    def ask_now(self, keys: Sequence[str]) -> Sequence[bool]:
        """Which keys the store has, asked at once; what isn't answered in time is a miss."""
        found: list[bool] = []

        def ask(store: ClusterStore) -> bool:
            most = store.traits.most_keys
            for first in range(0, len(keys), most):
                part = keys[first : first + most]
                found.extend(outcome is Outcome.DONE for outcome in for_each(store.exists(part), len(part)))
            return True

        try:
            self._gate.call(ask, self._timeout_s)
        except StoreUnavailable:
            self._counts.add("store_lookup_failures", 1)
        answers = list(found)
        return answers + [False] * (len(keys) - len(answers))

    # Inside

    def _stored(self, rank: Rank) -> Rank:
        return self._stored_as.get(rank, rank)

    def _question(self, wanted: Wanted, pools: Mapping[Rank, Pool]) -> _Question | None:
        lacking: dict[Rank, npt.NDArray[np.bool_]] = {}
        for rank, pool in pools.items():
            stored = self._stored(rank)
            is_lacking = ~pool.lookup_raw(self._prefix_of(wanted.group_id, stored), wanted.block_hashes)
            rows = np.flatnonzero(is_lacking)
            if len(rows):
                is_lacking[rows] = ~self.knows(
                    stored, wanted.group_id, [wanted.block_hashes[row] for row in rows.tolist()]
                )
            if is_lacking.any():
                # What several pools lack is one object in the store.
                lacking[stored] = lacking[stored] | is_lacking if stored in lacking else is_lacking
        if not lacking:
            return None
        return _Question(wanted.group_id, wanted.block_hashes, wanted.is_chain, lacking)

    def _begin(self, about: Sequence[_About], questions: Sequence[_Question], since_s: float) -> _Ask:
        ask = _Ask(about, since_s)
        left_s = since_s + self._timeout_s - self._clock()
        if not questions or left_s <= 0:
            return ask

        def answer(store: ClusterStore) -> bool:
            return all(self._answer(store, question, ask.found) for question in questions)

        ask.call = self._gate.start(answer, left_s)
        self._counts.add("store_lookups", 1)
        return ask

    def _answer(self, store: ClusterStore, question: _Question, found: list[tuple[Rank, int, bytes]]) -> bool:
        """On a thread of the gate's: ask batch by batch; a chain no further than it can reach."""
        for rows in _row_batches(question, store.traits.most_keys):
            names = [
                (rank, question.hashes[row])
                for row in rows
                for rank, is_lacking in question.lacking.items()
                if is_lacking[row]
            ]
            keys = [self._prefix_of(question.group_id, rank) + each.hex() for rank, each in names]
            outcomes = for_each(store.exists(keys), len(keys))
            self._counts.add("store_lookup_batches", 1)
            self._counts.add("store_lookup_objects", len(keys))
            found += [
                (rank, question.group_id, each)
                for (rank, each), outcome in zip(names, outcomes, strict=True)
                if outcome is Outcome.DONE
            ]
            if any(outcome is Outcome.BROKEN for outcome in outcomes):
                self._gate.report_broken()
                return False
            if question.is_chain and any(outcome is not Outcome.DONE for outcome in outcomes):
                break
        return True

    def _take_in(self, ask: _Ask) -> bool:
        """Learn what has been answered; whether that is all that will be."""
        is_over = ask.call is None or self._is_over(ask, ask.call)
        until_s = self._clock() + self._trust_s
        for name in ask.found[ask.taken :]:
            self._known.pop(name, None)
            self._known[name] = until_s
            ask.taken += 1
        if len(self._known) > MOST_KNOWN:
            self._forget_expired()
        return is_over

    def _forget_expired(self) -> None:
        now = self._clock()
        expired = list(itertools.takewhile(lambda name: self._known[name] <= now, self._known))
        for name in expired:
            del self._known[name]

    def _is_over(self, ask: _Ask, call: Call[bool]) -> bool:
        if self._is_async and not call.is_done:
            return False
        try:
            call.result()
        except StoreUnavailable:
            self._counts.add("store_lookup_failures", 1)
        ask.call = None
        return True


def _about(wanted: Wanted) -> _About:
    hashes = wanted.block_hashes
    return _About(wanted.group_id, len(hashes), hashes[-1] if hashes else b"")


def _row_batches(question: _Question, most_keys: int) -> Iterator[list[int]]:
    """Rows that some pool lacks, in batches of at most so many keys, or of one row."""
    counts = np.zeros(len(question.hashes), dtype=np.intp)
    for is_lacking in question.lacking.values():
        counts += is_lacking
    rows: list[int] = []
    keys = 0
    for row in np.flatnonzero(counts).tolist():
        if rows and keys + counts[row] > most_keys:
            yield rows
            rows, keys = [], 0
        rows.append(row)
        keys += int(counts[row])
    if rows:
        yield rows
