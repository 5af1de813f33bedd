"""`umbp bench copy`: blocks of KV memory into the pool and out of it, against one big memcpy.

The reference is glibc's memcpy on one thread, of as many bytes, between the same KV memory and shared memory
like the pool's; it runs in every round beside the copies that are measured. Both stay on one core, helpers on
the others. KV memory has the pages that an engine's has on a CPU: anonymous, without huge pages. Blocks are
taken in random order.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import click
import numpy as np
import numpy.typing as npt

from umbp.cli.bench import machine, mooncake
from umbp.cli.bench.report import Report, Row, publish, rounded
from umbp.cli.bench.stock import make_pool, require
from umbp.cli.bench.timing import Times, interleaved, timed
from umbp.errors import InvariantError
from umbp.pool import CopyStatus, Outcome, Pool, SealStatus
from umbp.pool.limits import memory_limits, refuse_over_limit
from umbp.transfer import BlockRuns, CopyEngine

SHAPES = ((32, 64 << 10), (32, 18 << 10), (60, 8 << 10), (1024, 512))
"""(ranges, bytes of each) where none are asked for: layers of large, middling and small models, and a block
that a layout tears into short pieces."""


@dataclass(frozen=True, slots=True)
class Case:
    """Objects of `ranges` times `range_bytes`, copied by so many threads."""

    objects: int
    ranges: int
    range_bytes: int
    threads: tuple[int, ...]

    @property
    def object_bytes(self) -> int:
        return self.ranges * self.range_bytes

    @property
    def total_bytes(self) -> int:
        return self.objects * self.object_bytes


@click.command("copy")
@click.option("--objects", default=256, show_default=True, type=click.IntRange(1, 1 << 20))
@click.option("--ranges", type=click.IntRange(1, 1 << 16), help="Contiguous pieces of an object.")
@click.option("--range-bytes", type=click.IntRange(1, 1 << 30), help="Bytes of each piece.")
@click.option(
    "--threads", multiple=True, type=click.IntRange(1, 256), help="May be given again.  [default: 1 and 2]"
)
@click.option("--repeat", default=15, show_default=True, type=click.IntRange(1, 1000), help="Rounds.")
@click.option("--against", type=click.Choice(["mooncake"]), help="Measure that store as well.")
@click.option("--small", is_flag=True, help="A short run: at most 16 objects, 3 rounds.")
@click.option("--json", "is_json", is_flag=True, help="One JSON object instead of a table.")
def command(
    objects: int,
    ranges: int | None,
    range_bytes: int | None,
    threads: Sequence[int],
    repeat: int,
    against: str | None,
    small: bool,
    is_json: bool,
) -> None:
    """Blocks into the pool and out of it, against one big memcpy of the same bytes.

    Without --ranges and --range-bytes several shapes are measured. Rows with verify "always" compute or check
    a checksum as well, as the first load of what came from elsewhere does; seal and check_seal read a payload
    for its checksum alone.
    """
    if (ranges is None) != (range_bytes is None):
        raise click.UsageError("--ranges and --range-bytes go together")
    shapes = SHAPES if ranges is None or range_bytes is None else ((ranges, range_bytes),)
    report = measure(
        shapes,
        objects=min(objects, 16) if small else objects,
        threads=tuple(dict.fromkeys(threads)) or (1, 2),
        rounds=min(repeat, 3) if small else repeat,
        is_against_mooncake=bool(against),
    )
    publish(report, is_json=is_json)


def measure(
    shapes: Sequence[tuple[int, int]],
    *,
    objects: int,
    threads: tuple[int, ...],
    rounds: int,
    is_against_mooncake: bool = False,
) -> Report:
    """A report with a row for each shape, direction, number of threads and `verify`, and for seals."""
    cases = [Case(objects, ranges, size, threads) for ranges, size in shapes]
    largest = max(case.total_bytes for case in cases)
    refuse_over_limit(3 * largest, memory_limits(), "a benchmark")
    missing = mooncake.why_not() if is_against_mooncake else None
    has_mooncake = is_against_mooncake and missing is None
    results = [row for case in cases for row in _rows(case, rounds, has_mooncake=has_mooncake)]
    return Report(
        title=f"Copies of {objects} objects against one memcpy, median of {rounds}",
        results=results,
        machine=machine.facts("umbp", "numpy", *([mooncake.DISTRIBUTION] if has_mooncake else [])),
        notes=(
            "ratio_to_memcpy is speed over the speed of one thread's memcpy of the same bytes, same rounds.",
            "spread is the middle half of the rounds over the median; verify far is the default.",
            "seal and check_seal read the payload once, in the thread that calls, and copy nothing.",
            *([missing] if missing else []),
        ),
    )


def _rows(case: Case, rounds: int, *, has_mooncake: bool) -> Iterator[Row]:
    with _Setting.of(case) as at:
        if has_mooncake:
            yield from _mooncake_rows(at, rounds)
        tickets, outcomes = at.pool.reserve(at.pool.namespace("bench"), at.keys, case.object_bytes)
        require(outcomes, Outcome.RESERVED)
        at.copy("store", tickets, case.threads[0], checksum=False)()  # a seal would repeat a stored checksum
        yield _seal_row("seal", at, partial(at.pool.seal, tickets, at.keys), rounds)
        yield from _measured("store", at, tickets, rounds)
        require(at.pool.publish(tickets), Outcome.PUBLISHED)
        pins, outcomes = at.pool.acquire(at.keys)
        require(outcomes, Outcome.HIT)
        yield from _measured("load", at, pins, rounds)
        yield _seal_row("check_seal", at, partial(at.pool.check_seal, pins, at.keys), rounds)
        at.pool.release(pins)


def _measured(op: str, at: _Setting, tickets: npt.NDArray[np.uint64], rounds: int) -> Iterator[Row]:
    """The rows of one direction; the memcpy goes the same way."""
    case = at.case
    to, source = (at.shared, at.kv) if op == "store" else (at.kv, at.shared)
    cases: dict[str, Callable[[], object]] = {"memcpy": partial(_memcpy, to, source)}
    asked = [(threads, checksum) for checksum in (False, True) for threads in case.threads]
    for threads, checksum in asked:
        cases[f"{threads} {checksum}"] = at.copy(op, tickets, threads, checksum)
    times = interleaved(cases, rounds)
    reference = times["memcpy"]
    for threads, checksum in asked:
        found = times[f"{threads} {checksum}"]
        how = {"threads": threads, "verify": "always" if checksum else "far"}
        yield _row(case, op, how, found, reference)
    if op == "load":
        at.check()


def _seal_row(op: str, at: _Setting, verb: Callable[[], npt.NDArray[np.uint8]], rounds: int) -> Row:
    """Reading every payload once, on the calling thread."""
    times = interleaved(
        {
            "memcpy": partial(_memcpy, at.kv, at.shared),
            op: lambda: require(verb(), SealStatus.OK),
        },
        rounds,
    )
    return _row(at.case, op, {"threads": 1, "verify": "far"}, times[op], times["memcpy"])


def _row(case: Case, op: str, how: Row, found: Times, reference: Times) -> Row:
    return {
        "op": op,
        "ranges": case.ranges,
        "range_bytes": case.range_bytes,
        "objects": case.objects,
        **how,
        "gib_per_s": rounded(case.total_bytes / found.median_s / 2**30),
        "ratio_to_memcpy": rounded(reference.per(found)),
        "spread": rounded(found.spread),
        "memcpy_gib_per_s": rounded(case.total_bytes / reference.median_s / 2**30),
    }


def _mooncake_rows(at: _Setting, rounds: int) -> Iterator[Row]:
    """The same blocks into Mooncake's store in this process and out of it, each range a buffer of its own."""
    case = at.case
    layer_bytes = case.objects * case.range_bytes
    pointers = [
        [at.kv.address + layer * layer_bytes + block * case.range_bytes for layer in range(case.ranges)]
        for block in at.blocks.tolist()
    ]
    sizes = [[case.range_bytes] * case.ranges] * case.objects
    seconds: dict[str, list[float]] = {"store": [], "load": [], "memcpy store": [], "memcpy load": []}
    with mooncake.store(2 * case.total_bytes + (64 << 20)) as store:
        mooncake.require([store.register_buffer(at.kv.address, case.total_bytes)])
        for number in range(rounds + 1):
            keys = [f"{number}/{key}" for key in at.keys]
            put, put_s = timed(partial(store.batch_put_from_multi_buffers, keys, pointers, sizes))
            mooncake.require(put)
            get, get_s = timed(partial(store.batch_get_into_multi_buffers, keys, pointers, sizes))
            mooncake.require(get, case.object_bytes)
            mooncake.require([store.remove(key, True) for key in keys])
            _, to_s = timed(partial(_memcpy, at.shared, at.kv))
            _, from_s = timed(partial(_memcpy, at.kv, at.shared))
            if number:  # the first round warms up
                for name, taken_s in zip(seconds, (put_s, get_s, to_s, from_s), strict=True):
                    seconds[name].append(taken_s)
        store.unregister_buffer(at.kv.address)
    times = {name: Times(tuple(each)) for name, each in seconds.items()}
    for op in ("store", "load"):
        yield _row(case, op, {"system": "mooncake"}, times[op], times[f"memcpy {op}"])


@dataclass(frozen=True, slots=True)
class _Memory:
    """Mapped memory, and where it lies."""

    content: npt.NDArray[np.uint8]
    address: int

    @classmethod
    def mapped(cls, size: int, flags: int) -> _Memory:
        # The array keeps the mapping; numpy's own allocator would ask for huge pages, which engines don't.
        content = np.frombuffer(mmap.mmap(-1, size, flags | mmap.MAP_ANONYMOUS), np.uint8)
        content[:] = 1
        return cls(content, content.ctypes.data)


@dataclass(frozen=True, slots=True)
class _Setting:
    """KV memory of known content, the reference's memory, a pool for all objects, and copy engines."""

    case: Case
    kv: _Memory
    shared: _Memory
    pool: Pool
    engines: dict[int, CopyEngine]
    runs: BlockRuns
    blocks: npt.NDArray[np.int64]
    keys: list[str]

    @classmethod
    @contextmanager
    def of(cls, case: Case) -> Iterator[_Setting]:
        kv = _Memory.mapped(case.total_bytes, mmap.MAP_PRIVATE)
        shared = _Memory.mapped(case.total_bytes, mmap.MAP_SHARED)
        rng = np.random.default_rng(1)
        _content(kv, case)[:] = _content_of(case)
        shared.content[:] = kv.content
        layer_bytes = case.objects * case.range_bytes
        runs = BlockRuns.from_columns(
            base_address=[kv.address + layer * layer_bytes for layer in range(case.ranges)],
            block_stride=[case.range_bytes] * case.ranges,
            run_bytes=[case.range_bytes] * case.ranges,
            object_offset=[layer * case.range_bytes for layer in range(case.ranges)],
            block_count=case.objects,
        )
        with ExitStack() as held:
            cores = held.enter_context(_on_one_core())
            pool = held.enter_context(make_pool(case.objects, case.object_bytes))
            yield cls(
                case=case,
                kv=kv,
                shared=shared,
                pool=pool,
                engines={count: held.enter_context(CopyEngine(count, cores)) for count in case.threads},
                runs=runs,
                blocks=rng.permutation(case.objects),
                keys=[f"bench/{number}" for number in range(case.objects)],
            )

    def copy(
        self, op: str, tickets: npt.NDArray[np.uint64], threads: int, checksum: bool
    ) -> Callable[[], None]:
        engine = self.engines[threads]
        verb = engine.store if op == "store" else engine.load

        def call() -> None:
            require(verb(self.runs, self.blocks, self.pool, tickets, checksum=checksum), CopyStatus.OK)

        return call

    def check(self) -> None:
        """What was loaded is what had been there."""
        self.kv.content[:] = 0
        engine = self.engines[self.case.threads[0]]
        pins, _ = self.pool.acquire(self.keys)
        require(engine.load(self.runs, self.blocks, self.pool, pins), CopyStatus.OK)
        self.pool.release(pins)
        if not np.array_equal(_content(self.kv, self.case), _content_of(self.case)):
            raise InvariantError("the copies have moved wrong bytes")


@contextmanager
def _on_one_core() -> Iterator[list[int]]:
    """Keeps this thread on one core; the others that it might use."""
    usable = os.sched_getaffinity(0)
    first, *others = sorted(usable)
    os.sched_setaffinity(0, {first})
    try:
        yield others
    finally:
        os.sched_setaffinity(0, usable)


def _content(memory: _Memory, case: Case) -> npt.NDArray[np.uint8]:
    """The bytes that are compared: the first and last of every piece."""
    pieces = memory.content.reshape(case.ranges * case.objects, case.range_bytes)
    return pieces[:, :: max(1, case.range_bytes - 1)]


def _content_of(case: Case) -> npt.NDArray[np.uint8]:
    columns = len(range(0, case.range_bytes, max(1, case.range_bytes - 1)))
    return np.random.default_rng(2).integers(0, 256, (case.ranges * case.objects, columns), np.uint8)


def _memcpy(to: _Memory, source: _Memory) -> None:
    _LIBC.memcpy(to.address, source.address, len(to.content))


_LIBC = ctypes.CDLL(None)
_LIBC.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_LIBC.memcpy.restype = ctypes.c_void_p
