"""What could not be fetched: each object is counted for its own reason, and what is damaged makes room for a
whole one."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from far_rig import LONG_S, SIZE, Rig, move_of
from replaced_pools import ReplacedPools

from umbp.data import (
    BlockIdentityCodec,
    BlockLoadBatch,
    BlockTransferPlan,
    KVLayoutDescriptor,
    KVRegion,
    RankTopology,
    UMBPNamespace,
)
from umbp.options import parse_options
from umbp.pool import SEAL_BYTES
from umbp.runtime.far.counts import FarCounts
from umbp.runtime.far.fetch import Fetcher
from umbp.runtime.far.turns import Turns
from umbp.runtime.far.worker import WorkerFar
from umbp.runtime.mover import ObjectMover
from umbp.runtime.moves import Move
from umbp.runtime.pool_worker import PoolWorkerHandle
from umbp.store import base
from umbp.store.base import ClusterStore
from umbp.store.gate import StoreGate
from umbp.store.mooncake import MooncakeStore
from umbp.store.mooncake_settings import MooncakeSettings
from umbp.store.redis import RedisSettings, RedisStore
from umbp.testing.stores import servers
from umbp.testing.stores.memory import TRAITS, MemoryCluster
from umbp.testing.stores.rig import StoreRig
from umbp.testing.tensors import FakeTensor
from umbp.transfer import BlockRuns, CopyEngine

SEALED_BYTES = SIZE + SEAL_BYTES


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def failures(far: WorkerFar) -> dict[str, float]:
    """Since the last call, by reason."""
    counts = far.take_counts()
    return {labels[2]: amount for labels, amount in counts.items() if labels[0] == "failed_fetch_objects"}


# What is damaged makes room for a whole one


@contextlib.contextmanager
def memory_store(_: Path) -> Iterator[Callable[[], ClusterStore]]:
    yield MemoryCluster().connect


@contextlib.contextmanager
def redis_store(folder: Path) -> Iterator[Callable[[], ClusterStore]]:
    if why := servers.why_no_redis():
        pytest.skip(why)
    server = servers.start_redis(folder / "log")
    port = int(server.address.rpartition(":")[2])
    yield lambda: RedisStore(RedisSettings(port=port))
    server.kill()


@contextlib.contextmanager
def mooncake_store(folder: Path) -> Iterator[Callable[[], ClusterStore]]:
    if why := servers.why_no_mooncake():
        pytest.skip(why)
    with servers.mooncake_cluster(folder, 64 << 20) as master:
        yield lambda: MooncakeStore(MooncakeSettings(master=master))


@pytest.fixture(
    scope="module",
    params=[memory_store, redis_store, pytest.param(mooncake_store, marks=pytest.mark.slow)],
    ids=["memory", "redis", "mooncake"],
)
def connect(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[], ClusterStore]]:
    """Makes connections to one store."""
    with request.param(tmp_path_factory.mktemp("store")) as connect:
        yield connect


@pytest.fixture(scope="module")
def shelf(connect: Callable[[], ClusterStore]) -> Iterator[StoreRig]:
    """Whoever spoils objects."""
    shelf = StoreRig(connect(), 1 << 20)
    yield shelf
    shelf.store.close()


@pytest.fixture(scope="module")
def gate(connect: Callable[[], ClusterStore]) -> Iterator[StoreGate]:
    gate = StoreGate("spoilt", connect)
    gate.open(LONG_S)
    yield gate
    gate.close(LONG_S)


SPOILT: Mapping[str, Callable[[bytes, bytes], bytes]] = {
    "flipped": lambda own, other: own[:7] + bytes([own[7] ^ 1]) + own[8:],
    "another's": lambda own, other: other,
    "cut": lambda own, other: own[:-1],
    "cut short": lambda own, other: own[:1],
    "empty": lambda own, other: b"",
    "without its seal": lambda own, other: own[:SIZE],
    "longer": lambda own, other: own + b"x",
    "twice": lambda own, other: own + own,
}
"""An object's bytes, made of its own and another's."""


@pytest.mark.parametrize("how", SPOILT)
def test_what_is_damaged_is_counted_removed_and_replaced_however_it_is(
    gate: StoreGate, shelf: StoreRig, how: str
) -> None:
    if how == "empty" and isinstance(shelf.store, MooncakeStore):
        pytest.skip("Mooncake has no empty objects")
    rig = Rig()
    far = WorkerFar(lambda repay: gate, shelf.store.traits, timeout_s=LONG_S, has_checksums=True)
    names = [f"{how}:{number}" for number in range(4)]

    def send_all() -> None:
        rig.put(names, 7)
        far.offer(rig.pool, names)
        assert far.flush(LONG_S)
        rig.pool.remove(names)

    send_all()
    _, (other, own) = shelf.get(dict.fromkeys(names[:2], SEALED_BYTES))
    assert shelf.remove(names[1:2]) == shelf.put({names[1]: SPOILT[how](own, other)}) == [base.Outcome.DONE]
    failures(far)

    loaded = rig.load(far, names)
    assert loaded.is_done.tolist() == [True, False, True, True]
    assert str(loaded.error).startswith("damaged: " if how == "flipped" else "absent: ")
    assert failures(far) == {"damaged": 1}
    until_s = time.monotonic() + LONG_S
    while shelf.exists(names[1:2]) != [base.Outcome.MISS]:
        assert time.monotonic() < until_s, "it was not removed"
    assert shelf.exists(names) == [
        base.Outcome.DONE if each != names[1] else base.Outcome.MISS for each in names
    ]

    rig.pool.remove(names)
    send_all()
    for _ in ("compared", "known to be sound"):
        loaded = rig.load(far, names)
        assert loaded.is_done.all(), loaded.error
    assert failures(far) == {}
    rig.close()


def test_what_a_load_names_twice_or_in_great_numbers_is_removed_once_in_calls_of_the_stores_size() -> None:
    rig = Rig(replace(TRAITS, most_keys=2))
    names = [f"n{number}" for number in range(5)]
    rig.put(names, 7)
    far = rig.far()
    far.offer(rig.pool, names)
    assert far.flush(LONG_S)
    rig.pool.remove(names)
    for name in names:
        rig.cluster.damage(name)
    loaded = rig.load(far, [*names, *names])
    assert not loaded.is_done.any()
    assert failures(far) == {"damaged": 5}
    (store,) = rig.cluster.stores
    until_s = time.monotonic() + LONG_S
    while rig.cluster.objects:
        assert time.monotonic() < until_s, "they were not removed"
    assert store.calls.count("remove") == 3
    assert far.close()
    rig.close()


def test_who_finds_damage_late_leaves_the_whole_one_alone_that_took_its_place() -> None:
    rig = Rig()
    far = rig.far()
    names = ["k"]

    def send() -> None:
        rig.put(names, 7)
        far.offer(rig.pool, names)
        assert far.flush(LONG_S)

    send()
    rig.pool.remove(names)
    rig.cluster.objects["k"] = SPOILT["flipped"](rig.cluster.objects["k"], b"")
    memory = np.zeros(SIZE, np.uint8)
    runs = BlockRuns.from_columns([int(memory.ctypes.data)], [SIZE], [SIZE], [0], 1)
    move = Move(runs, names, range(1), names)
    with CopyEngine(1) as engine:
        mover = ObjectMover(rig.pool, rig.ns, engine, has_checksums=False, told_damaged=far.discard)
        soon, late = (far.fetch(rig.pool, rig.ns, move, far.deadline_s()) for _ in range(2))
        assert not mover.load_held(move, soon.tickets, soon.is_held, None).is_done.any()
        assert rig.removed.wait(LONG_S)
        send()
        assert not mover.load_held(move, late.tickets, late.is_held, None).is_done.any()
        assert failures(far) == {"damaged": 1}
        assert rig.pool.lookup(names).all()
        assert mover.load(move, None).is_done.all()
    rig.close()
    assert list(rig.cluster.objects) == names


# Each object is counted for its own reason

ANSWERS = {
    "whole": base.Outcome.DONE,
    "absent": base.Outcome.MISS,
    "damaged": base.Outcome.DAMAGED,
    "busy": base.Outcome.LATER,
    "gone": base.Outcome.BROKEN,
}
"""What a store answers to objects of these names, by the reason for which they are lost."""


@pytest.mark.parametrize("at_once", [1, 2, 5])
def test_each_object_is_lost_for_its_own_reason_whatever_befalls_the_others(at_once: int) -> None:
    # A store that finds all of a batch broken is left alone, and the rest is gone too.
    kinds_of = [kind for kind in ANSWERS if kind != "gone" or at_once > 1]
    rig = Rig(replace(TRAITS, most_objects=at_once))
    far = rig.far()
    (store,) = rig.cluster.stores
    gets = store.get

    def get(keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> Sequence[base.Outcome]:
        gets(keys, addresses, sizes)
        return [ANSWERS[key.partition(":")[0]] for key in keys]

    for number, kinds in enumerate(permutations(kinds_of)):
        if at_once == 2 and kinds[-1] == "gone":
            continue  # it is a batch of its own
        names = [f"{kind}:{number}" for kind in kinds]
        whole = f"whole:{number}"
        rig.put([whole], 7)
        far.offer(rig.pool, [whole])
        assert far.flush(LONG_S)
        rig.pool.remove([whole])
        store.get = get  # type: ignore[method-assign, assignment]
        brought = far.fetch(rig.pool, rig.ns, move_of(names), far.deadline_s())
        assert failures(far) == {kind: 1 for kind in kinds if kind != "whole"}
        assert {row: why.partition(":")[0] for row, why in brought.lost.items()} == {
            row: kind for row, kind in enumerate(kinds) if kind != "whole"
        }
        assert (brought.error or "").startswith(next(kind for kind in kinds if kind != "whole"))
        rig.pool.release(brought.tickets[brought.is_held])
    rig.close()


def test_a_store_that_is_slow_is_busy_and_one_that_is_left_alone_for_it_is_gone() -> None:
    rig = Rig(replace(TRAITS, most_objects=1))
    far = rig.far(timeout_s=0.05)
    rig.cluster.hang("get", "probe")
    for number, reason in enumerate(("busy", "gone", "gone")):
        # A slot that the store may still write to is nobody's until it answers.
        names = [f"{number}:{place}" for place in range(3)]
        brought = far.fetch(rig.pool, rig.ns, move_of(names), far.deadline_s())
        assert failures(far) == {reason: 3}
        assert (brought.error or "").startswith(f"{reason}: ")
    rig.close()


def test_a_store_that_breaks_is_gone(rig: Rig) -> None:
    far = rig.far()
    (store,) = rig.cluster.stores

    def get(keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> list[base.Outcome]:
        raise RuntimeError("an adapter that raises")

    store.get = get  # type: ignore[method-assign]
    far.fetch(rig.pool, rig.ns, move_of(["a", "b"]), far.deadline_s())
    assert failures(far) == {"gone": 2}


def test_a_store_that_has_been_left_is_gone(rig: Rig) -> None:
    far = rig.far()
    assert far.close()
    far.fetch(rig.pool, rig.ns, move_of(["a", "b"]), far.deadline_s())
    assert failures(far) == {"gone": 2}


def test_a_store_that_takes_no_memory_is_gone(rig: Rig) -> None:
    far = rig.far()
    (store,) = rig.cluster.stores
    store.refuses_memory = True
    far.fetch(rig.pool, rig.ns, move_of(["a", "b"]), far.deadline_s())
    assert failures(far) == {"gone": 2}


@pytest.mark.parametrize("is_published", [True, False])
def test_what_others_are_at_is_told_from_what_is_absent_or_from_before_a_clear(
    rig: Rig, is_published: bool
) -> None:
    """What somebody else publishes meanwhile isn't lost."""
    far = rig.far()
    rig.put(["whole"], 7)
    far.offer(rig.pool, ["whole"])
    assert far.flush(LONG_S)
    rig.pool.remove(["whole"])
    theirs, _ = rig.pool.reserve(rig.ns, ["theirs"], SIZE)
    now_s = [0.0]

    def pause(seconds: float) -> None:
        now_s[0] += seconds
        if is_published:
            rig.pool.publish(theirs)

    fetcher = Fetcher(
        *(rig.gates[0], TRAITS, Turns(1), rig.pool, rig.ns, FarCounts("memory")),
        has_checksums=True,
        doubtful=lambda: {"doubtful"},
        clock=lambda: now_s[0],
        pause=pause,
    )
    names = ["doubtful", "theirs", "whole", "absent"]
    brought = fetcher.bring(move_of(names), LONG_S)
    lost = {names[row]: why.partition(":")[0] for row, why in brought.lost.items()}
    assert lost == {"doubtful": "cleared", "absent": "absent"} | ({} if is_published else {"theirs": "busy"})
    assert {names[row] for row in brought.is_held.nonzero()[0]} == set(names) - lost.keys()
    assert brought.reasons() == dict.fromkeys(lost.values(), 1)
    rig.pool.release(brought.tickets[brought.is_held])


# A load tells why its first object was lost

LAYOUT = KVLayoutDescriptor((KVRegion("layer", 0, SIZE, SIZE, 0),), RankTopology())


@pytest.mark.parametrize("turn_bytes", [SIZE, 8 * SIZE], ids=["one-by-one", "together"])
@pytest.mark.parametrize("damaged_in", ["pool", "store"])
def test_a_load_tells_why_an_object_was_lost_though_others_came_after_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, damaged_in: str, turn_bytes: int
) -> None:
    """One is damaged, in the pool or in the store; the one behind it has yet to be fetched, and comes."""
    monkeypatch.setattr("umbp.runtime.pool_worker.TURN_BYTES", turn_bytes)
    options = parse_options({"capacity_bytes": "1MiB", "verify": "always"})
    codec = BlockIdentityCodec(UMBPNamespace("n"))
    plans: list[Any] = [BlockTransferPlan(codec.key(bytes([row]) * 8), row, group_id=0) for row in range(3)]
    far, keeper = rig.far(), ReplacedPools()
    pool, names = keeper.pool, [plan.key for plan in plans]
    worker = PoolWorkerHandle(options, LAYOUT, keeper, far=far)
    worker.register_buffers({"layer": FakeTensor.zeros((8, SIZE))})
    worker.publish(worker.wait(worker.store(plans)))
    assert far.flush(LONG_S)
    pool.remove(names[2:])
    if damaged_in == "pool":
        tickets, _ = pool.acquire(names[1:2])
        (address,) = pool.payload(tickets)[0].tolist()
        ctypes.memset(address, 0xFF, 1)
        pool.release(tickets)
    else:
        pool.remove(names[1:2])
        rig.cluster.cut(names[1])
    job = worker.load(BlockLoadBatch(names, range(3), [0] * 3, "request"))
    worker.wait(job)
    assert job.completed_keys == {names[0], names[2]}
    assert (job.error or "").startswith("damaged: ")
    assert failures(far) == ({"damaged": 1} if damaged_in == "store" else {})
    worker.close()
