"""Each wrapper does its one thing and leaves the rest as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from umbp.data import BlockLoadBatch, BlockStoreBatch, TransferJobState
from umbp.errors import ConfigError
from umbp.runtime.base import IUMBPRuntime, capabilities_of
from umbp.runtime.null import NullRuntime
from umbp.runtime.wrap.faulty import FaultPlan, FaultyRuntime, InjectedError
from umbp.runtime.wrap.metered import Meter, MeteredRuntime
from umbp.runtime.wrap.passing import PassingRuntime, mirror, without
from umbp.runtime.wrap.slow import Pace, SlowRuntime
from umbp.testing.clock import TickClock
from umbp.testing.reference import ReferenceRuntime
from umbp.testing.rig import Rig, hashes

Wrap = Callable[[IUMBPRuntime], PassingRuntime]

WRAPPERS: list[Wrap] = [
    PassingRuntime,
    MeteredRuntime,
    lambda inner: FaultyRuntime(inner, FaultPlan()),
    lambda inner: SlowRuntime(inner, Pace({})),
]


@pytest.mark.parametrize("wrap", WRAPPERS)
@pytest.mark.parametrize("inner", [NullRuntime(), ReferenceRuntime()], ids=["null", "reference"])
def test_a_wrapper_states_what_the_wrapped_runtime_states(wrap: Wrap, inner: IUMBPRuntime) -> None:
    assert capabilities_of(wrap(inner)) == capabilities_of(inner)
    assert capabilities_of(wrap(wrap(inner))) == capabilities_of(inner)


# --- faulty


def stored(rig: Rig, count: int) -> TransferJobState:
    (rank,) = rig.ranks
    job = rank.worker.wait(rank.worker.store(rank.store_plans("batch", hashes(count), range(count))))
    rank.worker.publish(job)
    return job


@pytest.mark.parametrize("kind", ["plans", "batch"])
def test_the_planned_share_of_keys_fails(kind: str) -> None:
    rig = Rig(FaultyRuntime(ReferenceRuntime(), FaultPlan(seed=7, load_keys=0.2)), "ns")
    (rank,) = rig.ranks
    assert stored(rig, 16).status == "completed"
    failed = 0
    for _ in range(50):
        plans = rank.load_plans(kind, hashes(16), range(16))
        failed += len(rank.worker.wait(rank.worker.load(plans)).failed_keys)
    assert 0.15 * 800 < failed < 0.25 * 800


def test_the_planned_share_of_jobs_fails_as_a_whole() -> None:
    rig = Rig(FaultyRuntime(ReferenceRuntime(), FaultPlan(load_jobs=0.5)), "ns")
    (rank,) = rig.ranks
    stored(rig, 4)
    outcomes = set()
    for _ in range(40):
        plans = rank.load_plans("batch", hashes(4), range(4))
        job = rank.worker.wait(rank.worker.load(plans))
        outcomes.add((job.status.value, len(job.failed_keys)))
    assert outcomes == {("completed", 0), ("failed", 4)}


def test_every_store_can_be_refused() -> None:
    rig = Rig(FaultyRuntime(ReferenceRuntime(), FaultPlan(store_jobs=1)), "ns")
    job = stored(rig, 4)
    assert job.failed_keys == job.keys
    assert job.error
    assert list(rig.scheduler.lookup(rig.keys(hashes(4)))) == [False] * 4


def test_a_lie_is_only_ever_a_miss() -> None:
    rig = Rig(FaultyRuntime(ReferenceRuntime(), FaultPlan(lookups=0.5)), "ns")
    scheduler: Any = rig.scheduler
    stored(rig, 8)
    keys = rig.keys(hashes(16))
    answers = [list(scheduler.lookup(keys)) for _ in range(20)]
    assert all(not any(answer[8:]) for answer in answers)
    assert len({sum(answer) for answer in answers}) > 1
    for n in range(20):
        assert 0 <= scheduler.lookup_raw(0, hashes(16)) <= 8
        assert not any(scheduler.present_raw(0, hashes(16))[8:])
        assert 0 <= scheduler.hold(str(n), keys) <= 8
        scheduler.unhold(str(n))


def test_a_publish_that_raises_publishes_nothing() -> None:
    rig = Rig(FaultyRuntime(ReferenceRuntime(), FaultPlan(publishes=1)), "ns")
    with pytest.raises(InjectedError):
        stored(rig, 3)
    assert list(rig.scheduler.lookup(rig.keys(hashes(3)))) == [False] * 3


def test_one_seed_is_one_sequence_of_faults() -> None:
    def run(seed: int) -> list[set[str]]:
        rig = Rig(FaultyRuntime(ReferenceRuntime(), FaultPlan(seed, load_keys=0.3, store_keys=0.3)), "ns")
        return [stored(rig, 12).failed_keys for _ in range(5)]

    assert run(3) == run(3)
    assert run(3) != run(4)


def test_ranks_don_t_fail_in_step() -> None:
    rig = Rig(FaultyRuntime(ReferenceRuntime(), FaultPlan(store_keys=0.5)), "ns", tp_size=2)
    outcomes = []
    for rank in rig.ranks:
        plans = rank.store_plans("batch", hashes(16), range(16))
        outcomes.append(rank.worker.wait(rank.worker.store(plans)).failed_block_ids)
    assert outcomes[0] != outcomes[1]


def test_a_fault_plan_survives_its_text() -> None:
    plan = FaultPlan(5, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    assert FaultPlan.parse(plan.to_json()) == plan
    assert FaultPlan.parse({"load_keys": 0.2}) == FaultPlan(load_keys=0.2)
    assert FaultPlan.parse("{}") == FaultPlan()


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("{", "not JSON"),
        ("[]", "JSON object"),
        ('{"load_kees": 0.1}', "load_keys"),
        ('{"load_keys": 1.5}', "load_keys"),
        ('{"load_keys": "0.1"}', "load_keys"),
        ('{"load_keys": true}', "load_keys"),
        ('{"load_keys": NaN}', "load_keys"),
        ('{"seed": 0.5}', "seed"),
    ],
)
def test_a_fault_plan_that_is_none_is_one_sentence(text: str, cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        FaultPlan.parse(text)


# --- slow


def slow_rig(delays_s: dict[str, float]) -> tuple[Rig, TickClock]:
    clock = TickClock()
    return Rig(SlowRuntime(ReferenceRuntime(), Pace(delays_s, clock, clock.sleep)), "ns"), clock


def test_a_slow_store_reads_its_blocks_at_the_end_of_its_delay() -> None:
    """Someone who reuses a block before the job is final must find wrong bytes in the pool, always."""
    rig, clock = slow_rig({"store": 5.0})
    (rank,) = rig.ranks
    job = rank.worker.store(rank.store_plans("batch", hashes(1), [0]))
    assert rank.worker.poll(job) is None
    clock.advance(4.9)
    assert rank.worker.poll(job) is None
    rank.scrub([0])
    clock.advance(0.2)
    assert rank.worker.poll(job) is job
    rank.worker.publish(job)
    reused = rank.read(0)
    rank.worker.wait(rank.worker.load(rank.load_plans("batch", hashes(1), [1])))
    assert rank.read(1) == reused


def test_a_slow_load_writes_its_blocks_at_the_end_of_its_delay() -> None:
    rig, clock = slow_rig({"load": 5.0})
    (rank,) = rig.ranks
    content = rank.read(0)
    stored(rig, 1)
    rank.scrub([1])
    untouched = rank.read(1)
    job = rank.worker.load(rank.load_plans("batch", hashes(1), [1]))
    assert rank.worker.poll(job) is None
    assert rank.read(1) == untouched
    assert rank.worker.wait(job) is job
    assert clock.slept_s == [5.0]
    assert rank.read(1) == content


def test_waiting_takes_what_is_left_of_the_delay() -> None:
    rig, clock = slow_rig({"store": 5.0})
    (rank,) = rig.ranks
    job = rank.worker.store(rank.store_plans("batch", hashes(1), [0]))
    clock.advance(3.0)
    rank.worker.wait(job)
    rank.worker.wait(job)
    assert clock.slept_s == [2.0]


def test_a_store_that_has_not_ended_can_t_be_published() -> None:
    rig, _ = slow_rig({"store": 5.0})
    (rank,) = rig.ranks
    job = rank.worker.store(rank.store_plans("batch", hashes(1), [0]))
    with pytest.raises(ValueError, match="not over"):
        rank.worker.publish(job)


def test_a_cancelled_job_isn_t_waited_for() -> None:
    rig, clock = slow_rig({"store": 5.0})
    rank: Any = rig.ranks[0]
    job = rank.worker.store(rank.store_plans("batch", hashes(1), [0]))
    rank.worker.cancel(job)
    assert rank.worker.wait(job).status.is_final
    assert clock.slept_s == []


def test_every_way_of_asking_takes_its_time() -> None:
    rig, clock = slow_rig({"lookup": 1.0, "hold": 2.0})
    scheduler: Any = rig.scheduler
    scheduler.lookup([])
    scheduler.lookup_raw(0, [])
    scheduler.present_raw(0, [])
    scheduler.lookup_states([])
    scheduler.hold("r", [])
    scheduler.hold_raw("r", 0, [])
    assert clock.slept_s == [1.0, 1.0, 1.0, 1.0, 2.0, 2.0]


@pytest.mark.parametrize("delays", [{"lod": 1.0}, {"load": -1.0}, {"load": 61.0}, {"load": float("nan")}])
def test_a_delay_has_a_known_verb_and_a_bound(delays: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="delays"):
        Pace(delays)


# --- metered


def test_the_meter_counts_calls_items_bytes_and_seconds_by_verb_and_outcome() -> None:
    clock = TickClock()

    def tick() -> float:
        clock.advance(0.5)
        return clock.now_s

    meter = Meter(tick)
    rig = Rig(MeteredRuntime(ReferenceRuntime(), meter), "ns")
    (rank,) = rig.ranks
    stored(rig, 3)
    rig.scheduler.lookup(rig.keys(hashes(5)))
    job = rank.worker.load(rank.load_plans("batch", hashes(5), range(8, 13)))
    assert ("load", "completed") not in meter.snapshot()
    rank.worker.wait(job)
    rank.worker.wait(job)
    rank.worker.poll(job)
    with pytest.raises(ValueError, match="store"):
        rank.worker.publish(job)
    counts = {name: (tally.calls, tally.items) for name, tally in meter.snapshot().items()}
    assert counts == {
        ("register_buffers", "ok"): (1, 3),
        ("store", "completed"): (1, 3),
        ("publish", "ok"): (1, 3),
        ("lookup", "hit"): (1, 3),
        ("lookup", "miss"): (1, 2),
        ("load", "completed"): (1, 3),
        ("load", "failed"): (1, 2),
        ("publish", "failed"): (1, 3),
    }
    assert meter.snapshot()["load", "completed"].bytes == 3 * 3 * 512
    assert all(tally.seconds > 0 for tally in meter.snapshot().values())
    assert "load completed" in repr(meter)


def test_the_meter_counts_holds_and_clears() -> None:
    rig = Rig(MeteredRuntime(ReferenceRuntime(), meter := Meter()), "ns")
    scheduler: Any = rig.scheduler
    stored(rig, 2)
    scheduler.hold("r", rig.keys(hashes(3)))
    scheduler.hold_raw("r", 0, hashes(3))
    scheduler.lookup_raw(0, hashes(3))
    scheduler.present_raw(0, hashes(3))
    scheduler.lookup_states(rig.keys(hashes(3)))
    scheduler.watch(0, hashes(3))
    scheduler.unhold("r")
    assert scheduler.clear()
    scheduler.take_evicted_keys()
    scheduler.take_lost()
    counts = {name: tally.items for name, tally in meter.snapshot().items()}
    for verb in ("hold", "hold_raw", "lookup_raw", "present_raw", "lookup_states", "watch"):
        assert counts[verb, "hit"] == 2
        assert counts[verb, "miss"] == 1
    assert counts["unhold", "ok"] == counts["clear", "ok"] == 1
    assert counts["take_evicted_keys", "ok"] == counts["take_lost", "ok"] == 2


# --- common ground


def test_plans_without_some_keys_are_of_the_same_kind() -> None:
    load = BlockLoadBatch(["a", "b", "c"], [1, 2, 3], [0, 0, 1], "r")
    store = BlockStoreBatch(
        ["a", "b", "c"],
        [1, 2, 3],
        [0, 0, 1],
        [b"1", b"2", b"3"],
        [None, b"1", b"2"],
        [(1,), (2,), ()],
        [4] * 3,
        "r",
    )
    for batch in (load, store):
        rest = without(batch, {"b", "z"})
        assert type(rest) is type(batch)
        assert list(rest) == [batch[0], batch[2]]
        assert without(list(batch), {"b"}) == [batch[0], batch[2]]
        assert list(without(batch, {"a", "b", "c"})) == []


def test_a_mirrored_job_ends_as_the_wrapped_one_did() -> None:
    batch = BlockLoadBatch(["a", "b", "c"], [1, 2, 3], [0, 0, 0], "r")
    outer = TransferJobState(batch)
    outer.fail({"c"}, "lost before")
    inner = TransferJobState(without(batch, {"c"}), plan_bytes=[10, 20])
    inner.complete(["a"])
    inner.fail(["b"], "lost within")
    mirror(inner, outer)
    assert (outer.completed_keys, outer.failed_keys, outer.status) == ({"a"}, {"b", "c"}, "failed")
    assert outer.error == "lost within"
    assert outer.completed_bytes == 10

    doubled = TransferJobState(BlockLoadBatch(["a", "b", "a"], [1, 2, 3], [0, 0, 0], "r"))
    inner = TransferJobState(doubled.plans, plan_bytes=[10, 20, 0])
    inner.complete()
    mirror(inner, doubled)
    mirror(inner, doubled)
    assert doubled.completed_bytes == 30

    cancelled = TransferJobState(batch)
    inner = TransferJobState(batch)
    inner.complete(["a"])
    inner.cancel()
    mirror(inner, cancelled)
    assert (cancelled.completed_keys, cancelled.status, cancelled.error) == ({"a"}, "cancelled", "cancelled")
