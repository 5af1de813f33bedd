"""The breaker's arithmetic: pauses that grow, stay bounded and are forgotten, whatever happens in between."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbp.store.breaker import Backoff, Breaker

STEPS = st.lists(
    st.tuples(st.sampled_from(["fail", "stale", "hasten", "probe fails", "probe well"]), st.floats(0, 40)),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, seed=st.integers(0, 5))
def test_a_breaker_keeps_its_bounds_in_any_order(steps: list[tuple[str, float]], seed: int) -> None:
    backoff = Backoff()
    breaker = Breaker(backoff, random.Random(seed))
    breaker.begin(0.0)
    now_s = 0.0
    open_s = 0.0
    for step, later_s in steps:
        open_s += later_s if breaker.is_open else 0.0
        now_s += later_s
        was_open = breaker.is_open
        if step == "fail":
            assert breaker.open(now_s, breaker.epoch) is not was_open
        elif step == "stale":
            assert not breaker.open(now_s, breaker.epoch - 1)
            assert breaker.is_open is was_open
        elif step == "hasten":
            was_due = breaker.is_due(now_s)
            assert not breaker.hasten(now_s) or (was_open and not was_due and breaker.is_due(now_s))
        elif was_open and step == "probe fails":
            breaker.put_off(now_s)
        elif was_open:
            breaker.close(now_s)
            assert not breaker.is_open
        breaker.audit()
        assert breaker.probe_at_s <= now_s + backoff.most_s * (1 + backoff.jitter)
        assert breaker.seconds_open(now_s) == pytest.approx(open_s)


def test_pauses_double_up_to_a_bound_and_start_anew_only_after_steady_times() -> None:
    breaker = Breaker(Backoff(first_s=1, most_s=4, steady_s=10, jitter=0), random.Random(1))
    breaker.begin(0.0)
    breaker.close(0.0)
    pauses = []
    now_s = 10.0
    for well_s in (1.0, 1.0, 1.0, 10.0, 0.0):
        assert breaker.open(now_s, breaker.epoch)
        pauses.append(breaker.probe_at_s - now_s)
        breaker.close(now_s)
        now_s += well_s
    assert pauses == [1, 2, 4, 4, 1]


def test_a_pause_is_cut_short_only_if_the_one_before_was_not() -> None:
    breaker = Breaker(Backoff(first_s=1, most_s=4, steady_s=10, jitter=0), random.Random(1))
    breaker.begin(0.0)
    breaker.close(0.0)
    breaker.open(20.0, breaker.epoch)
    assert breaker.hasten(20.5)
    assert not breaker.hasten(20.5)
    breaker.put_off(20.5)
    assert not breaker.hasten(22.4)
    assert breaker.is_due(22.5)
    breaker.close(22.5)
    assert not breaker.hasten(22.5)
    breaker.open(22.5, breaker.epoch)
    assert breaker.hasten(22.5)


def test_pauses_differ_between_engines() -> None:
    at_s = set()
    for seed in range(20):
        breaker = Breaker(Backoff(first_s=1, jitter=0.2), random.Random(seed))
        breaker.put_off(0.0)
        assert 0.8 <= breaker.probe_at_s <= 1.2
        at_s.add(breaker.probe_at_s)
    assert len(at_s) == 20
