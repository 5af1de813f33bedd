"""The scheduler's view of node pools: it attaches to what the workers made and asks them directly.

Lookups read the pools' indexes without a lock; holds are pins of the scheduler's own. Runs on the engine
core's one thread.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from umbp.data import BlockIdentityCodec, Rank, RankTopology, UMBPNamespace
from umbp.errors import SegmentError
from umbp.pool import KeyState, Outcome, Pool
from umbp.pool.pool import Tickets
from umbp.runtime.base import HandshakeExtra, LookupState, NotePhase
from umbp.runtime.removed_keys import RemovedKeys
from umbp.runtime.to_fetch import ToFetch

_STATES = {
    KeyState.ABSENT: LookupState.MISS,
    KeyState.RESERVED: LookupState.PENDING,
    KeyState.PUBLISHED: LookupState.HIT,
}


class PoolBinding(Protocol):
    """Which pools hold the ranks' objects at this moment."""

    def bind(self, extras: Mapping[Rank, HandshakeExtra]) -> None:
        """Attach to what the workers made; `UMBPError` names the rank that can't be reached."""
        ...

    def pools(self) -> Mapping[Rank, Pool]:
        """By rank; one pool that several share is there for each rank under whose keys it has objects. Empty
        while there is none. Never raises.

        A pool that was replaced is left to whoever still holds tickets of it.
        """
        ...

    def clear(self) -> bool:
        """Remove the namespace's objects from all of them."""
        ...

    def namespaces(self) -> Collection[tuple[Pool, int]]:
        """Each of these pools with the number of the namespace in it. Never raises."""
        ...

    def close(self) -> None:
        """Leave them all."""
        ...


class Beyond(Protocol):
    """What is known of a store behind the pools."""

    def knows(self, rank: Rank, group_id: int, block_hashes: Sequence[bytes]) -> npt.NDArray[np.bool_]:
        """Which of these blocks can be fetched into the rank's pool, as far as is known."""
        ...


class Room(Protocol):
    """How much can be fetched at once."""

    def blocks(self, pools: Mapping[Rank, Pool], group_id: int, promised: Mapping[int, int]) -> int | None:
        """How many blocks of a cache group the pools can take, beside those that are `promised` by cache
        group; None where that isn't known.
        """
        ...


class PoolSchedulerHandle:
    """The pools of all ranks as one. Misses everything until `bind_workers`."""

    beyond: Beyond | None = None
    """What the pools lack and it knows of counts as there by raw hashes; holds protect what pools have."""

    room: Room | None = None
    """Holds promise no more of what the pools lack than it has room for."""

    def __init__(
        self,
        namespace: UMBPNamespace,
        topology: RankTopology,
        binding: PoolBinding,
        stored_as: Mapping[Rank, Rank] | None = None,
    ) -> None:
        """`stored_as` names, for ranks that hold the same as another, the rank that stands for them: its keys
        are those of their objects, in whichever pool.
        """
        self._codec = BlockIdentityCodec(namespace)
        self._binding = binding
        self._stored_as = {rank: rank for rank in topology.all_namespaces()} | dict(stored_as or {})
        self._prefixes: dict[str, tuple[Rank, str] | None] = {}
        self._held: dict[str, list[tuple[Pool, Tickets]]] = {}
        self._held_keys: dict[str, set[str]] = {}
        self._to_fetch = ToFetch()
        self._noted: RemovedKeys | None = None
        self._watched: RemovedKeys | None = None

    def bind_workers(self, extras: Mapping[Rank, HandshakeExtra]) -> None:
        self._give_back_all()
        self._binding.bind(extras)

    def lookup(self, keys: Sequence[str]) -> Sequence[bool]:
        hits = np.zeros(len(keys), dtype=np.bool_)
        for pool, rows, names in self._by_pool(keys):
            hits[rows] = pool.lookup(names)
        answer: list[bool] = hits.tolist()
        return answer

    def lookup_states(self, keys: Sequence[str]) -> Sequence[LookupState]:
        states = np.full(len(keys), KeyState.ABSENT, dtype=np.uint8)
        for pool, rows, names in self._by_pool(keys):
            states[rows] = pool.states(names)
        return [_STATES[KeyState(state)] for state in states.tolist()]

    def _by_pool(self, keys: Sequence[str]) -> Iterator[tuple[Pool, list[int], list[str]]]:
        """Each pool with the rows of the keys that are kept there, and their names there."""
        rows: dict[Rank, list[int]] = {}
        names: dict[Rank, list[str]] = {}
        pools = self._binding.pools()
        for row, key in enumerate(keys):
            if (found := self._name_of(key)) is not None:
                keeper = self._kept_by(pools, found[0])
                rows.setdefault(keeper, []).append(row)
                names.setdefault(keeper, []).append(found[1])
        return ((pools[rank], rows[rank], names[rank]) for rank in rows if rank in pools)

    def _kept_by(self, pools: Mapping[Rank, Pool], rank: Rank) -> Rank:
        """The rank by which the pool is known that has this rank's objects."""
        return rank if rank in pools else self._stored_as[rank]

    def _prefix(self, group_id: int, rank: Rank) -> str:
        """What the rank's objects have before their hash, in its pool and beyond."""
        return self._codec.key_prefix(group_id, self._stored_as[rank])

    def lookup_raw(self, group_id: int, block_hashes: Sequence[bytes]) -> int:
        return self._match(self._binding.pools(), group_id, block_hashes)

    def present_raw(self, group_id: int, block_hashes: Sequence[bytes]) -> Sequence[bool]:
        pools = self._binding.pools()
        present = np.full(len(block_hashes), bool(pools))
        for rank, pool in pools.items():
            present &= self._found(rank, pool, group_id, block_hashes)
        answer: list[bool] = present.tolist()
        return answer

    def _present_here(
        self, pools: Mapping[Rank, Pool], group_id: int, block_hashes: Sequence[bytes]
    ) -> list[bool]:
        present = np.full(len(block_hashes), bool(pools))
        for rank, pool in pools.items():
            present &= pool.lookup_raw(self._prefix(group_id, rank), block_hashes)
        answer: list[bool] = present.tolist()
        return answer

    def _found(
        self, rank: Rank, pool: Pool, group_id: int, block_hashes: Sequence[bytes]
    ) -> npt.NDArray[np.bool_]:
        """Which of these blocks the rank's pool has, or can be given."""
        is_here = pool.lookup_raw(self._prefix(group_id, rank), block_hashes)
        return is_here if self.beyond is None else self._or_beyond(is_here, rank, group_id, block_hashes)

    def _or_beyond(
        self, is_here: npt.NDArray[np.bool_], rank: Rank, group_id: int, block_hashes: Sequence[bytes]
    ) -> npt.NDArray[np.bool_]:
        rows = np.flatnonzero(~is_here)
        if self.beyond is None or not len(rows):
            return is_here
        is_found = is_here.copy()
        is_found[rows] = self.beyond.knows(rank, group_id, [block_hashes[row] for row in rows.tolist()])
        return is_found

    def _match(self, pools: Mapping[Rank, Pool], group_id: int, block_hashes: Sequence[bytes]) -> int:
        if not pools:
            return 0
        hashes = list(block_hashes)
        for rank, pool in pools.items():
            if not hashes:
                return 0
            if self.beyond is None:
                del hashes[pool.match(self._prefix(group_id, rank), hashes) :]
            else:
                del hashes[_leading(self._found(rank, pool, group_id, hashes)) :]
        return len(hashes)

    def hold(self, request_id: str, keys: Sequence[str]) -> int:
        held = self._held_keys.get(request_id, set())
        pools = self._binding.pools()
        taken: dict[str, tuple[Pool, Tickets]] = {}
        present = 0
        try:
            for key in keys:
                if key not in held and key not in taken:
                    if (one := self._acquire_one(pools, key)) is None:
                        break
                    taken[key] = one
                present += 1
        except BaseException:
            _give_back(list(taken.values()))
            raise
        if taken:
            self._held_keys.setdefault(request_id, set()).update(taken)
            self._held.setdefault(request_id, []).extend(taken.values())
        return present

    def _acquire_one(self, pools: Mapping[Rank, Pool], key: str) -> tuple[Pool, Tickets] | None:
        found = self._name_of(key)
        pool = None if found is None else pools.get(self._kept_by(pools, found[0]))
        if found is None or pool is None:
            return None
        tickets, outcomes = pool.acquire([found[1]])
        return (pool, tickets) if outcomes[0] == Outcome.HIT else None

    def hold_raw(self, request_id: str, group_id: int, block_hashes: Sequence[bytes]) -> int:
        pools = self._binding.pools()
        taken: list[tuple[Pool, Tickets]] = []
        try:
            count = self._acquire(pools, group_id, block_hashes, taken)
            lacking = _lacking(taken, count)
            if lacking:
                count = self._with_room(pools, group_id, block_hashes, count, lacking)
        except BaseException:
            _give_back(taken)
            raise
        # What a later rank lost since the lookup, or what can't be fetched, the others need not keep.
        _give_back([(pool, tickets[count:]) for pool, tickets in taken])
        if count:
            self._held.setdefault(request_id, []).extend(
                (pool, _given(tickets[:count])) for pool, tickets in taken
            )
        if absent := [block_hashes[row] for row in lacking if row < count]:
            self._to_fetch.add(request_id, group_id, absent)
        return count

    def _acquire(
        self,
        pools: Mapping[Rank, Pool],
        group_id: int,
        block_hashes: Sequence[bytes],
        taken: list[tuple[Pool, Tickets]],
    ) -> int:
        """How many leading blocks every rank has or can be given; what was `taken` for them, and maybe for
        more, with ticket 0 for what is not in the pool. The caller gives all of it back, also after an error.
        """
        count = self._match(pools, group_id, block_hashes)
        for rank, pool in pools.items():
            if count == 0:
                break
            tickets, outcomes = pool.acquire_raw(self._prefix(group_id, rank), list(block_hashes[:count]))
            taken.append((pool, tickets))
            is_hit = outcomes == Outcome.HIT
            count = _leading(self._or_beyond(is_hit, rank, group_id, block_hashes[:count]))
        return count

    def _with_room(
        self,
        pools: Mapping[Rank, Pool],
        group_id: int,
        block_hashes: Sequence[bytes],
        count: int,
        lacking: Sequence[int],
    ) -> int:
        """How many of so many leading blocks, of which some are `lacking`, the pools have room for."""
        room = None if self.room is None else self.room.blocks(pools, group_id, self._to_fetch.all())
        if room is None or len(lacking) <= room:
            return count
        new = self._to_fetch.new(group_id, [block_hashes[row] for row in lacking])
        return count if len(new) <= room else lacking[new[room]]

    def unhold(self, request_id: str) -> None:
        self._held_keys.pop(request_id, None)
        self._to_fetch.forget(request_id)
        _give_back(self._held.pop(request_id, ()))

    def to_fetch(self, request_id: str) -> Mapping[int, int]:
        return self._to_fetch.of(request_id)

    def note(
        self,
        request_id: str,
        phase: NotePhase,
        block_hashes: Sequence[bytes],
        output_tokens: int = 0,
        finish: str = "",
        group_id: int = 0,
    ) -> None:
        hashes = list(block_hashes)
        pools = self._binding.pools()
        if self._noted is not None:
            self._noted.learn(pools, group_id, hashes)
        for rank, pool in pools.items():
            pool.note_raw(self._prefix(group_id, rank), hashes, phase, output_tokens, finish)

    def take_evicted_keys(self) -> Sequence[str]:
        pools = self._binding.pools()
        if self._noted is None:
            self._noted = RemovedKeys(self._prefix)
        return [
            self._codec.key_for_namespace(block_hash, group_id, rank)
            for rank, group_id, block_hash in self._noted.take(pools)
        ]

    def watch(self, group_id: int, block_hashes: Sequence[bytes]) -> Sequence[bool]:
        pools = self._binding.pools()
        if self._watched is None:
            self._watched = RemovedKeys(self._prefix)
        # Followed before the lookup, so that what goes between it and the learning is told.
        self._watched.follow(pools)
        # Told of is what the pools have; what is beyond them goes without telling.
        present = self._present_here(pools, group_id, block_hashes)
        there = [block for block, is_there in zip(block_hashes, present, strict=True) if is_there]
        if there:
            self._watched.learn(pools, group_id, there)
            if self._noted is not None:
                self._noted.learn(pools, group_id, there)
        return present

    def take_lost(self) -> Sequence[tuple[int, bytes]]:
        if self._watched is None:
            return []
        removed = self._watched.take(self._binding.pools())
        lost = list(dict.fromkeys((group_id, block_hash) for _, group_id, block_hash in removed))
        for group_id in {group_id for group_id, _ in lost}:
            # What other ranks still have of these is of no use to anyone.
            self._watched.forget(group_id, [block for group, block in lost if group == group_id])
        return lost

    def clear(self) -> bool:
        return self._binding.clear()

    def close(self) -> None:
        self._give_back_all()
        self._binding.close()

    def audit(self) -> None:
        """Every attached pool's own audit, and the promises'."""
        self._to_fetch.audit()
        for pool in set(self._binding.pools().values()):
            pool.audit()

    def _give_back_all(self) -> None:
        for request_id in list(self._held):
            self.unhold(request_id)

    def _name_of(self, key: str) -> tuple[Rank, str] | None:
        """The rank that the key is of, and the name of its object in pools and beyond; None for a key that
        isn't of this namespace.
        """
        cut = key.rfind(":") + 1
        prefix = key[:cut]
        if prefix not in self._prefixes:
            group = prefix.rpartition(":g")[2].removesuffix(":")
            self._prefixes[prefix] = next(
                (
                    (rank, self._prefix(int(group), rank))
                    for rank in self._stored_as
                    if group.isdecimal() and prefix == self._codec.key_prefix(int(group), rank)
                ),
                None,
            )
        found = self._prefixes[prefix]
        return None if found is None else (found[0], found[1] + key[cut:])


def _leading(is_there: npt.NDArray[np.bool_]) -> int:
    """How many are there before the first that isn't."""
    return len(is_there) if is_there.all() else int(np.argmin(is_there))


def _lacking(taken: Sequence[tuple[Pool, Tickets]], count: int) -> list[int]:
    """Those of so many leading blocks that some pool has no ticket for."""
    is_lacking = np.zeros(count, dtype=np.bool_)
    for _, tickets in taken:
        is_lacking |= tickets[:count] == 0
    rows: list[int] = np.flatnonzero(is_lacking).tolist()
    return rows


def _give_back(taken: Sequence[tuple[Pool, Tickets]]) -> None:
    """Whatever has become of one of the pools: where there is nothing to give back, the others get theirs."""
    for pool, tickets in taken:
        with contextlib.suppress(SegmentError):
            pool.release(_given(tickets))


def _given(tickets: Tickets) -> Tickets:
    """Without the rows that hold nothing."""
    given: Tickets = tickets[tickets != 0]
    return given
