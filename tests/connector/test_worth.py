"""Which hits are worth loading, learned from steps and loads."""

from __future__ import annotations

import random

import pytest

from umbp.connector.scheduler.worth import ENOUGH, SMALL_STEPS, TRIAL, Line, LoadWorth, StepTimer
from umbp.testing.clock import TickClock


def learned(
    load_s: float, load_token_s: float, step_token_s: float, *, noise: float = 0.0, seed: int = 1
) -> LoadWorth:
    """After many steps and loads of these costs."""
    draw = random.Random(seed)
    worth = LoadWorth()
    for _ in range(200):
        tokens = draw.choice([1, 4, 200, 1000, 2000])
        worth.observe_step(tokens, (0.004 + tokens * step_token_s) * (1 + noise * draw.random()))
        tokens = 16 * draw.randint(1, 200)
        worth.observe_load(tokens, (load_s + tokens * load_token_s) * (1 + noise * draw.random()))
    return worth


def first_worth(worth: LoadWorth) -> int:
    """The shortest hit, in blocks of 16 tokens, that is worth loading for certain."""
    return next(
        blocks for blocks in range(1, 10_000) if all(worth.is_worth(16 * blocks) for _ in range(TRIAL))
    )


def test_without_observations_every_hit_is_worth_loading() -> None:
    worth = LoadWorth()
    assert worth.is_worth(1)
    for _ in range(ENOUGH - 1):
        worth.observe_load(16, 10.0)
        worth.observe_step(16, 1e-6)
    assert worth.is_worth(1)


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_the_threshold_is_where_loading_and_computing_take_the_same(noise: float) -> None:
    """2 ms to load anything, 50 us a token to compute: 40 tokens, or 32 with the benefit of the doubt."""
    worth = learned(load_s=0.002, load_token_s=1e-6, step_token_s=50e-6, noise=noise)
    assert 2 <= first_worth(worth) <= 4
    assert worth.is_worth(5_000)


def test_a_faster_engine_wants_longer_hits() -> None:
    slow = learned(load_s=0.002, load_token_s=1e-7, step_token_s=200e-6)
    fast = learned(load_s=0.002, load_token_s=1e-7, step_token_s=5e-6)
    assert first_worth(slow) == 1
    assert 15 <= first_worth(fast) <= 25


def test_what_is_always_slower_than_computing_is_tried_now_and_then() -> None:
    worth = learned(load_s=0.002, load_token_s=1e-3, step_token_s=1e-5)
    tried = sum(worth.is_worth(1000) for _ in range(10 * TRIAL))
    assert tried == 10


def test_a_backend_that_has_become_fast_again_is_used_again() -> None:
    worth = learned(load_s=0.002, load_token_s=1e-3, step_token_s=1e-5)
    in_a_row = asked = 0
    while in_a_row < TRIAL:
        asked += 1
        in_a_row = in_a_row + 1 if worth.is_worth(1000) else 0
        if in_a_row:
            worth.observe_load(1000, 0.003)
    assert asked < 100 * TRIAL


def test_slow_first_loads_are_soon_forgotten() -> None:
    worth = LoadWorth()
    for number in range(100):
        worth.observe_step(1 + 10 * number, 0.004 + number * 500e-6)
    for _ in range(ENOUGH):
        worth.observe_load(1000, 5.0)
    asked = loaded = 0
    while loaded < TRIAL:
        asked += 1
        loaded = loaded + 1 if worth.is_worth(1000) else 0
        if loaded:
            worth.observe_load(1000, 0.003)
    assert asked < 12 * TRIAL


def test_a_stall_spoils_nothing() -> None:
    worth = learned(load_s=0.002, load_token_s=1e-6, step_token_s=50e-6)
    worth.observe_load(64, 30.0)
    worth.observe_step(1, 30.0)
    assert first_worth(worth) <= 6


def test_a_threshold_that_is_set_is_kept() -> None:
    worth = LoadWorth(64)
    for _ in range(100):
        worth.observe_load(64, 10.0)
        worth.observe_step(64, 1e-6)
    assert (worth.is_worth(63), worth.is_worth(64)) == (False, True)


def test_steps_of_one_size_tell_no_slope() -> None:
    line = Line(0.98)
    assert (line.slope, line.at(7)) == (None, 0.0)
    for _ in range(20):
        line.add(8, 0.5)
    assert line.slope is None
    assert line.at(100) == pytest.approx(0.5)
    line.add(108, 1.5)
    assert line.slope == pytest.approx(0.01)


def test_a_step_is_timed_from_its_plan_or_from_the_end_of_the_one_before() -> None:
    clock = TickClock()
    worth = LoadWorth()
    timer = StepTimer(worth, clock)
    first = timer.begin(1000)
    clock.advance(1)
    second = timer.begin(500)
    clock.advance(1)
    timer.end(first)
    clock.advance(1)
    timer.end(second)
    timer.end(second)
    timer.end(-1)
    assert worth._steps.count == 2
    assert worth._steps.slope == pytest.approx(1 / 500)


def test_steps_that_only_generate_are_timed_now_and_then() -> None:
    timer = StepTimer(LoadWorth(), TickClock())
    assert sum(timer.begin(0) >= 0 for _ in range(4 * SMALL_STEPS)) == 4
    assert sum(timer.begin(3) >= 0 for _ in range(4 * SMALL_STEPS)) == 4
    assert all(timer.begin(300) >= 0 for _ in range(4))


def test_long_generation_does_not_make_one_forget_what_prompts_cost() -> None:
    # Many requests generate for minutes, ever longer ones in ever smaller steps: that tells of no prompt.
    draw = random.Random(1)
    clock = TickClock()
    worth = LoadWorth()
    timer = StepTimer(worth, clock)

    def step(prompt_tokens: int, seconds: float) -> None:
        number = timer.begin(prompt_tokens)
        clock.advance(seconds * (1 + 0.1 * draw.random()))
        timer.end(number)

    for _ in range(ENOUGH):
        step(8000, 0.810)
        worth.observe_load(10_000, 0.1)
    for number in range(20_000):
        step(0, 0.010 + 1e-6 * number)
    assert all(worth.is_worth(10_000) for _ in range(TRIAL))


def test_loads_that_share_the_way_are_not_taken_for_slow_ones() -> None:
    # 32 loads of 0.05 s each begin at once: each ends 1.6 s later, and computing takes 0.8 s.
    worth = learned(load_s=0.0, load_token_s=6e-6, step_token_s=1e-4)
    for _ in range(32):
        worth.observe_load(8000, 1.6, others=31 / 2)
    assert all(worth.is_worth(8000) for _ in range(TRIAL))
