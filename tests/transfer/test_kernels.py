"""Every copy kernel that this processor runs moves exactly the bytes that it is told to."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbp import _native
from umbp.errors import ConfigError
from umbp.pool import CopyStatus, Outcome, Pool, slot_bytes
from umbp.transfer import BlockRuns, CopyEngine

LINE = 64
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 129, 191, 255, 256, 257, 319, 320, 321, 511, 1000, 4096, 4097)
Bytes = npt.NDArray[np.uint8]


@pytest.fixture(params=_native.copy_kernels())
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("UMBP_COPY_KERNEL", request.param)
    return str(request.param)


@pytest.fixture(params=[1, 3])
def engine(kernel: str, request: pytest.FixtureRequest) -> Iterator[CopyEngine]:
    with CopyEngine(request.param) as engine:
        assert engine.kernel == kernel
        yield engine


def aligned(size: int) -> Bytes:
    """Bytes that begin on a cache line."""
    backing = np.zeros(size + LINE, np.uint8)
    start = -backing.ctypes.data % LINE
    return backing[start : start + size]


class Round:
    """One block of `memory` described by columns, stored and loaded again; every byte is looked at."""

    def __init__(self, memory: Bytes, base: npt.NDArray[np.int64], length: npt.NDArray[np.int64]) -> None:
        self.memory, self.base, self.length = memory, base, length

    def check(self, engine: CopyEngine, offset: npt.NDArray[np.int64], *, checksum: bool) -> None:
        rng = np.random.default_rng(5)
        self.memory[:] = rng.integers(0, 256, len(self.memory), np.uint8)
        before = self.memory.copy()
        runs = BlockRuns.from_columns(
            self.base + self.memory.ctypes.data, np.zeros(len(self.base)), self.length, offset, 1
        )
        slab_bytes = slot_bytes(runs.object_bytes)
        with Pool.create_memfd(
            slab_bytes, slab_bytes=slab_bytes, min_object_bytes=runs.object_bytes, lock_patience_s=5.0
        ) as pool:
            tickets, outcomes = pool.reserve(pool.namespace("a"), ["k"], runs.object_bytes)
            assert outcomes.tolist() == [Outcome.RESERVED]
            address = int(pool.payload(tickets)[0][0])
            slot = np.ctypeslib.as_array(ctypes.cast(address, ctypes.POINTER(ctypes.c_uint8)), (slab_bytes,))
            slot[: runs.object_bytes] = 0xA5
            trailer = slot[runs.object_bytes :].copy()
            assert engine.store(runs, [0], pool, tickets, checksum=checksum).tolist() == [CopyStatus.OK]
            wanted = np.full(runs.object_bytes, 0xA5, np.uint8)
            places = list(zip(self.base.tolist(), offset.tolist(), self.length.tolist(), strict=True))
            for base, at, length in places:
                wanted[at : at + length] = before[base : base + length]
            assert np.array_equal(slot[: runs.object_bytes], wanted)
            assert checksum or np.array_equal(slot[runs.object_bytes :], trailer)
            assert np.array_equal(self.memory, before)

            pool.publish(tickets)
            held, _ = pool.acquire(["k"])
            self.memory[:] = 0x5A
            assert engine.load(runs, [0], pool, held, checksum=checksum).tolist() == [CopyStatus.OK]
            restored = np.full(len(self.memory), 0x5A, np.uint8)
            for base, _, length in places:
                restored[base : base + length] = before[base : base + length]
            assert np.array_equal(self.memory, restored)
            pool.release(held)


@pytest.mark.parametrize("length", LENGTHS)
def test_every_alignment_of_both_sides(engine: CopyEngine, length: int) -> None:
    """Runs of one length from every alignment to every alignment, with gaps that nobody may touch."""
    steps = np.arange(0, LINE, 1 if length <= 321 else 5)
    source, target = (each.ravel() for each in np.meshgrid(steps, steps))
    room = -(-(length + 2 * LINE) // LINE) * LINE
    place = np.arange(len(source)) * room
    memory = aligned(len(source) * room + LINE)
    Round(memory, place + source, np.full(len(source), length)).check(engine, place + target, checksum=False)


@pytest.mark.parametrize("step", [128, 192, 256, 512, 1536])
@pytest.mark.parametrize("checksum", [False, True])
def test_thousands_of_short_runs_at_a_constant_step(engine: CopyEngine, step: int, checksum: bool) -> None:
    count = 4000
    place = np.arange(count) * step
    memory = aligned(count * step)
    Round(memory, place, np.full(count, 128)).check(engine, np.arange(count) * 128, checksum=checksum)


def test_runs_in_falling_order_and_runs_that_touch(engine: CopyEngine) -> None:
    length = np.full(64, 300)
    memory = aligned(64 * 300)
    falling = np.arange(63, -1, -1) * 300
    Round(memory, falling, length).check(engine, np.arange(64) * 300, checksum=True)
    Round(memory, np.arange(64) * 300, length).check(engine, falling, checksum=True)
    Round(memory, np.arange(64) * 300, length).check(engine, np.arange(64) * 300, checksum=True)


@given(
    length=st.lists(st.integers(1, 300) | st.integers(1, 20_000), min_size=1, max_size=40),
    gap=st.integers(0, 200),
    kernel=st.sampled_from(_native.copy_kernels()),
    swapped=st.none() | st.integers(0, 38),
)
def test_objects_without_gaps_are_summed_on_their_way(
    length: list[int], gap: int, kernel: str, swapped: int | None
) -> None:
    """Pieces shorter and longer than what is summed at a time; with two of them swapped the object isn't
    filled in order. Loads compare the sum with one over the object."""
    ends = np.cumsum(length)
    places = ends - length
    base = np.cumsum(np.array(length) + gap) - length
    if swapped is not None and swapped + 1 < len(length):
        order = list(range(len(length)))
        order[swapped : swapped + 2] = reversed(order[swapped : swapped + 2])
        base, places, length = base[order], places[order], [length[each] for each in order]
    memory = aligned(int(base.max()) + 20_000 + LINE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UMBP_COPY_KERNEL", kernel)
        with CopyEngine(1) as engine:
            Round(memory, base, np.array(length)).check(engine, places, checksum=True)


@given(
    runs=st.lists(
        st.tuples(st.integers(1, 3000), st.integers(0, 200), st.integers(0, 200)), min_size=1, max_size=60
    ),
    checksum=st.booleans(),
    kernel=st.sampled_from(_native.copy_kernels()),
    threads=st.integers(1, 3),
    order=st.randoms(use_true_random=False),
)
def test_any_runs(
    runs: list[tuple[int, int, int]], checksum: bool, kernel: str, threads: int, order: object
) -> None:
    """Lengths, and the gaps before each on both sides; the object's order is not the memory's."""
    length, gap, object_gap = (np.array(column) for column in zip(*runs, strict=True))
    base = np.cumsum(gap + length) - length
    places = np.cumsum(object_gap + length) - length
    memory = aligned(int(base[-1] + length[-1]) + LINE)
    if order.random() < 0.5:  # type: ignore[attr-defined]
        base, places, length = base[::-1], places[::-1], length[::-1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UMBP_COPY_KERNEL", kernel)
        with CopyEngine(threads) as engine:
            Round(memory, base, length).check(engine, places, checksum=checksum)


def test_the_portable_kernel_is_everywhere_and_the_last() -> None:
    assert _native.copy_kernels()[-1] == "portable"
    assert len(set(_native.copy_kernels())) == len(_native.copy_kernels())


def test_an_unknown_kernel_is_refused_in_a_sentence_that_names_those_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UMBP_COPY_KERNEL", "mmx")
    with pytest.raises(ConfigError, match=r"'mmx'.*portable"):
        CopyEngine(1)


XXH3_64 = {
    1: 0xC44BDFF4074EECDB,
    16: 0x8355E3A6F61770DB,
    17: 0x9EF341A99DE37328,
    128: 0x85C6174C7FF4C46B,
    240: 0x375A384D957FE865,
    241: 0x02E8CD95421C6D02,
    1024: 0xE5D78BAFA45B2AA5,
    1025: 0xE95C42288F28186E,
    65536: 0xAAAE63800707A868,
    100000: 0x42C23AEEAD96750D,
}
"""Length -> XXH3's 64 bits, seed 0, of the bytes 0, 1 .. 250, 0, 1 .., by the reference's portable loops."""


@pytest.mark.parametrize("length", XXH3_64)
def test_the_checksum_is_the_same_on_every_processor(length: int) -> None:
    """What one machine stores another one checks: the trailer's checksum is fixed by the format."""
    memory = aligned(length)
    memory[:] = np.arange(length) % 251
    runs = BlockRuns.from_columns([memory.ctypes.data], [0], [length], [0], 1)
    slab_bytes = slot_bytes(length)
    with (
        CopyEngine(1) as engine,
        Pool.create_memfd(slab_bytes, slab_bytes=slab_bytes, min_object_bytes=length) as pool,
    ):
        tickets, _ = pool.reserve(pool.namespace("a"), ["k"], length)
        engine.store(runs, [0], pool, tickets, checksum=True)
        address = int(pool.payload(tickets)[0][0])
        trailer = ctypes.string_at(address, slab_bytes)[length:]
        assert XXH3_64[length].to_bytes(8, "little") in trailer


def test_runs_that_touch_in_one_block_only_are_not_taken_for_one() -> None:
    """The second run lies right behind the first in block 0, and elsewhere in block 1."""
    memory = aligned(4096)
    memory[:] = np.random.default_rng(7).integers(0, 256, 4096, np.uint8)
    runs = BlockRuns.from_columns(
        [memory.ctypes.data, memory.ctypes.data + 64], [1024, 512], [64, 64], [0, 64], 2
    )
    with (
        CopyEngine(1) as engine,
        Pool.create_memfd(8192, slab_bytes=4096, min_object_bytes=128) as pool,
    ):
        tickets, _ = pool.reserve(pool.namespace("a"), ["k0", "k1"], 128)
        assert set(engine.store(runs, [0, 1], pool, tickets).tolist()) == {CopyStatus.OK}
        found = [ctypes.string_at(int(address), 128) for address in pool.payload(tickets)[0]]
        assert found == [
            bytes(np.concatenate([memory[at : at + 64], memory[then : then + 64]]))
            for at, then in ((0, 64), (1024, 576))
        ]
