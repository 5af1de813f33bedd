"""Seals: payload and seal leave a pool as one range; whoever takes them in elsewhere knows whose they are."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from actors import pattern, store
from hypothesis import given, settings
from hypothesis import strategies as st
from zygote import Zygote

from umbp import _native
from umbp.errors import ConfigError, SegmentError
from umbp.pool import SEAL_BYTES, CopyStatus, Outcome, Pool, SealStatus, slot_bytes
from umbp.transfer import BlockRuns, CopyEngine

LENGTH = 3001
KEY = "prefix/κ/00ff"
PAYLOAD = bytes(i % 251 for i in range(LENGTH))
VECTORS = {
    True: "554d42505345414c0100000001000000b90b000000000000e05f19f0e829dfa7"
    "190f5b850ca0a80de26e46dc64b3908b0000000000000000fa176708fb8f7dbf",
    False: "554d42505345414c0100000000000000b90b000000000000e05f19f0e829dfa7"
    "190f5b850ca0a80d00000000000000000000000000000000b264df2e52625b18",
}
"""Computed with the Python package xxhash by the table of docs/design.md."""

MakeSeeded = Callable[[int], Pool]


@pytest.fixture(scope="module")
def make_seeded() -> Iterator[MakeSeeded]:
    """Pools of different hash seeds, as those of different hosts are."""
    pools: dict[int, Pool] = {}

    def make(seed: int) -> Pool:
        if seed not in pools:
            pools[seed] = Pool.create_memfd(1 << 20, slab_bytes=1 << 16, min_object_bytes=1, hash_seed=seed)
        pool = pools[seed]
        pool.clear_all()
        pool.reap()
        return pool

    yield make
    for pool in pools.values():
        pool.audit()
        pool.close()


def written(pool: Pool, key: str, payload: bytes) -> int:
    """The ticket of a reservation that holds the payload."""
    tickets, outcomes = pool.reserve(pool.namespace("a"), [key], len(payload))
    assert outcomes.tolist() == [Outcome.RESERVED]
    ctypes.memmove(int(pool.payload(tickets)[0][0]), payload, len(payload))
    return int(tickets[0])


def range_of(pool: Pool, ticket: int) -> tuple[int, int]:
    addresses, lengths = pool.sealed_ranges([ticket])
    return int(addresses[0]), int(lengths[0])


def sealed(pool: Pool, key: str, payload: bytes, *, checksum: bool = True) -> bytes:
    """Payload and seal as they leave a pool."""
    ticket = written(pool, key, payload)
    assert pool.seal([ticket], [key], checksum=checksum).tolist() == [SealStatus.OK]
    content = ctypes.string_at(*range_of(pool, ticket))
    pool.abandon([ticket])
    return content


def arrived(pool: Pool, key: str, length: int, content: bytes, *, checksum: bool = True) -> SealStatus:
    """What the pool says of bytes that come in for a key of that length."""
    tickets, _ = pool.reserve(pool.namespace("a"), [key], length)
    address, size = range_of(pool, int(tickets[0]))
    ctypes.memmove(address, content, min(size, len(content)))
    statuses = pool.check_seal(tickets, [key], checksum=checksum)
    pool.abandon(tickets)
    return SealStatus(statuses[0])


@given(
    payload=st.integers(1, 12_500).flatmap(lambda size: st.binary(min_size=size, max_size=size)),
    key=st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    checksum=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_what_one_pool_seals_another_one_opens(
    make_seeded: MakeSeeded, payload: bytes, key: str, checksum: bool
) -> None:
    content = sealed(make_seeded(1), key, payload, checksum=checksum)
    assert content[: len(payload)] == payload
    assert len(content) == len(payload) + SEAL_BYTES
    other = make_seeded(2)
    assert arrived(other, key, len(payload), content, checksum=checksum) is SealStatus.OK
    assert arrived(other, key, len(payload), content, checksum=False) is SealStatus.OK
    assert arrived(other, key + "x", len(payload), content, checksum=checksum) is SealStatus.WRONG_KEY


@pytest.mark.parametrize("length", [1, 63, 64, 65, 3968, 3969, 4031, 4032, 4096, 16384 - 128, 65536 - 128])
def test_a_seal_lies_between_its_payload_and_the_slot_s_end_at_every_length(
    make_seeded: MakeSeeded, length: int
) -> None:
    pool = make_seeded(1)
    payload = pattern("k", length)
    first, second = written(pool, "k", payload), written(pool, "n", pattern("n", length))
    assert pool.seal([first, second], ["k", "n"]).tolist() == [SealStatus.OK] * 2
    address, size = range_of(pool, first)
    assert size == length + SEAL_BYTES
    assert size + 64 <= slot_bytes(length)
    assert ctypes.string_at(address, length) == payload
    assert pool.check_seal([first, second], ["k", "n"]).tolist() == [SealStatus.OK] * 2
    pool.publish([first, second])
    pool.audit()


def test_payloads_of_whole_pages_take_no_more_room_for_their_seal() -> None:
    assert [slot_bytes(pages * 4096) for pages in (1, 2, 64)] == [2 * 4096, 3 * 4096, 65 * 4096]
    assert slot_bytes(4096 - 128) == 4096
    assert slot_bytes(4096 - 127) == 8192


@pytest.mark.parametrize("checksum", [True, False])
def test_a_seal_has_the_same_bytes_on_every_host(make_seeded: MakeSeeded, checksum: bool) -> None:
    for seed in (1, 2):
        assert sealed(make_seeded(seed), KEY, PAYLOAD, checksum=checksum)[LENGTH:].hex() == VECTORS[checksum]


def test_every_byte_of_a_seal_counts(make_seeded: MakeSeeded) -> None:
    content = sealed(make_seeded(1), KEY, PAYLOAD)
    pool = make_seeded(2)
    for at in range(LENGTH, LENGTH + SEAL_BYTES):
        damaged = bytearray(content)
        damaged[at] ^= 1 << at % 8
        wanted = SealStatus.NO_SEAL if at < LENGTH + 12 else SealStatus.BAD_CHECKSUM
        for checksum in (True, False):
            assert arrived(pool, KEY, LENGTH, bytes(damaged), checksum=checksum) is wanted, at


@pytest.mark.parametrize("at", [0, 1, 1500, LENGTH - 1])
def test_a_damaged_payload_is_seen_where_it_is_read(make_seeded: MakeSeeded, at: int) -> None:
    content = bytearray(sealed(make_seeded(1), KEY, PAYLOAD))
    content[at] ^= 0x10
    pool = make_seeded(2)
    assert arrived(pool, KEY, LENGTH, bytes(content)) is SealStatus.BAD_CHECKSUM
    assert arrived(pool, KEY, LENGTH, bytes(content), checksum=False) is SealStatus.OK


@pytest.mark.parametrize("arrived_bytes", [0, 1, 2000, LENGTH, LENGTH + 1, LENGTH + SEAL_BYTES - 1])
def test_of_what_arrives_only_in_part_there_is_no_seal(make_seeded: MakeSeeded, arrived_bytes: int) -> None:
    """Also in a slot that held the same object before."""
    content = sealed(make_seeded(1), KEY, PAYLOAD)
    pool = make_seeded(2)
    assert arrived(pool, KEY, LENGTH, content) is SealStatus.OK
    for checksum in (True, False):
        status = arrived(pool, KEY, LENGTH, content[:arrived_bytes], checksum=checksum)
        assert status is (SealStatus.NO_SEAL if arrived_bytes < LENGTH + 8 else SealStatus.BAD_CHECKSUM)


def test_a_seal_of_another_length_is_told(make_seeded: MakeSeeded) -> None:
    content = sealed(make_seeded(1), KEY, PAYLOAD)
    pool = make_seeded(2)
    assert arrived(pool, KEY, LENGTH - 64, content) is SealStatus.NO_SEAL, "it isn't where it is looked for"
    moved = content[: LENGTH - 8] + content[LENGTH:]
    assert arrived(pool, KEY, LENGTH - 8, moved) is SealStatus.WRONG_LENGTH


def test_a_seal_without_a_checksum_is_no_answer_to_whoever_asks_for_one(make_seeded: MakeSeeded) -> None:
    content = sealed(make_seeded(1), KEY, PAYLOAD, checksum=False)
    assert arrived(make_seeded(2), KEY, LENGTH, content) is SealStatus.BAD_CHECKSUM


@pytest.mark.parametrize("field", [(8, 2), (12, 2), (48, 1)])
def test_what_a_later_version_says_is_not_guessed_at(make_seeded: MakeSeeded, field: tuple[int, int]) -> None:
    """Another version, an unknown flag, a byte that was zero; all in seals that are sound."""
    content = sealed(make_seeded(1), KEY, PAYLOAD)
    seal = bytearray(content[LENGTH:])
    at, value = field
    seal[at : at + 4] = struct.pack("<I", value)
    summed = sealed(make_seeded(1), "other", bytes(seal[:56]))
    seal[56:] = summed[56 + 40 : 56 + 48]  # of a payload that is these bytes
    assert arrived(make_seeded(2), KEY, LENGTH, content[:LENGTH] + bytes(seal)) is SealStatus.NO_SEAL


def test_a_ticket_is_sealed_under_its_own_key_only(make_seeded: MakeSeeded) -> None:
    pool = make_seeded(1)
    ticket = written(pool, KEY, PAYLOAD)
    assert pool.seal([ticket], ["other"]).tolist() == [SealStatus.WRONG_KEY]
    assert pool.check_seal([ticket], ["other"]).tolist() == [SealStatus.WRONG_KEY]
    assert pool.check_seal([ticket], [KEY]).tolist() == [SealStatus.NO_SEAL]
    pool.abandon([ticket])


def test_what_is_not_held_is_neither_sealed_nor_shown(make_seeded: MakeSeeded) -> None:
    pool = make_seeded(1)
    gone = written(pool, KEY, PAYLOAD)
    pool.abandon([gone])
    released = written(pool, "r", PAYLOAD)
    pool.publish([released])
    tickets = [0, gone, released, 2**64 - 1, 5 << 32]
    keys = [KEY, KEY, "r", KEY, KEY]
    assert pool.seal(tickets, keys).tolist() == [SealStatus.INVALID] * 5
    assert pool.check_seal(tickets, keys).tolist() == [SealStatus.INVALID] * 5
    assert [column.tolist() for column in pool.sealed_ranges(tickets)] == [[0] * 5, [0] * 5]


def test_a_pin_is_sealed_like_a_reservation_and_after_its_removal(make_seeded: MakeSeeded) -> None:
    pool = make_seeded(1)
    pool.publish([written(pool, KEY, PAYLOAD)])
    pins, _ = pool.acquire([KEY])
    pool.remove([KEY])
    assert pool.check_seal(pins, [KEY]).tolist() == [SealStatus.NO_SEAL]
    assert pool.seal(pins, [KEY]).tolist() == [SealStatus.OK]
    assert pool.check_seal(pins, [KEY]).tolist() == [SealStatus.OK]
    address, size = range_of(pool, int(pins[0]))
    assert ctypes.string_at(address, size) == PAYLOAD + bytes.fromhex(VECTORS[True])
    pool.release(pins)


def test_damage_since_an_object_was_stored_is_not_sealed_as_sound(make_seeded: MakeSeeded) -> None:
    pool = make_seeded(1)
    memory = np.frombuffer(PAYLOAD, np.uint8).copy()
    runs = BlockRuns.from_columns([memory.ctypes.data], [0], [LENGTH], [0], 1)
    tickets, _ = pool.reserve(pool.namespace("a"), [KEY], LENGTH)
    with CopyEngine(1) as engine:
        engine.store(runs, [0], pool, tickets, checksum=True)
    address, _ = range_of(pool, int(tickets[0]))
    ctypes.memset(address + 7, 0xFF, 1)
    assert pool.seal(tickets, [KEY]).tolist() == [SealStatus.OK]
    assert pool.check_seal(tickets, [KEY]).tolist() == [SealStatus.BAD_CHECKSUM]
    ctypes.memset(address + 7, 7, 1)
    assert pool.check_seal(tickets, [KEY]).tolist() == [SealStatus.OK]
    pool.abandon(tickets)


@pytest.mark.parametrize("checksum", [True, False])
def test_what_arrives_with_its_checksum_loads_with_it(make_seeded: MakeSeeded, checksum: bool) -> None:
    content = sealed(make_seeded(1), KEY, PAYLOAD)
    pool = make_seeded(2)
    tickets, _ = pool.reserve(pool.namespace("a"), [KEY], LENGTH)
    ctypes.memmove(range_of(pool, int(tickets[0]))[0], content, len(content))
    assert pool.check_seal(tickets, [KEY], checksum=checksum).tolist() == [SealStatus.OK]
    pool.publish(tickets)
    pins, _ = pool.acquire([KEY])
    memory = np.zeros(LENGTH, np.uint8)
    runs = BlockRuns.from_columns([memory.ctypes.data], [0], [LENGTH], [0], 1)
    with CopyEngine(1) as engine:
        loaded = engine.load(runs, [0], pool, pins, checksum=True)
    assert loaded.tolist() == [CopyStatus.OK if checksum else CopyStatus.BAD_CHECKSUM]
    assert (bytes(memory) == PAYLOAD) == checksum
    pool.release(pins)


def test_whoever_writes_beyond_the_seal_is_found_out(make_seeded: MakeSeeded) -> None:
    content = sealed(make_seeded(1), KEY, PAYLOAD)
    pool = make_seeded(2)
    tickets, _ = pool.reserve(pool.namespace("a"), [KEY], LENGTH)
    address, _ = range_of(pool, int(tickets[0]))
    ctypes.memmove(address, content + bytes(slot_bytes(LENGTH) - len(content)), slot_bytes(LENGTH))
    assert pool.check_seal(tickets, [KEY]).tolist() == [SealStatus.INVALID]
    pool.abandon(tickets)


@pytest.mark.parametrize("length", [0, LENGTH - 1, slot_bytes(LENGTH), 2**63, 2**64 - 1])
def test_a_length_that_damage_has_left_is_not_believed(tmp_path: Path, length: int) -> None:
    """Nothing is written anywhere, wherever it would lie."""
    path = tmp_path / "pool"
    with Pool.create(path, 1 << 16, slab_bytes=1 << 16, min_object_bytes=LENGTH) as pool:
        ticket = written(pool, KEY, PAYLOAD)
        before = ctypes.string_at(*pool.arena)
        with path.open("r+b") as file:
            records = _native.geometry(1 << 16, 1 << 16, LENGTH)["records_at"]
            file.seek(records + 128 * (ticket >> 32) + 32)
            assert file.read(8) == struct.pack("<Q", LENGTH)
            file.seek(-8, os.SEEK_CUR)
            file.write(struct.pack("<Q", length))
        assert pool.seal([ticket], [KEY]).tolist() == [SealStatus.INVALID]
        assert pool.check_seal([ticket], [KEY]).tolist() == [SealStatus.INVALID]
        assert ctypes.string_at(*pool.arena) == before


def test_two_processes_may_seal_an_object_at_once(pool_file: Path, zygote: Zygote) -> None:
    """Scenario: both seal the same objects over and over, and each finds what it has sealed sound."""
    keys = [f"k{i}" for i in range(8)]
    with Pool.attach(pool_file) as pool:
        store(pool, pool.namespace("a"), keys)
    actors = [zygote.spawn("seal_often", os.fspath(pool_file), keys, 200) for _ in range(2)]
    for actor in actors:
        assert actor.receive() == "ready"
    for actor in actors:
        actor.send("go")
    for actor in actors:
        assert actor.receive() == [SealStatus.OK]
    with Pool.attach(pool_file) as pool:
        pins, _ = pool.acquire(keys)
        assert pool.check_seal(pins, keys).tolist() == [SealStatus.OK] * len(keys)
        pool.audit()


def test_columns_of_unequal_lengths_and_closed_pools_are_refused(make_pool: Callable[..., Pool]) -> None:
    pool = make_pool()
    for verb in (pool.seal, pool.check_seal):
        with pytest.raises(ConfigError, match="unequal lengths"):
            verb([1, 2], ["k"])
    pool.close()
    for verb in (pool.seal, pool.check_seal):
        with pytest.raises(SegmentError, match="closed"):
            verb([1], ["k"])
    with pytest.raises(SegmentError, match="closed"):
        pool.sealed_ranges([1])
