"""What stands behind a pool: no old byte stays in the store, no memory goes that a store may still touch, and
nobody waits longer than he said."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import pytest
from far_rig import LONG_S, SIZE, Rig, move_of
from replaced_pools import ReplacedPools

from umbp.data import (
    BlockIdentityCodec,
    BlockTransferPlan,
    KVLayoutDescriptor,
    KVRegion,
    LossReason,
    RankTopology,
)
from umbp.data import UMBPNamespace as Namespace
from umbp.errors import SegmentError
from umbp.options import parse_options
from umbp.pool import SEAL_BYTES, Pool
from umbp.runtime.base import Wanted
from umbp.runtime.far import offers
from umbp.runtime.far.counts import FarCounts
from umbp.runtime.far.debts import Debts
from umbp.runtime.far.fetch import Brought, Fetcher
from umbp.runtime.far.lookup import FarLookups
from umbp.runtime.far.offers import NO_OFFERS
from umbp.runtime.far.registry import RegisteredPools
from umbp.runtime.far.scheduler import Clearing
from umbp.runtime.far.send import Sender
from umbp.runtime.far.turns import Turns
from umbp.runtime.far.worker import WorkerFar
from umbp.runtime.pool_worker import PoolWorkerHandle
from umbp.store.base import ClusterStore, Outcome, StoreError, StoreTraits
from umbp.store.calls import Late, Verb
from umbp.store.gate import Backoff, GateLimits, StoreGate
from umbp.testing.clock import TickClock
from umbp.testing.stores.memory import TRAITS
from umbp.testing.tensors import FakeTensor
from umbp.transfer import BlockRuns
from umbp.transfer.engine import CopyEngine

T = TypeVar("T")

FIRST_RANK = RankTopology().local_namespace


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


# Nothing old stays in the store


def test_what_was_cleared_and_stored_anew_while_it_was_sent_is_sent_anew(rig: Rig) -> None:
    """A put hangs; pool and store are cleared, as new weights came, and the same prompt is computed and
    stored once more; then the put goes on, with the old bytes."""
    far = rig.far()
    rig.put(["a"], 1)
    rig.cluster.hang("put")
    far.offer(rig.pool, ["a"])
    rig.cluster.wait_hanging(1)
    rig.clear()
    rig.put(["a"], 2)
    rig.cluster.go_on()
    assert rig.removed.wait(LONG_S)
    assert far.flush(LONG_S)
    far.offer(rig.pool, ["a"])
    assert far.flush(LONG_S)
    assert rig.cluster.objects["a"][0] == 2
    assert rig.pool.stats()["pinned"] == 0


def test_a_removal_that_is_not_done_is_tried_again_before_anybody_may_fetch(rig: Rig) -> None:
    rig.laters = 1
    far = rig.far()
    rig.put(["a"], 1)
    rig.cluster.hang("put")
    far.offer(rig.pool, ["a"])
    rig.cluster.wait_hanging(1)
    rig.clear()
    rig.cluster.go_on()
    assert rig.removed.wait(LONG_S)
    assert not rig.cluster.objects
    assert rig.gates[0].openings == 1


class Removals:
    """A store of which somebody else asks something while it removes."""

    traits = TRAITS

    def __init__(self, meanwhile: Callable[[ClusterStore], None]) -> None:
        self.removed: list[str] = []
        self._meanwhile: list[Callable[[ClusterStore], None]] = [meanwhile]

    def remove(self, keys: Sequence[str]) -> list[Outcome]:
        self._done()
        self.removed += keys
        return [Outcome.DONE] * len(keys)

    def remove_prefix(self, prefix: str) -> Outcome:
        self._done()
        self.removed.append(prefix)
        return Outcome.DONE

    def _done(self) -> None:
        if self._meanwhile:
            self._meanwhile.pop()(self)  # type: ignore[arg-type] # what it is asked for is there


def test_a_debt_is_kept_that_came_while_two_paid_the_same() -> None:
    debts = Debts()
    debts.owe(["a", "a"])

    def another_pays(store: ClusterStore) -> None:
        assert debts.repay(store)
        debts.owe(["b"])

    store: Any = Removals(another_pays)
    assert debts.repay(store)
    assert debts.is_owed
    assert debts.repay(store)
    assert store.removed == ["a", "a", "b"]
    assert not debts.is_owed


def test_a_removal_that_began_before_a_clear_does_not_count_for_it() -> None:
    clearing = Clearing(Namespace("n"))
    store: Any = Removals(lambda _: clearing.owe())
    clearing.owe()
    assert not clearing(store)
    assert clearing(store)
    assert len(store.removed) == 2


def test_a_namespace_is_removed_once_nothing_of_it_is_being_sent_any_more(rig: Rig) -> None:
    """Scenario: a put was under way when pool and store were cleared, and came to the store after it."""
    far = rig.far()
    clearing = Clearing(Namespace("n"))
    name = BlockIdentityCodec(Namespace("n")).namespace_prefix + "a"
    rig.put([name], 1)
    rig.cluster.hang("put")
    far.offer(rig.pool, [name])
    rig.cluster.wait_hanging(1)
    rig.pool.clear(rig.ns)
    clearing.owe([(rig.pool, rig.ns)])
    store = rig.connect()
    store.open()
    assert not clearing.wait_let_go(0.0)
    assert not clearing(store)
    rig.cluster.go_on()
    assert clearing.wait_let_go(LONG_S)
    assert clearing(store)
    assert not rig.cluster.objects


def test_a_pool_that_was_left_holds_up_no_removal(rig: Rig) -> None:
    clearing = Clearing(Namespace("n"))
    rig.put(["a"], 1)
    rig.pool.acquire(["a"])
    rig.pool.clear(rig.ns)
    clearing.owe([(rig.pool, rig.ns)])
    assert not clearing.wait_let_go(0.0)
    rig.pool.close()
    assert clearing.wait_let_go(0.0)


# What can't go out now goes out later


def test_objects_wait_for_a_store_that_takes_no_memory_now(rig: Rig) -> None:
    """A pool's memory is told of with its first objects, at the moment of which the store is away."""
    far = rig.far()
    (store,) = rig.cluster.stores
    refused = threading.Event()

    def refuse_once(address: int, size: int) -> None:
        store.register = registers  # type: ignore[method-assign]
        refused.set()
        raise StoreError("not now")

    registers, store.register = store.register, refuse_once  # type: ignore[method-assign]
    rig.put(["a"], 1)
    far.offer(rig.pool, ["a"])
    assert far.flush(LONG_S)
    assert refused.is_set()
    assert list(rig.cluster.objects) == ["a"]


class PausedClock(TickClock):
    """Goes on to the next pause's end when so many threads pause. All of them wait on one condition."""

    def __init__(self, pausing: int) -> None:
        super().__init__()
        self._pausing = pausing
        self._ends_s: list[float] = []

    def wait(self, condition: threading.Condition, until_s: float) -> None:
        self._ends_s.append(until_s)
        if len(self._ends_s) >= self._pausing:
            self.now_s = max(self.now_s, min(self._ends_s))
            self._ends_s = [each for each in self._ends_s if each > self.now_s]
            condition.notify_all()
        if until_s > self.now_s:
            condition.wait()
        if until_s in self._ends_s:
            self._ends_s.remove(until_s)


@pytest.mark.parametrize("others", [0, 20], ids=["alone", "beside-others-that-find-room"])
@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("full_s", [0.0, offers.OFFERED_S - 0.1, 1e9], ids=["room", "restarted", "full"])
def test_what_a_store_has_no_room_for_waits_until_a_restarted_cluster_would_have_some(
    full_s: float, at_once: int, others: int
) -> None:
    """However many puts pause at once, and however short others make the pauses."""
    rig, clock = Rig(replace(TRAITS, calls_at_once=at_once, most_objects=1)), PausedClock(at_once)
    gate, counts = rig.gate(), FarCounts("memory")
    (store,) = rig.cluster.stores
    puts = store.put

    def put(keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> Sequence[Outcome]:
        if "a" in keys and clock() < full_s:
            return [Outcome.LATER] * len(keys)
        return puts(keys, addresses, sizes)

    store.put = put  # type: ignore[method-assign, assignment]
    names = ["a", *(f"b{number}" for number in range(others))]
    rig.put(names, 1)
    registered = RegisteredPools(gate, rig.cluster.traits)
    sender = Sender(
        gate,
        rig.cluster.traits,
        counts,
        Debts(),
        registered.tell,
        timeout_s=LONG_S,
        has_checksums=True,
        clock=clock,
    )
    sender.offer(rig.pool, names)
    assert sender.flush(LONG_S)
    is_sent = full_s < offers.OFFERED_S
    assert set(rig.cluster.objects) == set(names[0 if is_sent else 1 :])
    dropped = counts.take(gate).get(("dropped_send_objects", "memory", LossReason.BUSY), 0)
    assert dropped == (0 if is_sent else 1)
    assert is_sent or clock() >= offers.OFFERED_S
    assert rig.pool.stats()["pinned"] == 0
    sender.close(1.0)
    rig.close()


def test_only_a_store_that_goes_on_saying_later_is_not_offered_an_object_any_more() -> None:
    offered = NO_OFFERS
    for now_s in range(offers.MOST_LATERS):
        assert not offered.are_over(float(now_s))
        offered = offered.later(float(now_s))
    assert offered.are_over(float(offers.MOST_LATERS))
    for away in (offered.failed(), offered.unasked()):
        assert not away.are_over(1000.0)
        assert not away.later(1000.0).are_over(1000.0 + offers.OFFERED_S), "it may have been restarted"


def test_what_a_store_fails_at_again_and_again_is_not_offered_to_it_any_more() -> None:
    offered = NO_OFFERS
    for _ in range(offers.MOST_FAILURES):
        assert not offered.are_over(0.0)
        offered = offered.later(0.0).failed()
    assert offered.are_over(0.0)


# Nothing stays held


def test_what_can_not_be_sent_is_not_held_any_more(rig: Rig) -> None:
    """Something breaks before the store is asked."""

    def tell(pool: Pool) -> None:
        raise ValueError

    gate, counts = rig.gate(), FarCounts("memory")
    sender = Sender(gate, rig.cluster.traits, counts, Debts(), tell, timeout_s=LONG_S, has_checksums=True)
    rig.put(["a", "b"], 1)
    sender.offer(rig.pool, ["a", "b"])
    assert sender.flush(LONG_S)
    sender.close(1.0)
    assert rig.pool.stats()["pinned"] == 0
    assert counts.take(gate)["dropped_send_objects", "memory", LossReason.FAILED] == 2


# Memory stays as long as somebody may touch it


def test_a_pool_that_is_still_being_sent_from_stays() -> None:
    """Sending outlasts what a pool's end waits for, though no call of it is late."""
    rig = Rig(replace(TRAITS, registers=False))
    begun, goes_on = threading.Event(), threading.Event()

    def tell(pool: Pool) -> None:
        begun.set()
        assert goes_on.wait(LONG_S)

    gate, counts = rig.gate(), FarCounts("memory")
    sender = Sender(gate, rig.cluster.traits, counts, Debts(), tell, timeout_s=0.05, has_checksums=True)
    rig.put(["a"], 1)
    sender.offer(rig.pool, ["a"])
    assert begun.wait(LONG_S)
    assert not sender.forget(rig.pool)
    goes_on.set()
    assert sender.flush(LONG_S)
    assert sender.forget(rig.pool)
    sender.close(1.0)
    rig.close()


def test_a_pool_s_size_is_held_once_and_given_back_with_it() -> None:
    rig = Rig(replace(TRAITS, pins=True))
    registered = RegisteredPools(rig.gate(), rig.cluster.traits)
    rig.cluster.stores[0].refuses_memory = True
    for _ in range(3):
        with pytest.raises(StoreError):
            registered.tell(rig.pool)
    rig.cluster.stores[0].refuses_memory = False
    registered.tell(rig.pool)
    with pytest.raises(SegmentError):
        rig.pool.resize(1 << 19)
    assert registered.forget(rig.pool)
    rig.pool.resize(1 << 19)
    rig.close()


# Nobody waits for long


class PatientGate(StoreGate):
    """Its breaker's first pause outlasts any test; notes how long it was allowed to wait for probes."""

    def __init__(
        self,
        make_store: Callable[[], ClusterStore],
        before_return: Callable[[ClusterStore], bool],
        probe_timeout_s: float,
    ) -> None:
        limits = GateLimits(probe_timeout_s=probe_timeout_s)
        backoff = Backoff(first_s=10 * LONG_S, most_s=10 * LONG_S)
        super().__init__("memory", make_store, limits=limits, backoff=backoff, before_return=before_return)
        self.waits_s: list[float] = []

    def wait_probed(self, timeout_s: float) -> bool:
        self.waits_s.append(timeout_s)
        return super().wait_probed(timeout_s)


class PatientRig(Rig):
    """With an object in the store, which the pool has no more, and parts of a load that ask for it."""

    def __init__(self, traits: StoreTraits = TRAITS, probe_timeout_s: float = LONG_S) -> None:
        super().__init__(traits)
        self._probe_timeout_s = probe_timeout_s
        self.worker = WorkerFar(self._patient, traits, timeout_s=LONG_S, has_checksums=True)
        self.put(["a"], 1)
        self.worker.offer(self.pool, ["a"])
        assert self.worker.flush(LONG_S)
        self.pool.remove(["a"])
        self.deadline_s = self.worker.deadline_s()

    def _patient(self, before_return: Callable[[ClusterStore], bool]) -> StoreGate:
        self.patient = PatientGate(self.connect, before_return, self._probe_timeout_s)
        self.gates.append(self.patient)
        self.patient.open(LONG_S)
        return self.patient

    def fetch(self) -> Brought:
        return self.worker.fetch(self.pool, self.ns, move_of(["a"]), self.deadline_s)


def test_a_load_that_was_promised_is_worth_a_probe_and_not_refused_for_an_outage_that_is_over() -> None:
    rig = PatientRig()
    rig.patient.report_broken()
    brought = rig.fetch()
    assert brought.is_held.all(), brought.error
    rig.pool.release(brought.tickets)
    assert rig.patient.counts().probes == 2
    assert rig.worker.close()
    rig.close()


def test_a_load_from_a_dead_store_costs_one_probe_however_many_parts_it_has() -> None:
    rig = PatientRig()
    rig.patient.report_broken()
    rig.cluster.is_down = True
    for _ in range(10):
        assert (rig.fetch().error or "").startswith("gone: ")
    assert rig.patient.counts().probes == 2
    rig.worker.close()
    rig.close()


def test_a_load_from_a_silent_store_waits_for_one_probe_s_time_however_many_parts_it_has() -> None:
    rig = PatientRig(replace(TRAITS, recovers=True), probe_timeout_s=0.05)
    rig.patient.report_broken()
    rig.cluster.hang("probe")
    for _ in range(10):
        assert (rig.fetch().error or "").startswith("gone: ")
    first_s, *others_s = rig.patient.waits_s
    assert first_s <= rig.patient.limits.probe_timeout_s
    assert max(others_s) <= 0.0
    assert rig.pool.stats()["pinned"] == 0
    rig.cluster.go_on()
    rig.worker.close()
    rig.close()


def test_an_end_does_not_wait_for_a_load_that_waits_for_a_probe() -> None:
    rig = PatientRig(replace(TRAITS, recovers=True))
    rig.patient.report_broken()
    rig.cluster.hang("probe")
    with ThreadPoolExecutor(1) as threads:
        fetch = threads.submit(rig.fetch)
        rig.cluster.wait_hanging(1)
        rig.patient.close(0.0)
        assert (fetch.result(LONG_S / 3).error or "").startswith("gone: ")
    rig.cluster.go_on()
    assert rig.worker.close()
    rig.close()


def test_a_fetch_waits_for_the_store_to_take_memory_no_longer_than_for_anything_else(rig: Rig) -> None:
    far = rig.far(timeout_s=0.05)
    rig.cluster.hang("register")
    move = move_of(["a"])
    for _ in range(2):
        brought = far.fetch(rig.pool, rig.ns, move, far.deadline_s())
        assert not brought.is_held.any()
        assert (brought.error or "").startswith("busy:")
    rig.cluster.wait_hanging(1)
    assert rig.gates[0].counts().replaced == 0
    rig.cluster.go_on()


class CountedHash(bytes):
    """Counts how often such names were looked for."""

    looks = 0

    def __hash__(self) -> int:
        CountedHash.looks += 1
        return super().__hash__()


def lookups_of(
    rig: Rig, clock: Callable[[], float], *, timeout_s: float = LONG_S, is_async: bool = False
) -> FarLookups:
    return FarLookups(
        rig.gate(),
        lambda group_id, rank: "",
        FarCounts("memory"),
        timeout_s=timeout_s,
        lease_s=20.0,
        is_async=is_async,
        clock=clock,
    )


def test_a_request_whose_own_hit_grows_waits_for_one_answer(rig: Rig) -> None:
    """Another request computes the same prompt meanwhile: in each step the engine has more of it itself."""
    lookups = lookups_of(rig, TickClock(), is_async=True)
    names = [bytes([place]) for place in range(100)]
    rig.cluster.claimed = {name.hex() for name in names}
    rig.cluster.hang("exists")
    pools = {FIRST_RANK: rig.pool}
    for start in range(5):
        assert not lookups.prepare("r", [Wanted(0, names[start:], is_chain=True)], pools)
    rig.cluster.wait_hanging(1)
    assert rig.cluster.stores[0].calls.count("exists") == 1


def test_whoever_has_patience_gets_an_answer_that_comes_soon_at_once(rig: Rig) -> None:
    lookups = lookups_of(rig, time.monotonic, is_async=True)
    pools = {FIRST_RANK: rig.pool}
    for number in range(20):
        assert lookups.prepare(f"{number}", [Wanted(0, [bytes([number])], is_chain=True)], pools, LONG_S)
    rig.cluster.hang("exists")
    begun_s = time.monotonic()
    assert not lookups.prepare("r", [Wanted(0, [b"another"], is_chain=True)], pools, 0.05)
    assert time.monotonic() - begun_s >= 0.05
    rig.cluster.go_on()


def test_a_request_that_asks_something_else_again_and_again_waits_no_longer(rig: Rig) -> None:
    clock = TickClock()
    lookups = lookups_of(rig, clock, timeout_s=10.0, is_async=True)
    rig.cluster.hang("exists")
    pools = {FIRST_RANK: rig.pool}
    for step in range(10):
        assert not lookups.prepare("r", [Wanted(0, [bytes([step])], is_chain=True)], pools)
        clock.advance(1.0)
    assert lookups.prepare("r", [Wanted(0, [b"more"], is_chain=True)], pools)


def test_a_question_costs_what_it_asks_however_much_is_known(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store has told of more than is kept for long: no step pays for all of it; once they have expired, the
    answers go."""
    monkeypatch.setattr("umbp.runtime.far.lookup.MOST_KNOWN", 100)
    clock = TickClock()
    names = [CountedHash(bytes([place // 256, place % 256])) for place in range(1000)]
    rank, pools = FIRST_RANK, {FIRST_RANK: rig.pool}
    rig.cluster.claimed = {name.hex() for name in names} | {b"new".hex()}
    lookups = lookups_of(rig, clock)
    assert lookups.prepare("long", [Wanted(0, names, is_chain=True)], pools)
    assert lookups.knows(rank, 0, names).all()
    CountedHash.looks = 0
    assert lookups.prepare("short", [Wanted(0, [b"new"], is_chain=True)], pools)
    assert CountedHash.looks < 10
    clock.advance(11.0)
    assert lookups.prepare("later", [Wanted(0, [b"new"], is_chain=True)], pools)
    assert lookups.known == 1


LAYOUT = KVLayoutDescriptor((KVRegion("layer", 0, SIZE, SIZE, 0),), RankTopology())
OPTIONS = parse_options({"capacity_bytes": "1MiB"})


def test_memory_that_is_registered_lives_as_long_as_something_may_copy_to_it(rig: Rig) -> None:
    worker = PoolWorkerHandle(OPTIONS, LAYOUT, ReplacedPools(), far=rig.far())
    tensor = FakeTensor.zeros((8, SIZE))
    memory = weakref.ref(tensor.array)
    worker.register_buffers({"layer": tensor})
    del tensor
    assert memory() is not None
    worker.close()
    assert memory() is None


class FencedEngine(CopyEngine):
    """Notes who takes fences."""

    fenced_by: list[int]

    def fence(self) -> None:
        self.fenced_by.append(threading.get_ident())


def plan_of(number: int) -> BlockTransferPlan:
    return BlockTransferPlan(BlockIdentityCodec(Namespace("n")).key(bytes([number]) * 8), number, group_id=0)


def test_a_load_is_fenced_where_it_is_asked_for(rig: Rig) -> None:
    """On a device: what the model had been given by then may still read the blocks."""
    engine = FencedEngine(1)
    engine.fenced_by = []
    worker = PoolWorkerHandle(
        OPTIONS, LAYOUT, ReplacedPools(), make_engine=lambda caches, threads: engine, far=rig.far()
    )
    worker.register_buffers({"layer": FakeTensor.zeros((8, SIZE))})
    worker.wait(worker.load([plan_of(1)]))
    worker.wait(worker.store([plan_of(2)]))
    assert engine.fenced_by == [threading.get_ident()] * 2
    worker.close()


class DamagingEngine(CopyEngine):
    """What it has stored is damaged a moment later."""

    sums_in_passing = True

    def store(self, runs: BlockRuns, block_ids: Any, pool: Pool, tickets: Any, **how: Any) -> Any:
        statuses = super().store(runs, block_ids, pool, tickets, **how)
        for address in pool.payload(tickets)[0].tolist():
            ctypes.memset(address, 7, 1)
        return statuses


class BlindDamagingEngine(DamagingEngine):
    """As those of devices, whose bytes no processor sees."""

    sums_in_passing = False


@pytest.mark.parametrize(("engine", "is_sent"), [(DamagingEngine, False), (BlindDamagingEngine, True)])
def test_a_checksum_that_comes_with_the_copy_tells_of_damage_before_an_object_went_out(
    rig: Rig, engine: type[CopyEngine], is_sent: bool
) -> None:
    far, keeper = rig.far(), ReplacedPools()
    worker = PoolWorkerHandle(
        OPTIONS, LAYOUT, keeper, make_engine=lambda caches, threads: engine(threads), far=far
    )
    worker.register_buffers({"layer": FakeTensor.zeros((8, SIZE))})
    worker.publish(worker.wait(worker.store([plan_of(1)])))
    assert far.flush(LONG_S)
    assert len(rig.cluster.objects) == 1
    keeper.pool.clear(keeper.pool.namespace("n"))
    job = worker.wait(worker.load([plan_of(1)]))
    assert bool(job.completed_keys) == is_sent
    assert is_sent or (job.error or "").startswith(LossReason.DAMAGED)
    worker.close()


def worker_with_far_objects(rig: Rig) -> tuple[PoolWorkerHandle, list[BlockTransferPlan]]:
    """A worker, and what it can load from the store alone."""
    far, keeper = rig.far(), ReplacedPools()
    worker = PoolWorkerHandle(OPTIONS, LAYOUT, keeper, far=far)
    worker.register_buffers({"layer": FakeTensor.zeros((8, SIZE))})
    plans = [plan_of(number) for number in range(4)]
    worker.publish(worker.wait(worker.store(plans)))
    assert far.flush(LONG_S)
    keeper.pool.clear(keeper.pool.namespace("n"))
    return worker, plans


@pytest.mark.parametrize(("refused", "loaded"), [("umbp-fetch_1", 4), ("umbp-fetch_", 0)])
def test_a_load_does_with_the_threads_that_the_system_has(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, refused: str, loaded: int
) -> None:
    """A pool of threads keeps what it couldn't start one for, and does it when the load is over."""
    monkeypatch.setattr("umbp.runtime.pool_worker.TURN_BYTES", SIZE)
    worker, plans = worker_with_far_objects(rig)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith(refused):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as system:
        system.setattr(threading.Thread, "start", refuse)
        job = worker.wait(worker.load(plans))
        assert len(job.completed_keys) == loaded
        assert loaded or "can't start new thread" in str(job.error)
    again = worker.wait(worker.load(plans))
    assert len(again.completed_keys) == 4
    assert len(job.completed_keys) == loaded
    worker.close()


class LastThread(Executor):
    """The system's last thread takes the first piece of work, comes as far with it as `goes_on` says, and is
    gone; pieces are refused, the first one too where `refuses_all`, which is taken nonetheless.
    """

    def __init__(self, goes_on: Callable[[threading.Thread], None], *, refuses_all: bool) -> None:
        self._goes_on = goes_on
        self._refuses_all = refuses_all
        self._threads: list[threading.Thread] = []
        self.has_refused = threading.Event()
        """All but the first piece."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        is_first = not self._threads
        if is_first:
            self._threads.append(threading.Thread(target=fn, args=args, kwargs=kwargs))
            self._threads[0].start()
            self._goes_on(self._threads[0])
        if not is_first:
            self.has_refused.set()
        if self._refuses_all or not is_first:
            raise RuntimeError("can't start new thread")
        return Future()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for thread in self._threads:
            thread.join(LONG_S)


@pytest.mark.parametrize("is_under_way", [False, True])
def test_a_load_ends_with_its_last_thread_whenever_others_are_refused(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, is_under_way: bool
) -> None:
    """The refusal comes when all has been fetched already, and waits for the thread it is told on to copy; or
    a piece of work is refused though a thread has taken it, and copies into blocks when it likes."""
    monkeypatch.setattr("umbp.runtime.pool_worker.TURN_BYTES", SIZE)
    threads = (
        LastThread(lambda _: rig.cluster.wait_hanging(1), refuses_all=True)
        if is_under_way
        else LastThread(lambda thread: thread.join(LONG_S), refuses_all=False)
    )
    monkeypatch.setattr("umbp.runtime.far.loads.ThreadPoolExecutor", lambda *_: threads)
    worker, plans = worker_with_far_objects(rig)
    if is_under_way:
        rig.cluster.hang("get")
    job = worker.load(plans)
    if is_under_way:
        assert threads.has_refused.wait(LONG_S)
        assert worker.poll(job) is None
        rig.cluster.go_on()
    waiting = threading.Thread(target=worker.wait, args=(job,), daemon=True)
    waiting.start()
    waiting.join(LONG_S / 3)
    assert len(job.completed_keys) == 4
    worker.close()


def test_no_store_waits_for_a_pool_to_be_left(rig: Rig) -> None:
    """A pool is made anew while an object of the old one is being put into a store that hangs."""
    keeper = ReplacedPools()
    worker = PoolWorkerHandle(OPTIONS, LAYOUT, keeper, far=rig.far())
    worker.register_buffers({"layer": FakeTensor.zeros((8, SIZE))})
    rig.cluster.hang("put")
    worker.publish(worker.wait(worker.store([plan_of(1)])))
    rig.cluster.wait_hanging(1)
    keeper.replace()
    job = worker.store([plan_of(2)])
    waiting = threading.Thread(target=worker.wait, args=(job,), daemon=True)
    waiting.start()
    waiting.join(LONG_S / 3)
    assert job.completed_keys == {plan_of(2).key}
    rig.cluster.go_on()
    worker.close()


# No more at once than is of use


def test_turns_come_in_the_order_of_the_line_and_so_many_at_once() -> None:
    turns = Turns(2)
    first, second, third = (turns.line_up() for _ in range(3))
    assert first.wait(0)
    assert second.wait(0)
    assert not third.wait(0)
    second.end()
    second.end()
    assert third.wait(0)
    assert not second.wait(0), "it has left the line"
    first.end()
    third.end()
    turns.audit()


def test_what_is_sent_goes_out_in_its_order_and_holds_two_batches_of_the_pool() -> None:
    rig = Rig(replace(TRAITS, most_objects=16, most_bytes=2 * (SIZE + SEAL_BYTES)))
    names = [f"n{number:02d}" for number in range(20)]
    rig.put(names, 7)
    far = rig.far()
    rig.cluster.hang("put")
    far.offer(rig.pool, names)
    rig.cluster.wait_hanging(1)
    until_s = time.monotonic() + LONG_S
    # A parcel is held until it is known how much of it goes into a batch.
    while rig.pool.stats()["pinned"] > 4:
        assert time.monotonic() < until_s, "one batch is put, and one is sealed"
    (store,) = rig.cluster.stores
    assert store.calls.count("put") == 1
    rig.cluster.go_on()
    assert far.flush(LONG_S)
    assert list(rig.cluster.objects) == names
    assert rig.pool.stats()["pinned"] == 0
    assert far.close()
    rig.close()


class SlowlyHeardGate(StoreGate):
    """Its callers are slow to hear what the store has done."""

    def __init__(self, make_store: Callable[[], ClusterStore]) -> None:
        super().__init__("memory", make_store)
        self.may_hear = threading.Event()

    def call(self, verb: Verb[T], timeout_s: float, late: Late[T] | None = None) -> T:
        result = super().call(verb, timeout_s, late)
        assert self.may_hear.wait(LONG_S)
        return result


def test_the_next_put_begins_when_the_store_has_the_one_before_though_its_slots_are_still_held() -> None:
    rig = Rig(replace(TRAITS, most_objects=1, registers=False))
    gate = SlowlyHeardGate(rig.connect)
    rig.gates.append(gate)
    gate.open(LONG_S)
    (store,) = rig.cluster.stores
    puts, second = store.put, threading.Event()

    def put(keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]) -> Sequence[Outcome]:
        if keys == ["b"]:
            second.set()
        return puts(keys, addresses, sizes)

    store.put = put  # type: ignore[method-assign, assignment]
    how: dict[str, Any] = {"timeout_s": LONG_S, "has_checksums": True}
    sender = Sender(gate, rig.cluster.traits, FarCounts("memory"), Debts(), lambda pool: None, **how)
    rig.put(["a", "b"], 1)
    sender.offer(rig.pool, ["a", "b"])
    came_early = second.wait(LONG_S)
    held = rig.pool.stats()["pinned"]
    gate.may_hear.set()
    assert came_early
    assert held == 2
    assert sender.flush(LONG_S)
    assert list(rig.cluster.objects) == ["a", "b"]
    assert rig.pool.stats()["pinned"] == 0
    sender.close(1.0)
    sender._turns.audit()
    rig.close()


def test_gets_of_one_process_come_one_by_one_where_more_are_of_no_use(rig: Rig) -> None:
    far = rig.far()
    names = [f"n{number}" for number in range(4)]
    rig.put(names, 7)
    far.offer(rig.pool, names)
    assert far.flush(LONG_S)
    rig.pool.remove(names)
    rig.cluster.hang("get")
    with ThreadPoolExecutor(4) as threads:
        deadline_s = far.deadline_s()
        fetches = [threads.submit(far.fetch, rig.pool, rig.ns, move_of([name]), deadline_s) for name in names]
        rig.cluster.wait_hanging(1)
        (store,) = rig.cluster.stores
        assert store.calls.count("get") == 1
        rig.cluster.go_on()
        for fetch in fetches:
            brought = fetch.result(LONG_S)
            assert brought.is_held.all(), brought.error
            rig.pool.release(brought.tickets)
    assert store.calls.count("get") == 4
    assert far.close()


def test_a_start_without_threads_to_send_with_is_one_sentence(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "umbp-send":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(StoreError, match="gives this process no thread for 'umbp-send'"):
        rig.far()


@pytest.mark.parametrize("is_given_back", [True, False])
def test_a_fetch_waits_a_moment_for_slots_that_others_need(rig: Rig, is_given_back: bool) -> None:
    far = rig.far()
    rig.put(["n"], 7)
    far.offer(rig.pool, ["n"])
    assert far.flush(LONG_S)
    rig.pool.remove(["n"])
    others, _ = rig.pool.reserve(rig.ns, [f"o{number}" for number in range(300)], SIZE)
    now_s = [0.0]

    def pause(seconds: float) -> None:
        now_s[0] += seconds
        if is_given_back:
            rig.pool.abandon(others[others != 0])

    gate, counts = rig.gates[0], FarCounts("memory")
    fetcher = Fetcher(
        *(gate, TRAITS, Turns(1), rig.pool, rig.ns, counts),
        has_checksums=True,
        clock=lambda: now_s[0],
        pause=pause,
    )
    brought = fetcher.bring(move_of(["n"]), LONG_S)
    assert brought.is_held.all() == is_given_back
    assert now_s[0] < (0.1 if is_given_back else 1.0)
    assert is_given_back or str(brought.error).startswith("full: ")
    rig.pool.release(brought.tickets[brought.is_held])
    assert far.close()
