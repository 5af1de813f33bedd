"""`umbp bench store`: objects from the pool into a cluster store and back, against the store's own client.

What is measured is the way of every engine: `put` from the offer of what an engine has stored until the
store has all, seals and all, `get` from the question until all lie in the pool, published and held. Payloads
are summed when an engine stores and compared when one loads: `umbp bench copy` shows what that costs, in its
rows with verify "always". The reference, in every round beside it,
is the bare client on as many objects of its own, as long as a payload with its seal is, in calls as large as
are safe. `_unchecked` is the way of engines without checksums (`verify: off`), `_unsealed` the bare client
with the payloads alone, and `_ranges` with 32 ranges each.
"""

from __future__ import annotations

import contextlib
import itertools
import mmap
import secrets
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import click
import numpy as np

from umbp.cli.bench import machine, mooncake
from umbp.cli.bench.report import Report, Row, publish, rounded
from umbp.cli.bench.stock import HASH_BYTES, make_pool, require
from umbp.cli.bench.store_clients import (
    TIMEOUT_MS,
    BareClient,
    bare_client,
    cluster,
    quieten,
    require_store,
    store_options,
    why_not,
)
from umbp.cli.bench.store_lookup import lookup_rows
from umbp.cli.bench.timing import Times, timed
from umbp.errors import CapacityError, InvariantError
from umbp.options import Options, parse_options
from umbp.pool import SEAL_BYTES, CopyStatus, Outcome, Pool
from umbp.pool.limits import memory_limits, refuse_over_limit
from umbp.runtime.far.worker import WorkerFar
from umbp.runtime.moves import Move
from umbp.store.factory import create_store
from umbp.store.gate import StoreGate
from umbp.transfer import BlockRuns, CopyEngine

SHAPES = ((256, 2 << 20), (2048, 64 << 10))
"""(objects, bytes of each) where none are asked for: blocks of large models and of small ones."""
SMALL_SHAPES = ((32, 2 << 20), (256, 64 << 10))
RANGES = 32
RANGED_OBJECTS = 64
"""At most so many are moved by ranges, which takes long."""
KEYS = (1, 256, 4096, 8192)
SMALL_KEYS = (1, 256)
SPARE_BYTES = 256 << 20


@click.command("store")
@click.option("--store", default="mooncake", show_default=True, type=click.Choice(["mooncake", "redis"]))
@click.option(
    "--master",
    metavar="HOST:PORT",
    help="A master (or Redis) that runs; it needs room for the objects twice.  [default: one of its own]",
)
@click.option("--objects", type=click.IntRange(1, 1 << 20), help="Together with --object-bytes.")
@click.option("--object-bytes", type=click.IntRange(RANGES, 1 << 30), help="Bytes of each.")
@click.option("--repeat", default=15, show_default=True, type=click.IntRange(1, 1000), help="Rounds.")
@click.option("--small", is_flag=True, help="A short run: few objects and keys, 3 rounds.")
@click.option("--json", "is_json", is_flag=True, help="One JSON object instead of a table.")
def command(
    store: str,
    master: str | None,
    objects: int | None,
    object_bytes: int | None,
    repeat: int,
    small: bool,
    is_json: bool,
) -> None:
    """Objects into a cluster store and back, against the store's own client; and what questions cost.

    The store runs on this machine, with a master and a node of its own, unless --master names another.
    """
    if (objects is None) != (object_bytes is None):
        raise click.UsageError("--objects and --object-bytes go together")
    shapes: Sequence[tuple[int, int]] = SMALL_SHAPES if small else SHAPES
    if objects is not None and object_bytes is not None:
        shapes = ((objects, object_bytes),)
    report = measure(
        shapes,
        keys=SMALL_KEYS if small else KEYS,
        rounds=min(repeat, 3) if small else repeat,
        store=store,
        where=master,
    )
    publish(report, is_json=is_json)


def measure(
    shapes: Sequence[tuple[int, int]],
    *,
    keys: Sequence[int],
    rounds: int,
    store: str = "mooncake",
    where: str | None = None,
) -> Report:
    """A report with rows for each shape, then for questions of so many keys. Where the store can't run here
    it has none, and a note that says why.
    """
    notes = [
        "ratio_to_bare_client is speed over that of the store's own client in the same round, their median.",
        "_unchecked: with seals and without checksums, as engines with verify: off.",
        f"The bare client's objects have {SEAL_BYTES} bytes for a seal as well. Against itself: _unsealed,",
        f"which are the payloads alone, and _ranges, those in {RANGES} ranges each.",
        "near_lookup: all keys are in the pool. round_trips are counted at the store.",
    ]
    results: list[Row] = []
    if missing := why_not(store):
        notes = [f"The store is left out: {missing}"]
    else:
        largest = max(objects * (object_bytes + SEAL_BYTES) for objects, object_bytes in shapes)
        room_bytes = 2 * largest + SPARE_BYTES
        refuse_over_limit(room_bytes + 2 * largest, memory_limits(), "a benchmark")
        quieten()
        if where is not None:
            require_store(where)
        with contextlib.ExitStack() as ending:
            at = where or ending.enter_context(cluster(store, room_bytes))
            options = parse_options(
                {"mode": "distributed", "store": store, "store_options": store_options(store, at)}
            )
            for shape in shapes:
                results += _rows(*shape, options, at, rounds)
            results += lookup_rows(keys, options, at, rounds)
    package = mooncake.DISTRIBUTION if store == "mooncake" else store
    return Report(
        title=f"{store.capitalize()} behind a pool against its own client, median of {rounds}",
        results=results,
        machine=machine.facts("umbp", package),
        notes=notes,
    )


@dataclass(frozen=True, slots=True)
class _Setting:
    """Objects in a pool, and as many bytes in memory of the bare client's."""

    names: list[str]
    object_bytes: int
    pool: Pool
    namespace_id: int
    far: WorkerFar
    unchecked: WorkerFar
    """As `far`, without checksums."""
    move: Move
    """All of them, from and to the bare client's memory."""
    engine: CopyEngine
    bare: BareClient
    bare_names: list[str]
    addresses: list[int]

    @property
    def total_bytes(self) -> int:
        return len(self.names) * self.object_bytes

    def store(self, *, checksum: bool) -> None:
        """Into the pool, as an engine does."""
        move = self.move
        tickets, outcomes = self.pool.reserve(
            self.namespace_id, move.names, self.object_bytes, move.parent_names
        )
        require(outcomes, Outcome.RESERVED)
        statuses = self.engine.store(move.runs, move.block_ids, self.pool, tickets, checksum=checksum)
        require(statuses, CopyStatus.OK)
        require(self.pool.publish(tickets), Outcome.PUBLISHED)

    def put(self, far: WorkerFar) -> None:
        far.offer(self.pool, self.names)
        if not far.flush(TIMEOUT_MS / 1000):
            raise InvariantError("the objects did not go out in time")

    def get(self, far: WorkerFar) -> Callable[[], object]:
        """Fetch all into the pool, which has none; what gives them back afterwards."""
        brought = far.fetch(self.pool, self.namespace_id, self.move, far.deadline_s())
        if not brought.is_held.all():
            raise CapacityError(
                f"an object that was just put is not in the store ({brought.error}): no node offers memory, "
                "or there is too little of it; it must hold all objects twice"
            )
        return partial(self.pool.release, brought.tickets)


def _rows(objects: int, object_bytes: int, options: Options, where: str, rounds: int) -> Iterator[Row]:
    with _setting(objects, object_bytes, options, where) as at:
        cases: dict[str, Callable[[], dict[str, float]]] = {
            "": partial(_by_umbp, at, at.far),
            "unchecked": partial(_by_umbp, at, at.unchecked),
            "bare": partial(_by_bare, at, at.object_bytes + SEAL_BYTES),
            "unsealed": partial(_by_bare, at, at.object_bytes),
        }
        if at.bare.most_ranges:
            cases["ranges"] = partial(_by_ranges, at)
        seconds: dict[tuple[str, str], list[float]] = {}
        for number in range(rounds + 1):
            # Each case comes first, last and between equally often.
            for name in itertools.islice(itertools.cycle(cases), number, number + len(cases)):
                for op, per_byte_s in cases[name]().items():
                    if number:  # the first round warms up
                        seconds.setdefault((name, op), []).append(per_byte_s)
        times = {name: Times(tuple(each)) for name, each in seconds.items()}
        for name in cases:
            for op in ("put", "get") if name != "bare" else ():
                yield _row(at, f"{op}_{name}" if name else op, times[name, op], times["bare", op])


def _row(at: _Setting, op: str, found: Times, bare: Times) -> Row:
    """From the seconds that a byte takes."""
    ratios = [theirs / ours for theirs, ours in zip(bare.seconds, found.seconds, strict=True)]
    return {
        "op": op,
        "objects": len(at.names),
        "object_bytes": at.object_bytes,
        "gib_per_s": rounded(1 / found.median_s / 2**30),
        "ratio_to_bare_client": rounded(statistics.median(ratios)),
        "spread": rounded(found.spread),
        "bare_gib_per_s": rounded(1 / bare.median_s / 2**30),
    }


def _by_umbp(at: _Setting, far: WorkerFar) -> dict[str, float]:
    """Out of the pool, which has just got them, so that they have no seals yet, and back into it."""
    at.pool.remove(at.names)
    at.store(checksum=far.sends_checksums)
    _, put_s = timed(partial(at.put, far))
    require(at.pool.remove(at.names), Outcome.REMOVED)
    release, get_s = timed(partial(at.get, far))
    release()
    at.bare.remove(at.names)
    return {"put": put_s / at.total_bytes, "get": get_s / at.total_bytes}


def _by_bare(at: _Setting, size: int) -> dict[str, float]:
    _, put_s = timed(partial(at.bare.put, at.bare_names, at.addresses, size))
    _, get_s = timed(partial(at.bare.get, at.bare_names, at.addresses, size))
    at.bare.remove(at.bare_names)
    return {"put": put_s / at.total_bytes, "get": get_s / at.total_bytes}


def _by_ranges(at: _Setting) -> dict[str, float]:
    """As an engine keeps them: the ranges of one object lie far from each other."""
    names = at.bare_names[:RANGED_OBJECTS]
    size, first, count = at.object_bytes // RANGES, at.addresses[0], len(at.addresses)
    ranges = [
        [first + (number * count + row) * size for number in range(RANGES)] for row in range(len(names))
    ]
    _, put_s = timed(partial(at.bare.put_ranges, names, ranges, size))
    _, get_s = timed(partial(at.bare.get_ranges, names, ranges, size))
    at.bare.remove(names)
    total = len(names) * RANGES * size
    return {"put": put_s / total, "get": get_s / total}


@contextlib.contextmanager
def _setting(objects: int, object_bytes: int, options: Options, where: str) -> Iterator[_Setting]:
    """One process's pool, connected to the store, and a bare client with memory of its own."""
    namespace = secrets.token_hex(16)
    names, bare_names = (
        [f"umbp:vllm:v1:{namespace}:{whose}:{secrets.token_hex(HASH_BYTES)}" for _ in range(objects)]
        for whose in ("pool", "bare")
    )
    stride = object_bytes + SEAL_BYTES
    content = np.frombuffer(mmap.mmap(-1, objects * stride), np.uint8)
    content[:] = np.resize(np.random.default_rng(1).integers(0, 256, 65_521, np.uint8), content.size)
    address = int(content.ctypes.data)
    traits = create_store(options, serves_memory=False).traits
    with contextlib.ExitStack() as ending:
        pool = ending.enter_context(make_pool(objects, object_bytes))
        fars = []
        for has_checksums in (True, False):
            far = WorkerFar(
                partial(_gate, traits.name, options),
                traits,
                timeout_s=TIMEOUT_MS / 1000,
                has_checksums=has_checksums,
            )
            ending.callback(far.close)
            fars.append(far)
        store = options.store or ""
        yield _Setting(
            names=names,
            object_bytes=object_bytes,
            pool=pool,
            namespace_id=pool.namespace("bench"),
            far=fars[0],
            unchecked=fars[1],
            move=Move(
                BlockRuns.from_columns([address], [stride], [object_bytes], [0], objects),
                names,
                range(objects),
                names,
                [None, *names[:-1]],
            ),
            engine=ending.enter_context(CopyEngine(1)),
            bare=ending.enter_context(bare_client(store, where, address, content.size)),
            bare_names=bare_names,
            addresses=[address + row * stride for row in range(objects)],
        )


def _gate(name: str, options: Options, before_return: Callable[..., bool]) -> StoreGate:
    gate = StoreGate(name, lambda: create_store(options, serves_memory=False), before_return=before_return)
    gate.open(TIMEOUT_MS / 1000)
    return gate
