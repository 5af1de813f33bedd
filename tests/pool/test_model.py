"""Any sequence of verbs against a plain dict that shares no code with the pool; audited after every step."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field

from actors import pattern, read_payload
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from umbp.pool import KeyState, Outcome, Pool
from umbp.pool.pool import NotePhase

KEYS = [f"k{i}" for i in range(14)]
SLOTS = 8
keys_of = st.lists(st.sampled_from(KEYS), max_size=7)
sizes = st.sampled_from([10, 3000, 9000])


@dataclass
class Pins:
    """What we hold: tickets with the bytes that they must show, and how often."""

    tickets: list[int] = field(default_factory=list)
    content: dict[int, bytes] = field(default_factory=dict)


class PoolAgainstDict(RuleBasedStateMachine):
    eviction_policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.pool = Pool.create_memfd(
            SLOTS * 4096, slab_bytes=4 * 4096, min_object_bytes=3000, eviction_policy=self.eviction_policy
        )
        self.seconds = 0.0
        self.spaces = [self.pool.namespace("one"), self.pool.namespace("two")]
        self.stored: dict[str, tuple[int, bytes]] = {}  # key -> namespace, content
        self.reserved: dict[int, tuple[str, int, bool]] = {}  # ticket -> key, namespace, outdated
        self.pins = Pins()
        self.cursor = self.pool.removed_head()
        self.names = {tuple(d): k for k, d in zip(KEYS, self.pool.digests(KEYS).tolist(), strict=True)}

    def forget_removed(self) -> set[str]:
        digests, self.cursor, is_lost = self.pool.removed_since(self.cursor)
        assert not is_lost
        gone = {self.names[tuple(d)] for d in digests.tolist()}
        for key in gone:
            del self.stored[key]
        return gone

    def writing(self) -> set[str]:
        return {key for key, _, outdated in self.reserved.values() if not outdated}

    def pinned_keys(self) -> set[str]:
        held = set(self.pins.tickets)
        return {
            k for k, (_, content) in self.stored.items() if content in {self.pins.content[t] for t in held}
        }

    @rule(keys=keys_of, size=sizes, space=st.integers(0, 1), chained=st.booleans())
    def reserve(self, keys: list[str], size: int, space: int, chained: bool) -> None:
        parents = [None, *keys[:-1]] if chained and keys else None
        tickets, outcomes = self.pool.reserve(self.spaces[space], keys, size, parents)
        pinned = self.pinned_keys()
        before, writing = set(self.stored), self.writing()
        evicted = self.forget_removed()
        assert not evicted & (pinned | set(keys))
        seen: set[str] = set()
        is_full = False
        for key, ticket, outcome in zip(keys, tickets.tolist(), outcomes.tolist(), strict=True):
            if key in before:
                assert outcome == Outcome.EXISTS
            elif key in writing or (key in seen and outcome != Outcome.FULL):
                assert outcome == Outcome.BUSY
            else:
                assert outcome in (Outcome.RESERVED, Outcome.FULL)
                assert not (is_full and outcome == Outcome.RESERVED)
                is_full |= outcome == Outcome.FULL
            seen.add(key)
            assert (ticket != 0) == (outcome == Outcome.RESERVED)
            if outcome == Outcome.RESERVED:
                assert ticket not in self.reserved
                self.reserved[ticket] = (key, space, False)
                address, length = (int(c[0]) for c in self.pool.payload([ticket]))
                assert length == size
                ctypes.memmove(address, pattern(f"{key}.{ticket}", size), size)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        tickets = data.draw(st.lists(st.sampled_from(sorted(self.reserved)), unique=True))
        sizes_now = self.pool.payload(tickets)[1].tolist()
        for ticket, size, outcome in zip(
            tickets, sizes_now, self.pool.publish(tickets).tolist(), strict=True
        ):
            key, space, outdated = self.reserved.pop(ticket)
            assert outcome == (Outcome.STALE if outdated else Outcome.PUBLISHED)
            if not outdated:
                self.stored[key] = (space, pattern(f"{key}.{ticket}", size))
            assert self.pool.publish([ticket]).tolist() == [Outcome.INVALID]

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        tickets = data.draw(st.lists(st.sampled_from(sorted(self.reserved)), unique=True))
        assert self.pool.abandon(tickets).tolist() == [Outcome.ABANDONED] * len(tickets)
        for ticket in tickets:
            del self.reserved[ticket]

    @rule(keys=keys_of)
    def acquire(self, keys: list[str]) -> None:
        tickets, outcomes = self.pool.acquire(keys)
        for key, ticket, outcome in zip(keys, tickets.tolist(), outcomes.tolist(), strict=True):
            assert outcome == (Outcome.HIT if key in self.stored else Outcome.MISS)
            if outcome == Outcome.HIT:
                self.pins.tickets.append(ticket)
                self.pins.content[ticket] = self.stored[key][1]

    @precondition(lambda self: self.pins.tickets)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.pins.tickets) - 1))
        ticket = self.pins.tickets.pop(index)
        assert self.pool.release([ticket]).tolist() == [Outcome.RELEASED]
        if ticket not in self.pins.tickets:
            assert self.pool.release([ticket]).tolist() == [Outcome.INVALID]

    @rule(keys=keys_of)
    def remove(self, keys: list[str]) -> None:
        expected = []
        left, writing = set(self.stored), self.writing()
        for key in keys:
            expected.append(
                Outcome.REMOVED if key in left else Outcome.BUSY if key in writing else Outcome.MISS
            )
            left.discard(key)
        assert self.pool.remove(keys).tolist() == expected
        self.forget_removed()
        assert set(self.stored) == left

    @rule(keys=keys_of)
    def touch(self, keys: list[str]) -> None:
        expected = [Outcome.TOUCHED if k in self.stored else Outcome.MISS for k in keys]
        assert self.pool.touch(keys).tolist() == expected

    @rule(
        keys=keys_of,
        phase=st.sampled_from(["admit", "end"]),
        output_tokens=st.sampled_from([0, 50, 5000]),
        finish=st.sampled_from(["", "stop", "tool_calls"]),
    )
    def note(self, keys: list[str], phase: NotePhase, output_tokens: int, finish: str) -> None:
        """Advice: it says what is stored, and changes nothing that can be seen."""
        expected = [Outcome.TOUCHED if k in self.stored else Outcome.MISS for k in keys]
        assert self.pool.note(keys, phase, output_tokens, finish).tolist() == expected
        assert self.forget_removed() == set()

    @rule(seconds=st.sampled_from([0.1, 3.0, 500.0, 1e6]))
    def time_passes(self, seconds: float) -> None:
        self.seconds += seconds
        self.pool.set_time(self.seconds)

    @rule(space=st.integers(0, 1))
    def clear(self, space: int) -> None:
        assert self.pool.clear(self.spaces[space])
        gone = {k for k, (s, _) in self.stored.items() if s == space}
        assert self.forget_removed() == gone
        self.reserved = {t: (k, s, o or s == space) for t, (k, s, o) in self.reserved.items()}

    @invariant()
    def agrees(self) -> None:
        self.pool.audit()
        assert self.pool.lookup(KEYS).tolist() == [k in self.stored for k in KEYS]
        published = self.pool.states(KEYS) == KeyState.PUBLISHED
        assert published.tolist() == [k in self.stored for k in KEYS]
        for ticket in set(self.pins.tickets):
            assert read_payload(self.pool, ticket) == self.pins.content[ticket]
        assert self.pool.stats()["objects"] == len(self.stored)
        assert self.pool.stats()["pinned_here"] == len(set(self.pins.tickets)) + len(self.reserved)

    def teardown(self) -> None:
        self.pool.abandon(list(self.reserved))
        self.pool.release(self.pins.tickets)
        self.pool.audit()
        for space in self.spaces:
            self.pool.clear(space)
        assert self.pool.stats()["used_bytes"] == 0
        self.pool.audit()
        self.pool.close()


class HazardPoolAgainstDict(PoolAgainstDict):
    eviction_policy = "hazard"


TestPoolAgainstDict = PoolAgainstDict.TestCase
TestPoolAgainstDict.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestHazardPoolAgainstDict = HazardPoolAgainstDict.TestCase
TestHazardPoolAgainstDict.settings = TestPoolAgainstDict.settings
