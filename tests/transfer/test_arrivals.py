"""What has come from elsewhere with its seal: the payload is compared by its first load, in any process."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from umbp.pool import SEAL_BYTES, CopyStatus, Outcome, Pool, SealStatus
from umbp.transfer import BlockRuns, CopyEngine

BLOCKS = 16
OK, ARRIVAL, CHECKSUM = CopyStatus.OK, CopyStatus.BAD_ARRIVAL, CopyStatus.BAD_CHECKSUM


@dataclass
class Blocks:
    """An engine's memory, whose blocks are runs of these lengths at these places of an object."""

    lengths: tuple[int, ...]
    offsets: tuple[int, ...]
    memory: npt.NDArray[np.uint8] = field(init=False)
    runs: BlockRuns = field(init=False)

    def __post_init__(self) -> None:
        stride = sum(self.lengths)
        self.memory = np.zeros((BLOCKS, stride), np.uint8)
        starts = np.cumsum([0, *self.lengths[:-1]]) + self.memory.ctypes.data
        self.runs = BlockRuns.from_columns(
            starts.tolist(), [stride] * len(self.lengths), list(self.lengths), list(self.offsets), BLOCKS
        )

    def holds(self, block: int, payload: bytes) -> bool:
        parts = [
            payload[offset : offset + length]
            for offset, length in zip(self.offsets, self.lengths, strict=True)
        ]
        return self.memory[block].tobytes() == b"".join(parts)


KINDS = {
    "one run": ((3001,), (0,)),
    "one large run": ((700_000,), (0,)),
    "many short runs": ((24,) * 300, tuple(range(0, 7200, 24))),
    "long runs": ((200_000, 100_001), (0, 200_000)),
    "another order": ((1000, 5000), (5000, 0)),
    "gaps": ((4096, 4096), (0, 6000)),
}


@pytest.fixture(params=KINDS)
def blocks(request: pytest.FixtureRequest) -> Blocks:
    return Blocks(*KINDS[request.param])


@pytest.fixture
def pool(blocks: Blocks) -> Iterator[Pool]:
    slab_bytes = 1 << 20
    with Pool.create_memfd(16 * slab_bytes, slab_bytes=slab_bytes, min_object_bytes=64) as pool:
        yield pool
        pool.audit()


@pytest.fixture(params=[1, 2, 4])
def engine(request: pytest.FixtureRequest) -> Iterator[CopyEngine]:
    with CopyEngine(request.param) as engine:
        yield engine


def payload_of(number: int, length: int) -> bytes:
    return np.random.default_rng(number).integers(0, 256, length, np.uint8).tobytes()


def left(pool: Pool, key: str, payload: bytes) -> bytes:
    """Payload and seal, as they leave a pool."""
    tickets, _ = pool.reserve(pool.namespace("a"), [key], len(payload))
    ctypes.memmove(int(pool.payload(tickets)[0][0]), payload, len(payload))
    assert pool.seal(tickets, [key]).tolist() == [SealStatus.OK]
    address, size = (int(column[0]) for column in pool.sealed_ranges(tickets))
    content = ctypes.string_at(address, size)
    pool.abandon(tickets)
    return content


def arrive(pool: Pool, contents: dict[str, bytes]) -> list[SealStatus]:
    """What a pool says of bytes that come in under these keys; what is good is published."""
    keys = list(contents)
    length = len(contents[keys[0]]) - SEAL_BYTES
    tickets, outcomes = pool.reserve(pool.namespace("a"), keys, length)
    assert set(outcomes.tolist()) == {Outcome.RESERVED}
    for address, content in zip(pool.sealed_ranges(tickets)[0].tolist(), contents.values(), strict=True):
        ctypes.memmove(address, content, len(content))
    statuses = pool.adopt_seal(tickets, keys)
    is_good = statuses == SealStatus.OK
    pool.publish(tickets[is_good])
    pool.abandon(tickets[~is_good])
    return [SealStatus(status) for status in statuses.tolist()]


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


@pytest.mark.parametrize("is_device", [False, True], ids=["copied", "by a device"])
def test_damage_on_the_way_is_found_by_the_first_load_and_nothing_else_is_lost(
    blocks: Blocks, pool: Pool, engine: CopyEngine, is_device: bool
) -> None:
    length = blocks.runs.object_bytes
    payloads = {f"k{number}": payload_of(number, length) for number in range(5)}
    contents = {key: left(pool, key, payload) for key, payload in payloads.items()}
    for key, at in {"k1": 0, "k2": length // 2, "k3": length - 1}.items():
        contents[key] = flipped(contents[key], at)
    assert arrive(pool, contents) == [SealStatus.OK] * 5
    pins, _ = pool.acquire(list(payloads))
    wanted = [OK, ARRIVAL, ARRIVAL, ARRIVAL, OK]
    if is_device:
        statuses, addresses = engine.open_loads(blocks.runs, range(5), pool, pins)
        assert addresses.tolist() == np.where(statuses == OK, pool.payload(pins)[0], 0).tolist()
    else:
        statuses = engine.load(blocks.runs, range(5), pool, pins)
        values = list(payloads.values())
        assert all(blocks.holds(block, values[block]) for block in (0, 4))
        assert not blocks.memory[5:].any()
    assert statuses.tolist() == wanted
    again = engine.load(blocks.runs, range(5, 10), pool, pins)
    assert again.tolist() == wanted, "it is no better the second time"
    pool.release(pins)


def test_one_load_compares_for_all_and_checksums_are_kept(
    blocks: Blocks, pool: Pool, engine: CopyEngine
) -> None:
    payload = payload_of(7, blocks.runs.object_bytes)
    assert arrive(pool, {"k": left(pool, "k", payload)}) == [SealStatus.OK]
    pins, _ = pool.acquire(["k"])
    assert engine.load(blocks.runs, [3], pool, pins).tolist() == [OK]
    assert blocks.holds(3, payload)
    address = int(pool.payload(pins)[0][0])
    ctypes.memset(address, payload[0] ^ 1, 1)
    assert engine.load(blocks.runs, [4], pool, pins).tolist() == [OK], "it was read once more"
    assert engine.load(blocks.runs, [4], pool, pins, checksum=True).tolist() == [CHECKSUM]
    assert pool.seal(pins, ["k"]).tolist() == [SealStatus.OK]
    assert pool.check_seal(pins, ["k"]).tolist() == [SealStatus.BAD_CHECKSUM], "damage was sealed as sound"
    pool.release(pins)


def test_it_leaves_again_as_it_came_whether_it_was_loaded_or_not(blocks: Blocks, pool: Pool) -> None:
    content = left(pool, "k", payload_of(1, blocks.runs.object_bytes))
    arrive(pool, {"k": content})
    pins, _ = pool.acquire(["k"])
    address, size = (int(column[0]) for column in pool.sealed_ranges(pins))
    ctypes.memset(address + size - SEAL_BYTES, 0, SEAL_BYTES)
    assert pool.seal(pins, ["k"]).tolist() == [SealStatus.OK]
    assert ctypes.string_at(address, size) == content
    pool.release(pins)


def test_what_nobody_has_compared_does_not_leave_without_its_checksum(small: Pool) -> None:
    arrive(small, {"k": flipped(left(small, "k", payload_of(1, 3001)), 99)})
    pins, _ = small.acquire(["k"])
    assert small.seal(pins, ["k"], checksum=False).tolist() == [SealStatus.OK]
    assert small.check_seal(pins, ["k"]).tolist() == [SealStatus.BAD_CHECKSUM]
    address, size = (int(column[0]) for column in small.sealed_ranges(pins))
    content = ctypes.string_at(address, size)
    small.release(pins)
    small.remove(["k"])
    assert arrive(small, {"k": content}) == [SealStatus.OK], "it has one"
    blocks = Blocks((3001,), (0,))
    pins, _ = small.acquire(["k"])
    with CopyEngine(1) as engine:
        assert engine.load(blocks.runs, [0], small, pins).tolist() == [ARRIVAL]
    small.release(pins)


def test_another_process_compares_what_this_one_has_let_in(tmp_path: Path) -> None:
    blocks = Blocks((5000,), (0,))
    path = tmp_path / "pool"
    with (
        Pool.create(path, 1 << 20, slab_bytes=1 << 16, min_object_bytes=64) as pool,
        Pool.attach(path) as other,
        CopyEngine(1) as engine,
    ):
        payload = payload_of(1, 5000)
        arrive(pool, {"good": left(pool, "good", payload), "bad": flipped(left(pool, "bad", payload), 99)})
        pins, _ = other.acquire(["good", "bad"])
        assert engine.load(blocks.runs, [0, 1], other, pins).tolist() == [OK, ARRIVAL]
        other.release(pins)


def test_a_seal_that_is_not_its_own_is_refused_at_once(small: Pool) -> None:
    pool = small
    payload = payload_of(1, 3001)
    content = left(pool, "k", payload)
    at_seal = len(payload)
    assert arrive(pool, {"other": content}) == [SealStatus.WRONG_KEY]
    assert arrive(pool, {"k": content[:at_seal] + bytes(SEAL_BYTES)}) == [SealStatus.NO_SEAL]
    assert arrive(pool, {"k": flipped(content, at_seal + 40)}) == [SealStatus.BAD_CHECKSUM]
    assert arrive(pool, {"k": content[:1] + content[at_seal:] + content[1:at_seal]}) == [SealStatus.NO_SEAL]


def test_a_seal_without_a_checksum_is_none_to_compare_with(small: Pool) -> None:
    pool = small
    tickets, _ = pool.reserve(pool.namespace("a"), ["k"], 100)
    assert pool.seal(tickets, ["k"], checksum=False).tolist() == [SealStatus.OK]
    assert pool.adopt_seal(tickets, ["k"]).tolist() == [SealStatus.BAD_CHECKSUM]
    assert pool.seal(tickets, ["k"]).tolist() == [SealStatus.OK]
    assert pool.adopt_seal(tickets, ["k"]).tolist() == [SealStatus.OK]
    pool.publish(tickets)
    assert pool.adopt_seal(tickets, ["k"]).tolist() == [SealStatus.INVALID], "it isn't held"
    pins, _ = pool.acquire(["k"])
    assert pool.adopt_seal(pins, ["k"]).tolist() == [SealStatus.INVALID], "others may be reading it"
    pool.release(pins)


@pytest.fixture
def small() -> Iterator[Pool]:
    with Pool.create_memfd(1 << 20, slab_bytes=1 << 16, min_object_bytes=64) as pool:
        yield pool
        pool.audit()
