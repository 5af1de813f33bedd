"""The soak's processes: each has a role, works until it is killed, and checks every byte that it reads.

A process tells how far it is in its row of a board in shared memory, so that nobody has to listen to it. It
writes to its line in two cases only: what it found wrong, after which it ends, and the crash point that it
has come to.
"""

from __future__ import annotations

import ctypes
import os
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from zygote import Lines

from umbp import _native
from umbp.errors import SegmentError
from umbp.pool import Outcome, Pool

COLUMNS = ("steps", "stored", "read", "not_now", "refused")
STEPS, STORED, READ, NOT_NOW, REFUSED = range(len(COLUMNS))
SPACES = ("one", "two")
CHAINS, CHAIN_KEYS = 20, 10
SIZES = (3000, 3000, 9000, 20_000)
MIN_OBJECT_BYTES = min(SIZES)
TRAILER = struct.Struct("<QQQQQIIQQ")
MOST_PINS = 24
"""What a holder keeps pinned; less than the smallest pool has slots."""


def chain(number: int) -> list[str]:
    return [f"w{number}.{i}" for i in range(CHAIN_KEYS)]


def size_of(key: str) -> int:
    """The objects of a chain have one size."""
    return SIZES[zlib.crc32(key.partition(".")[0].encode()) % len(SIZES)]


def content(key: str, nonce: int, length: int) -> bytes:
    """Bytes that name their key and their writing, all along."""
    unit = f"<{key}|{nonce}>".encode()
    return (unit * (length // len(unit) + 1))[:length]


class WrongBytesError(AssertionError):
    """A reader saw what nobody has stored under its key."""


def check_object(pool: Pool, key: str, ticket: int) -> bytes:
    """The payload behind a ticket, which must be one whole writing of the key, as its trailer must say."""
    addresses, lengths = pool.payload([ticket])
    address, length = int(addresses[0]), int(lengths[0])
    begin, arena_bytes = pool.arena
    if not begin <= address <= address + length <= begin + arena_bytes:
        raise WrongBytesError(f"{key}: a payload outside the arena")
    payload = ctypes.string_at(address, length)
    unit = payload[: payload.find(b">") + 1]
    whole = (unit * (length // max(1, len(unit)) + 1))[:length]
    if length != size_of(key) or not unit.startswith(f"<{key}|".encode()) or payload != whole:
        raise WrongBytesError(f"{key}: {length} bytes that begin with {payload[:40]!r}")
    slot_bytes = _native.slot_bytes(max(length, MIN_OBJECT_BYTES))
    trailer = TRAILER.unpack(ctypes.string_at(address + slot_bytes - TRAILER.size, TRAILER.size))
    said = (list(trailer[2:4]), trailer[4], trailer[5])
    if said != (pool.digests([key])[0].tolist(), length, ticket & 0xFFFFFFFF):
        raise WrongBytesError(f"{key}: its trailer is another object's ({trailer})")
    return payload


class Worker:
    """What every role has at hand. A subclass's `step` does a little work and returns."""

    def __init__(self, spec: dict[str, Any], counts: npt.NDArray[np.uint64]) -> None:
        self.path = spec["path"]
        self.rng = random.Random(spec["seed"])
        self.seed = spec["seed"]
        self.line = spec["line"]
        self.counts = counts
        self.pool = Pool.attach(self.path)
        self.spaces = [self.pool.namespace(name) for name in SPACES]
        self.reserved: list[int] = []
        self.pins: list[tuple[str, int, bytes]] = []

    def count(self, column: int, number: int = 1) -> None:
        self.counts[column] += np.uint64(number)

    def some_chain(self) -> tuple[int, list[str]]:
        """A namespace and the head of one of its chains."""
        number = self.rng.randrange(CHAINS)
        return self.spaces[number % len(SPACES)], chain(number)[: self.rng.randrange(1, CHAIN_KEYS + 1)]

    def reserve(self, ns: int, keys: list[str], parents: list[str | None] | None = None) -> list[int]:
        """Reserves and writes, in two strokes: a death may fall between them."""
        sizes = np.array([size_of(key) for key in keys], dtype=np.uint64)
        tickets, outcomes = self.pool.reserve(ns, keys, sizes, parents)
        self.count(NOT_NOW, int((outcomes == Outcome.NOT_NOW).sum()))
        got = outcomes == Outcome.RESERVED
        addresses, lengths = self.pool.payload(tickets[got])
        nonce = self.rng.randrange(1 << 32)
        mine = np.array(keys)[got].tolist()
        for key, address, length in zip(mine, addresses.tolist(), lengths.tolist(), strict=True):
            if length != size_of(key):
                raise WrongBytesError(f"{key}: reserved {size_of(key)} bytes and got {length}")
            data, half = content(key, nonce, length), length // 2
            ctypes.memmove(address, data, half)
            ctypes.memmove(address + half, data[half:], length - half)
        return list(tickets[got].tolist())

    def publish(self, tickets: list[int]) -> None:
        outcomes = self.pool.publish(tickets).tolist()
        for ticket, outcome in zip(tickets, outcomes, strict=True):
            if outcome == Outcome.NOT_NOW:
                self.count(NOT_NOW)
                self.reserved.append(ticket)
            elif outcome not in (Outcome.PUBLISHED, Outcome.STALE):
                raise AssertionError(f"a reservation of ours ended as {Outcome(outcome).name}")
        self.count(STORED, outcomes.count(Outcome.PUBLISHED))

    def acquire(self, keys: list[str]) -> None:
        """Pins what is there, checks it, and keeps it."""
        tickets, outcomes = self.pool.acquire(keys)
        for key, ticket, outcome in zip(keys, tickets.tolist(), outcomes.tolist(), strict=True):
            if outcome == Outcome.HIT:
                self.pins.append((key, ticket, check_object(self.pool, key, ticket)))
                self.count(READ)
            elif outcome == Outcome.NOT_NOW:
                self.count(NOT_NOW)
            elif outcome != Outcome.MISS:
                raise AssertionError(f"{key} was acquired as {Outcome(outcome).name}")

    def release(self, number: int) -> None:
        """Lets go of the oldest pins, whose bytes must be what they were."""
        going, self.pins = self.pins[:number], self.pins[number:]
        for key, ticket, seen in going:
            if check_object(self.pool, key, ticket) != seen:
                raise WrongBytesError(f"{key} changed while it was pinned")
        outcomes = set(self.pool.release([ticket for _, ticket, _ in going]).tolist())
        if not outcomes <= {Outcome.RELEASED, Outcome.DEFERRED}:
            raise AssertionError(f"pins of ours were released as {outcomes}")

    def step(self) -> None:
        raise NotImplementedError


class Writer(Worker):
    """Stores chains; leaves some reservations lying about and gives others up."""

    def step(self) -> None:
        self.reserved, waiting = [], self.reserved
        self.publish(waiting)
        ns, keys = self.some_chain()
        tickets = self.reserve(ns, keys, [None, *keys[:-1]])
        match self.rng.randrange(6):
            case 0:
                self.pool.abandon(tickets)
            case 1:
                self.reserved += tickets
            case _:
                self.publish(tickets)


class Reader(Worker):
    """Looks up, reads and notes requests, and follows the ring of removed digests."""

    def __init__(self, spec: dict[str, Any], counts: npt.NDArray[np.uint64]) -> None:
        super().__init__(spec, counts)
        self.cursor = self.pool.removed_head()

    def step(self) -> None:
        _, keys = self.some_chain()
        self.pool.lookup(keys)
        self.acquire(keys)
        self.release(len(self.pins))
        _, self.cursor, _ = self.pool.removed_since(self.cursor)
        self.pool.note(keys, self.rng.choice(("admit", "end")), self.rng.randrange(1000))


class Holder(Worker):
    """Keeps pins for long, several on one object too, and looks again before it lets go."""

    def step(self) -> None:
        _, keys = self.some_chain()
        self.acquire(keys[: self.rng.randrange(1, 5)])
        self.release(max(0, len(self.pins) - MOST_PINS))


class Evictor(Worker):
    """Stores what nobody wants, of all sizes, more than the pool has room for."""

    number = 0

    def step(self) -> None:
        self.number += 1
        keys = [f"e{self.seed}-{self.number}.{i}" for i in range(self.rng.randrange(1, 24))]
        tickets = self.reserve(self.rng.choice(self.spaces), keys, [None, *keys[:-1]])
        self.reserved, waiting = [], self.reserved
        self.publish(waiting + tickets)
        self.acquire(keys[:2])
        self.release(len(self.pins))


class Remover(Worker):
    """Removes and touches; index entries move all the time."""

    def step(self) -> None:
        _, keys = self.some_chain()
        if self.rng.random() < 0.3:
            self.pool.remove(keys[-3:])
        self.pool.touch(keys)
        self.acquire(keys[:1])
        self.release(len(self.pins))


class Clearer(Worker):
    """Clears a namespace after every so many lookups of all keys, with reservations of its own in flight."""

    def step(self) -> None:
        for number in range(CHAINS):
            self.pool.lookup(chain(number))
        ns, keys = self.some_chain()
        tickets = self.reserve(ns, keys)
        if self.rng.random() < 0.2 and not self.pool.clear(ns):
            self.count(NOT_NOW)
        self.reserved, waiting = [], self.reserved
        self.publish(waiting + tickets)


class Visitor(Worker):
    """Comes, stores, reads, and leaves with pins and reservations in hand."""

    def step(self) -> None:
        ns, keys = self.some_chain()
        self.publish(self.reserve(ns, keys, [None, *keys[:-1]]))
        self.acquire(keys)
        self.pool.close()
        self.reserved, self.pins = [], []
        self.pool = attach_patiently(self.path, lambda: self.count(REFUSED))


class Hog(Worker):
    """Holds the lock as long as a process can: audits, and batches of everything."""

    def step(self) -> None:
        everything = [key for number in range(CHAINS) for key in chain(number)]
        self.pool.touch(everything)
        self.acquire(everything[:: self.rng.randrange(9, 30)])
        self.release(len(self.pins))
        self.pool.audit()
        self.pool.reap()


class Resizer(Worker):
    """Lets the pool grow and shrink, holds its size, and gives its namespaces quotas; whatever is refused
    is refused in a sentence that it knows."""

    REFUSALS = ("can't shrink", "is resizing it", "while it is being resized", "with a device")

    def step(self) -> None:
        slab, most = self.pool.native.slab_bytes, self.pool.max_bytes
        try:
            match self.rng.randrange(4):
                case 0:
                    quota = self.rng.choice([None, most // 4, most // 2])
                    self.pool.set_quota(self.rng.choice(self.spaces), quota)
                case 1:
                    with self.pool.size_held():
                        self.acquire(self.some_chain()[1])
                case _:
                    self.pool.resize(self.rng.randrange(most // slab // 3, most // slab + 1) * slab)
        except SegmentError as error:
            if not any(text in str(error) for text in self.REFUSALS):
                raise
        self.release(len(self.pins))


class Destroyer(Worker):
    """Destroys the pool, if it lives to."""

    def step(self) -> None:
        _native.arm_crash_point(self.rng.randrange(5), False, self.line)
        self.pool.destroy()


ROLES: dict[str, type[Worker]] = {
    "writer": Writer,
    "reader": Reader,
    "holder": Holder,
    "evictor": Evictor,
    "remover": Remover,
    "clearer": Clearer,
    "visitor": Visitor,
    "hog": Hog,
    "resizer": Resizer,
    "destroyer": Destroyer,
}


def is_lock_stopped(error: SegmentError) -> bool:
    """The one refusal that a sound pool gives: whoever holds its lock is stopped."""
    return "a stopped process holds" in str(error)


def is_destroyed(worker: Worker | None, path: str) -> bool:
    """Whether that is what a process may have been told: it was destroyed, or the file is gone."""
    if worker is None or worker.pool.native.closed:
        return not os.path.exists(path)
    return worker.pool.is_destroyed


def attach_patiently(path: str, refused: Callable[[], None]) -> Pool:
    while True:
        try:
            return Pool.attach(path)
        except SegmentError as error:
            if not is_lock_stopped(error):
                raise
            refused()


def soak(lines: Lines, spec: dict[str, Any]) -> None:
    """Works in `spec["role"]` until killed."""
    os.nice(5)  # whoever kills has to come to it
    board = np.memmap(spec["board"], dtype=np.uint64, mode="r+").reshape(-1, len(COLUMNS))
    counts = board[spec["row"]]
    spec["line"] = lines.socket.fileno()
    _native.arm_crash_point(spec["countdown"], spec["stop"], spec["line"])
    worker: Worker | None = None
    while True:
        try:
            if worker is None:
                worker = ROLES[spec["role"]](spec, counts)
            worker.step()
        except SegmentError as error:
            if not is_lock_stopped(error) and not is_destroyed(worker, spec["path"]):
                lines.answer(f"{spec['role']} {os.getpid()}: {error}", "error")
                return
            counts[REFUSED] += np.uint64(1)
        except Exception as error:  # noqa: BLE001 - whatever it is, the soak reports it
            lines.answer(f"{spec['role']} {os.getpid()}: {type(error).__name__}: {error}", "error")
            return
        counts[STEPS] += np.uint64(1)
