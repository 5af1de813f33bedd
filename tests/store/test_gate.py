"""The gate to a store: bounded calls, memory given back once, a breaker, fresh connections, a bounded end."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

from umbp.errors import ConfigError
from umbp.store.base import ClusterStore, Outcome, StoreError
from umbp.store.gate import Backoff, GateLimits, StoreGate, StoreUnavailable, Why
from umbp.testing.clock import TickClock
from umbp.testing.stores.memory import TRAITS, MemoryCluster

WAIT_S = 60.0
EVEN = Backoff(first_s=0.25, most_s=5.0, steady_s=30.0, jitter=0.0)
ONE_KEY = ["k"]


def asks(store: ClusterStore) -> list[Outcome]:
    return list(store.exists(ONE_KEY))


class Site:
    """A gate over a memory cluster on a clock that stands still, and what it told."""

    def __init__(self) -> None:
        self.cluster = MemoryCluster()
        self.clock = TickClock()
        self.returns = threading.Semaphore(0)
        self.lates: list[object] = []
        self._came = threading.Condition()
        self.gates: list[StoreGate] = []

    def gate(
        self,
        limits: GateLimits | None = None,
        backoff: Backoff = EVEN,
        before_return: Callable[[ClusterStore], bool] | None = None,
        make_store: Callable[[], ClusterStore] | None = None,
    ) -> StoreGate:
        gate = StoreGate(
            "memory",
            make_store or self.cluster.connect,
            limits=limits,
            backoff=backoff,
            before_return=before_return,
            clock=self.clock,
            seed=1,
        )
        gate.on_return(self.returns.release)
        self.gates.append(gate)
        return gate

    def opened(self, limits: GateLimits | None = None, backoff: Backoff = EVEN) -> StoreGate:
        gate = self.gate(limits, backoff)
        gate.open(1.0)
        self.wait_return()
        return gate

    def wait_return(self) -> None:
        assert self.returns.acquire(timeout=WAIT_S)

    def late(self, value: object) -> None:
        with self._came:
            self.lates.append(value)
            self._came.notify_all()

    def wait_lates(self, count: int) -> None:
        with self._came:
            assert self._came.wait_for(lambda: len(self.lates) >= count, WAIT_S)
            assert len(self.lates) == count

    def moved_until(self, is_so: Callable[[], bool], step_s: float = 0.25) -> None:
        """Move the clock, giving threads their turn after each step, until something is so."""
        turn = threading.Event()
        for _ in range(20_000):
            if is_so():
                return
            self.clock.advance(step_s)
            turn.wait(0.001)
        raise AssertionError(f"it never came: {self.gates}")

    def end(self) -> None:
        self.cluster.go_on()
        for gate in self.gates:
            gate.audit()
            assert gate.close(WAIT_S)
            gate.audit()
            assert gate.counts().stuck_threads == gate.counts().held_stores == 0
        assert self.cluster.misuses == []


@pytest.fixture
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.end()


def silent_call(site: Site, gate: StoreGate) -> None:
    """One call that hangs in the store beyond its time."""
    already = gate.counts().stuck_threads
    site.cluster.hang("exists")
    call = gate.start(asks, 1.0, site.late)
    site.cluster.wait_hanging(already + 1)
    site.clock.advance(1.0)
    with pytest.raises(StoreUnavailable) as raised:
        call.result()
    assert raised.value.why is Why.SILENT


# Calls


def test_a_call_brings_what_the_verb_returned(site: Site) -> None:
    gate = site.opened()
    source, target = ctypes.create_string_buffer(b"some bytes"), ctypes.create_string_buffer(11)
    for buffer in (source, target):
        gate.register(ctypes.addressof(buffer), 11, 1.0)
    put = gate.call(lambda store: store.put(ONE_KEY, [ctypes.addressof(source)], [11]), 1.0)
    got = gate.call(lambda store: store.get(ONE_KEY, [ctypes.addressof(target)], [11]), 1.0)
    assert put == got == [Outcome.DONE]
    assert target.raw == source.raw


def test_a_late_result_goes_to_late_once_and_only_when_the_store_is_done(site: Site) -> None:
    gate = site.opened()
    silent_call(site, gate)
    assert site.lates == []
    assert gate.counts().stuck_threads == 1
    site.cluster.go_on()
    site.wait_lates(1)
    assert site.lates == [[Outcome.MISS]]
    assert gate.counts().timeouts == 1


def test_a_result_in_time_never_goes_to_late(site: Site) -> None:
    gate = site.opened()
    assert gate.call(asks, 1.0, site.late) == [Outcome.MISS]
    assert gate.close(WAIT_S)
    assert site.lates == []


def test_a_verb_that_raises_is_a_broken_store_and_gives_back(site: Site) -> None:
    gate = site.opened()

    def raises(store: ClusterStore) -> None:
        raise OSError("torn")

    with pytest.raises(StoreUnavailable) as raised:
        gate.call(raises, 1.0, site.late)
    assert raised.value.why is Why.BROKEN
    assert isinstance(raised.value.__cause__, OSError)
    site.wait_lates(1)
    assert site.lates == [None]
    assert not gate.is_well


def test_a_call_waits_for_a_thread_within_its_own_time_and_says_nothing_against_the_store(site: Site) -> None:
    gate = site.opened(GateLimits(most_threads=1))
    site.cluster.hang("exists")
    first = gate.start(asks, 10.0)
    site.cluster.wait_hanging(1)
    second = gate.start(asks, 1.0, site.late)
    was_done = second.is_done
    site.clock.advance(1.0)
    assert (was_done, second.is_done) == (False, True)
    with pytest.raises(StoreUnavailable) as raised:
        second.result()
    assert raised.value.why is Why.BUSY
    site.wait_lates(1)
    assert site.lates == [None]
    assert gate.is_well
    site.cluster.go_on()
    assert first.result() == [Outcome.MISS]


def test_calls_one_after_another_have_the_same_thread(site: Site) -> None:
    """Mooncake was a tenth slower where two took turns."""
    gate = site.opened()
    site.cluster.hang("exists")
    calls = [gate.start(asks, 10.0) for _ in range(3)]
    site.cluster.wait_hanging(3)
    site.cluster.go_on()
    assert [call.result() for call in calls] == [[Outcome.MISS]] * 3
    connection = gate._keeper.current
    assert connection is not None
    idents = set()
    for _ in range(20):
        while len(connection._idle) < 3:
            threading.Event().wait(0.001)
        idents.add(gate.call(lambda store: threading.get_ident(), 10.0))
    assert len(idents) == 1


def test_whoever_waits_for_a_moment_only_leaves_the_call_its_time(site: Site) -> None:
    gate = site.opened()
    site.cluster.hang("exists")
    call = gate.start(asks, 10.0)
    site.cluster.wait_hanging(1)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(call.wait, 1.0)
        site.moved_until(waiting.done)
        waiting.result()
    assert not call.is_done
    assert gate.is_well
    site.cluster.go_on()
    call.wait(1.0)
    assert call.result() == [Outcome.MISS]


def test_a_queue_that_is_full_refuses(site: Site) -> None:
    gate = site.opened(GateLimits(most_threads=1, most_waiting=1))
    site.cluster.hang("exists")
    calls = [gate.start(asks, 10.0)]
    site.cluster.wait_hanging(1)
    calls.append(gate.start(asks, 10.0))
    with pytest.raises(StoreUnavailable) as raised:
        gate.call(asks, 10.0, site.late)
    assert raised.value.why is Why.BUSY
    assert site.lates == [None]
    site.cluster.go_on()
    assert [call.result() for call in calls] == [[Outcome.MISS]] * 2


def test_a_silent_call_is_found_out_though_nobody_asks_for_it(site: Site) -> None:
    gate = site.opened()
    site.cluster.hang()
    gate.start(asks, 1.0)
    site.cluster.wait_hanging(1)
    site.moved_until(lambda: not gate.is_well)
    assert gate.counts().timeouts == 1


def test_a_caller_with_hardly_any_time_left_says_nothing_against_the_store(site: Site) -> None:
    gate = site.opened()
    site.cluster.hang("exists")
    call = gate.start(asks, 0.001)
    site.cluster.wait_hanging(1)
    site.clock.advance(0.001)
    with pytest.raises(StoreUnavailable) as raised:
        call.result()
    assert raised.value.why is Why.SILENT
    assert gate.is_well


def test_a_call_given_up_before_its_end_goes_to_late(site: Site) -> None:
    gate = site.opened()
    site.cluster.hang("exists")
    call = gate.start(asks, 1.0, site.late)
    site.cluster.wait_hanging(1)
    call.give_up()
    call.give_up()
    assert site.lates == []
    site.cluster.go_on()
    site.wait_lates(1)
    assert gate.is_well
    assert gate.counts().given_up == 1


def test_a_call_given_up_after_its_end_goes_to_late_at_once(site: Site) -> None:
    gate = site.opened()
    call = gate.start(asks, 1.0, site.late)
    assert call.result() == [Outcome.MISS]
    call.give_up()
    assert site.lates == [[Outcome.MISS]]


# The breaker


@pytest.mark.parametrize(
    ("result", "is_well"),
    [
        ([Outcome.BROKEN, Outcome.BROKEN], False),
        (Outcome.BROKEN, False),
        ([Outcome.BROKEN, Outcome.MISS], True),
        ([Outcome.LATER], True),
        ([], True),
        (True, True),
    ],
)
def test_outcomes_tell_whether_the_store_is_broken(site: Site, result: object, is_well: bool) -> None:
    gate = site.opened()
    assert gate.call(lambda store: result, 1.0) == result
    assert gate.is_well is is_well


def test_an_open_breaker_refuses_without_touching_the_store(site: Site) -> None:
    gate = site.opened()
    gate.report_broken()
    asked = list(site.cluster.stores[0].calls)
    call = gate.start(asks, 1.0, site.late)
    assert call.is_done
    assert site.lates == [None]
    with pytest.raises(StoreUnavailable) as raised:
        call.result()
    assert raised.value.why is Why.OPEN_BREAKER
    assert site.cluster.stores[0].calls == asked


def test_calls_that_wait_for_a_thread_are_sent_away_when_the_breaker_opens(site: Site) -> None:
    gate = site.opened(GateLimits(most_threads=1))
    site.cluster.hang("exists")
    running = gate.start(asks, 10.0)
    site.cluster.wait_hanging(1)
    waiting = gate.start(asks, 10.0, site.late)
    gate.report_broken()
    assert waiting.is_done
    site.wait_lates(1)
    site.cluster.go_on()
    assert running.result() == [Outcome.MISS]


def test_a_probe_that_goes_well_lets_calls_through_again(site: Site) -> None:
    gate = site.opened()
    gate.report_broken()
    site.clock.advance(0.24)
    assert not gate.is_well
    site.clock.advance(0.01)
    site.wait_return()
    assert gate.call(asks, 1.0) == [Outcome.MISS]
    assert gate.counts().seconds_open == pytest.approx(0.25)
    assert len(site.cluster.stores) == 1


def test_what_was_begun_before_the_breaker_opened_says_nothing_about_later(site: Site) -> None:
    gate = site.opened()
    site.cluster.hang("exists")
    old = gate.start(asks, 10.0)
    site.cluster.wait_hanging(1)
    gate.report_broken()
    site.clock.advance(0.25)
    site.wait_return()
    site.clock.advance(10.0)
    with pytest.raises(StoreUnavailable):
        old.result()
    assert gate.is_well


def waiters(gate: StoreGate, count: int, timeout_s: float) -> list[Future[bool]]:
    """So many threads that know better than the breaker."""
    answers: list[Future[bool]] = [Future() for _ in range(count)]
    for answer in answers:
        threading.Thread(target=lambda each=answer: each.set_result(gate.wait_probed(timeout_s))).start()
    return answers


def test_whoever_knows_that_the_store_is_well_again_waits_for_a_probe_and_no_pause(site: Site) -> None:
    gate = site.opened()
    assert gate.wait_probed(0.0)
    gate.report_broken()
    assert gate.wait_probed(1.0)
    assert gate.call(asks, 1.0) == [Outcome.MISS]
    assert site.clock() == 0.0


@pytest.mark.parametrize("is_down", [False, True])
def test_many_that_know_it_at_once_wait_for_one_probe(site: Site, is_down: bool) -> None:
    gate = site.opened()
    before = gate.counts().probes
    site.cluster.hang("probe")
    gate.report_broken()
    answers = waiters(gate, 8, 1.0)
    site.cluster.wait_hanging(1)
    site.cluster.is_down = is_down
    site.cluster.go_on()
    assert [answer.result(WAIT_S) for answer in answers] == [not is_down] * 8
    assert gate.counts().probes == before + 1


def test_a_dead_store_is_asked_twice_as_often_at_most_however_many_say_that_it_is_well(site: Site) -> None:
    gate = site.opened()
    before = gate.counts().probes
    site.cluster.is_down = True
    gate.report_broken()
    for more, pause_s in ((1, 0.5), (3, 2.0), (5, 5.0)):
        assert not any(gate.wait_probed(1.0) for _ in range(10))
        assert gate.counts().probes == before + more
        site.clock.advance(pause_s)
        site.moved_until(lambda: gate.counts().probes == before + more + 1, 0.0)  # noqa: B023
    site.cluster.is_down = False
    assert gate.wait_probed(1.0)


def test_a_probe_that_began_before_the_store_was_well_again_is_followed_by_one_at_once(site: Site) -> None:
    gate = site.opened()
    (store,) = site.cluster.stores
    probe, under_way, fails = store.probe, threading.Event(), threading.Event()

    def fail_late() -> bool:
        store.probe = probe  # type: ignore[method-assign]
        under_way.set()
        return not fails.wait(WAIT_S)

    store.probe = fail_late  # type: ignore[method-assign]
    gate.report_broken()
    site.clock.advance(EVEN.first_s)
    assert under_way.wait(WAIT_S)
    (answer,) = waiters(gate, 1, 1.0)
    site.moved_until(lambda: site.clock.waiting == 2, 0.0)
    fails.set()
    assert answer.result(WAIT_S)


def test_a_probe_that_takes_longer_is_not_waited_for(site: Site) -> None:
    gate = site.opened()
    site.cluster.hang("probe")
    gate.report_broken()
    (answer,) = waiters(gate, 1, 1.0)
    site.cluster.wait_hanging(1)
    site.clock.advance(1.0)
    assert not answer.result(WAIT_S)
    assert not gate.wait_probed(0.0)


def test_a_close_ends_the_wait_for_a_probe(site: Site) -> None:
    gate = site.opened()
    site.cluster.hang("probe")
    gate.report_broken()
    (answer,) = waiters(gate, 1, 1.0)
    site.cluster.wait_hanging(1)
    gate.close(0.0)
    assert not answer.result(WAIT_S)
    assert not gate.wait_probed(1.0)


def test_what_answers_half_of_the_time_is_asked_ever_more_rarely(site: Site) -> None:
    gate = site.opened()
    site.clock.advance(EVEN.steady_s)
    pauses = []
    for _ in range(7):
        gate.report_broken()
        opened_s = site.clock()
        site.moved_until(lambda: gate.is_well, 0.125)
        site.wait_return()
        pauses.append(site.clock() - opened_s)
        site.clock.advance(1.0)
    # The clock runs on a little while the probe is under way.
    for pause_s, wanted_s in zip(pauses, [0.25, 0.5, 1, 2, 4, 5, 5], strict=True):
        assert pause_s >= wanted_s
    site.clock.advance(EVEN.steady_s)
    gate.report_broken()
    site.clock.advance(EVEN.first_s)
    site.wait_return()


def test_nobody_is_let_through_before_what_must_come_first_has_gone_well(site: Site) -> None:
    answers = [True, False, True]
    seen: list[bool] = []

    def before_return(store: ClusterStore) -> bool:
        seen.append(gate.is_well)
        return answers[len(seen) - 1]

    gate = site.gate(before_return=before_return)
    gate.open(1.0)
    site.wait_return()
    gate.report_broken()
    site.moved_until(lambda: gate.is_well)
    assert seen == [False, False, False]


def test_what_must_come_first_is_not_asked_of_a_store_that_was_given_up(site: Site) -> None:
    asked: list[ClusterStore] = []

    def before_return(store: ClusterStore) -> bool:
        asked.append(store)
        return True

    gate = site.gate(before_return=before_return)
    site.cluster.hang("probe")
    gate.begin()
    site.cluster.wait_hanging(1)
    site.moved_until(lambda: len(site.cluster.stores) == 2)
    site.cluster.go_on()
    site.moved_until(lambda: gate.is_well)
    site.moved_until(lambda: site.cluster.stores[0].is_closed)
    assert asked == site.cluster.stores[1:2]


def test_a_listener_that_fails_keeps_nobody_from_anything(site: Site) -> None:
    gate = site.gate()

    def fails() -> None:
        raise ValueError("a listener's own fault")

    gate.on_return(fails)
    gate.on_return(site.returns.release)
    gate.open(1.0)
    site.wait_return()
    site.wait_return()
    assert gate.call(asks, 1.0) == [Outcome.MISS]


# Fresh connections


def test_a_store_that_stays_broken_is_replaced_and_gets_its_memory_again(site: Site) -> None:
    gate = site.opened(GateLimits(patience=3))
    gate.register(4096, 8192, 1.0)
    first = site.cluster.stores[0]
    first.is_broken = True
    assert gate.call(asks, 1.0) == [Outcome.BROKEN]
    site.moved_until(lambda: gate.is_well)
    second = site.cluster.stores[1]
    assert second.registered == first.registered == [(4096, 8192)]
    assert first.calls.count("probe") == 1 + 3
    assert gate.counts().replaced == 1
    site.moved_until(lambda: first.is_closed)


def test_a_store_that_recovers_by_itself_is_kept_however_long_it_stays_broken(site: Site) -> None:
    site.cluster.traits = replace(TRAITS, recovers=True)
    gate = site.opened(GateLimits(patience=3))
    store = site.cluster.stores[0]
    store.is_broken = True
    assert gate.call(asks, 1.0) == [Outcome.BROKEN]
    site.moved_until(lambda: store.calls.count("probe") > 10)
    store.is_broken = False
    site.moved_until(lambda: gate.is_well)
    assert gate.counts().replaced == 0
    assert site.cluster.stores == [store]


def test_a_silent_store_that_recovers_has_time_to_come_back_with_all_its_calls(site: Site) -> None:
    site.cluster.traits = replace(TRAITS, recovers=True)
    gate = site.opened(GateLimits(most_threads=1))
    silent_call(site, gate)
    site.cluster.hang("probe")
    site.clock.advance(0.25)
    site.cluster.wait_hanging(2)
    site.clock.advance(20.0)
    site.cluster.go_on()
    site.wait_lates(1)
    site.moved_until(lambda: gate.is_well)
    assert len(site.cluster.stores) == 1
    assert gate.call(asks, 1.0) == [Outcome.MISS]


def test_a_store_that_recovers_is_replaced_where_its_probe_never_comes_back(site: Site) -> None:
    site.cluster.traits = replace(TRAITS, recovers=True)
    gate = site.opened()
    site.cluster.hang("probe")
    gate.report_broken()
    site.clock.advance(0.25)
    site.cluster.wait_hanging(1)
    site.clock.advance(29.0)
    assert len(site.cluster.stores) == 1
    site.moved_until(lambda: len(site.cluster.stores) == 2)


def test_a_store_that_recovers_is_replaced_where_its_calls_never_come_back(site: Site) -> None:
    site.cluster.traits = replace(TRAITS, recovers=True)
    gate = site.opened(GateLimits(most_threads=1))
    silent_call(site, gate)
    site.moved_until(lambda: gate.is_well)
    assert len(site.cluster.stores) == 1
    site.clock.advance(30.0)
    gate.report_broken()
    site.moved_until(lambda: len(site.cluster.stores) == 2)


def test_a_store_whose_probe_hangs_is_replaced(site: Site) -> None:
    gate = site.opened()
    site.cluster.hang("probe")
    gate.report_broken()
    site.clock.advance(0.25)
    site.cluster.wait_hanging(1)
    site.moved_until(lambda: len(site.cluster.stores) == 2)
    assert gate.counts().stuck_threads >= 1
    assert not site.cluster.stores[0].is_closed
    site.cluster.go_on()
    site.moved_until(lambda: gate.is_well)
    site.moved_until(lambda: site.cluster.stores[0].is_closed)


def test_a_store_that_holds_all_threads_is_replaced_and_closed_when_they_are_out(site: Site) -> None:
    gate = site.opened(GateLimits(most_threads=1))
    silent_call(site, gate)
    site.moved_until(lambda: gate.is_well)
    assert len(site.cluster.stores) == 2
    assert not site.cluster.stores[0].is_closed
    assert gate.counts().held_stores == 1
    site.cluster.go_on()
    site.wait_lates(1)
    site.moved_until(lambda: site.cluster.stores[0].is_closed)
    assert gate.call(asks, 1.0) == [Outcome.MISS]


def test_threads_held_by_calls_that_were_given_up_do_not_stop_the_gate(site: Site) -> None:
    """A call that its caller gave up is no timeout: yet where it never ends its thread is lost."""
    gate = site.opened(GateLimits(most_threads=1))
    site.cluster.hang("exists")
    call = gate.start(asks, 1.0, site.late)
    site.cluster.wait_hanging(1)
    call.give_up()
    with_none_left = gate.start(asks, 1.0)
    site.clock.advance(1.0)
    with pytest.raises(StoreUnavailable):
        with_none_left.result()
    site.moved_until(lambda: gate.is_well)
    assert len(site.cluster.stores) == 2


def test_so_many_stores_may_be_held_and_the_last_one_is_waited_for(site: Site) -> None:
    gate = site.opened(GateLimits(most_held=2))
    site.cluster.hang("probe")
    gate.report_broken()
    site.moved_until(lambda: len(site.cluster.stores) == 3, 0.5)
    site.cluster.wait_hanging(3)
    for _ in range(200):
        site.clock.advance(1.0)
    gate.audit()
    assert len(site.cluster.stores) == 3
    assert gate.counts().held_stores == 2
    assert gate.counts().stuck_threads == 3
    site.cluster.go_on()
    site.moved_until(lambda: gate.is_well)


def test_a_store_that_cannot_be_opened_any_more_is_tried_until_it_can(site: Site) -> None:
    gate = site.opened()
    site.cluster.is_down = True
    assert gate.call(asks, 1.0) == [Outcome.BROKEN]
    site.moved_until(lambda: len(site.cluster.stores) == 6)
    assert gate.counts().held_stores <= 1
    site.cluster.is_down = False
    site.moved_until(lambda: gate.is_well)


# Life


def test_a_start_against_a_silent_store_ends_in_a_sentence(site: Site) -> None:
    site.cluster.hang("open")
    gate = site.gate()
    gate.begin()
    site.cluster.wait_hanging(1)
    with pytest.raises(StoreError, match="the store 'memory' does not answer within 0 s"):
        gate.open(0.0)


def test_a_start_against_a_store_that_is_down_says_why_and_goes_on_trying(site: Site) -> None:
    site.cluster.is_down = True
    gate = site.gate()
    gate.begin()
    site.moved_until(lambda: gate.counts().probes > 1)
    with pytest.raises(StoreError, match="does not answer within 0 s: the memory cluster is down"):
        gate.open(0.0)
    site.cluster.is_down = False
    site.moved_until(lambda: gate.is_well)


def test_a_store_that_cannot_be_made_as_configured_stops_the_start_at_once(site: Site) -> None:
    def make() -> ClusterStore:
        raise ConfigError("no such option")

    with pytest.raises(ConfigError, match="no such option"):
        site.gate(make_store=make).open(1000.0)


def test_calls_before_the_first_opening_are_refused(site: Site) -> None:
    gate = site.gate()
    with pytest.raises(StoreUnavailable) as raised:
        gate.call(asks, 1.0)
    assert raised.value.why is Why.OPEN_BREAKER


def test_memory_that_the_store_refuses_is_refused_and_forgotten(site: Site) -> None:
    gate = site.opened()
    site.cluster.stores[0].refuses_memory = True
    with pytest.raises(StoreError, match="refuses memory: the memory cluster takes no memory"):
        gate.register(4096, 4096, 1.0)
    site.cluster.stores[0].refuses_memory = False
    gate.register(8192, 4096, 1.0)
    assert site.cluster.stores[0].registered == [(8192, 4096)]
    assert gate.is_well


def test_memory_told_before_the_store_is_there_reaches_it(site: Site) -> None:
    gate = site.gate()
    gate.register(4096, 4096, 1.0)
    gate.open(1.0)
    assert site.cluster.stores[0].registered == [(4096, 4096)]


def test_memory_that_a_store_does_not_take_in_time_ends_the_wait(site: Site) -> None:
    gate = site.opened()
    site.cluster.hang("register")
    ended: list[Why] = []

    def registers() -> None:
        try:
            gate.register(4096, 4096, 1.0)
        except StoreUnavailable as error:
            ended.append(error.why)

    thread = threading.Thread(target=registers)
    thread.start()
    site.cluster.wait_hanging(1)
    site.clock.advance(1.0)
    thread.join(WAIT_S)
    assert ended == [Why.SILENT]


def test_a_close_ends_calls_and_does_not_wait_for_one_that_hangs(site: Site) -> None:
    gate = site.opened(GateLimits(most_threads=1))
    site.cluster.hang("exists")
    inside = gate.start(asks, 100.0, site.late)
    site.cluster.wait_hanging(1)
    waiting = gate.start(asks, 100.0, site.late)
    assert gate.close(0.0) is False
    for call in (inside, waiting):
        with pytest.raises(StoreUnavailable) as raised:
            call.result()
        assert raised.value.why is Why.CLOSED
    site.wait_lates(1)
    assert not site.cluster.stores[0].is_closed
    site.cluster.go_on()
    site.wait_lates(2)
    assert site.lates == [None, [Outcome.MISS]]
    assert gate.close(WAIT_S)
    assert site.cluster.stores[0].is_closed


def test_a_closed_gate_refuses_everything(site: Site) -> None:
    gate = site.opened()
    assert gate.close(WAIT_S)
    with pytest.raises(StoreUnavailable) as raised:
        gate.call(asks, 1.0)
    assert raised.value.why is Why.CLOSED
    with pytest.raises(StoreUnavailable):
        gate.open(1.0)
    assert site.cluster.stores[0].is_closed


def test_a_store_that_hangs_everywhere_keeps_no_interpreter_from_exiting() -> None:
    program = """
from umbp.store.gate import StoreGate, StoreUnavailable
from umbp.testing.stores.memory import TRAITS, MemoryCluster
cluster = MemoryCluster()
gate = StoreGate("memory", cluster.connect)
gate.open(30.0)
cluster.hang()
try:
    gate.call(lambda store: store.exists(["k"]), 0.05)
except StoreUnavailable as error:
    print(error)
print(gate.close(0.05))
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["the store 'memory' brought nothing: silent", "False"]


# A system that has no threads left


class NoThreads:
    """The system refuses threads whose names end like this, while it is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ending: str | None = None
        start = threading.Thread.start

        def refuse(thread: threading.Thread) -> None:
            if self.ending is not None and thread.name.endswith(self.ending):
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> NoThreads:
    return NoThreads(monkeypatch)


@pytest.mark.parametrize("ending", ["-watch", "-own"])
def test_a_start_without_threads_is_one_sentence_and_works_later(
    site: Site, no_threads: NoThreads, ending: str
) -> None:
    gate = site.gate()
    no_threads.ending = ending
    said: list[str] = []

    def is_said() -> bool:
        with pytest.raises(StoreError) as refused:
            gate.open(0.0)
        said.append(str(refused.value))
        return "the system gives this process no thread" in said[-1]

    site.moved_until(is_said)
    assert "\n" not in said[-1]
    gate.audit()
    no_threads.ending = None
    gate.begin()
    site.moved_until(lambda: gate.is_well)
    assert gate.call(asks, 1.0) == [Outcome.MISS]


def test_a_gate_that_never_had_a_thread_is_left_at_once(site: Site, no_threads: NoThreads) -> None:
    gate = site.gate()
    no_threads.ending = "-own"
    gate.begin()
    assert gate.close(0.0)
    gate.audit()


def test_a_store_that_is_given_up_while_there_are_no_threads_comes_back_when_there_are(
    site: Site, no_threads: NoThreads
) -> None:
    gate = site.opened(GateLimits(patience=1))
    no_threads.ending = "-own"
    site.cluster.is_down = True
    with pytest.raises(StoreError):
        gate.call(_raises, 1.0)
    site.moved_until(lambda: gate.counts().replaced > 0)
    site.cluster.is_down = False
    no_threads.ending = None
    site.moved_until(lambda: gate.is_well)
    assert gate.call(asks, 1.0) == [Outcome.MISS]


def test_a_probe_that_finds_no_thread_is_waited_for_no_longer(site: Site, no_threads: NoThreads) -> None:
    gate = site.opened(GateLimits(patience=1))
    no_threads.ending = "-own"
    site.cluster.is_down = True
    gate.report_broken()
    for _ in range(2):
        (answer,) = waiters(gate, 1, 100.0)
        assert not answer.result(WAIT_S)
        site.clock.advance(0.5)
    site.cluster.is_down = False
    no_threads.ending = None
    site.moved_until(lambda: gate.is_well)


def test_a_call_that_finds_no_thread_is_served_when_one_comes(site: Site, no_threads: NoThreads) -> None:
    gate = site.opened()
    no_threads.ending = "-1"
    waiting = gate.start(asks, 1.0)
    no_threads.ending = None
    assert gate.call(asks, 1.0) == [Outcome.MISS]
    assert waiting.result() == [Outcome.MISS]


def _raises(store: ClusterStore) -> bool:
    raise OSError("it is down")
