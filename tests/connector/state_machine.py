"""A state machine of an engine's life, whose rules are its acts: hypothesis draws stories of them, and tells
a failing one in as few acts as it can.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import TypeVar

import hypothesis
from engine_checks import check_accounts, check_drained
from engine_choices import Admission, Nature, Prompt, drawn_shape
from engine_life import Around, EngineLife, counters, unchanged
from engine_shapes import SHAPES
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from umbp.testing.engine import Shape

Drawn = TypeVar("Drawn")

STORY_ACTS = 60


def drawn_by(draw: Callable[[Random], Drawn]) -> st.SearchStrategy[Drawn]:
    """What a walk draws, drawn by hypothesis."""
    return st.randoms(use_true_random=False).map(draw)


def drawn_engine(random: Random) -> tuple[Nature, Shape]:
    nature = replace(Nature.drawn(random), fault_seed=random.randrange(1000))
    return nature, drawn_shape(random, random.choice(list(SHAPES)), nature)


some = st.integers(0, 6)
"""Which of those that there are, counted around."""
new_tokens = st.integers(1, 8)


def can(act: Callable[[EngineLife], object]) -> Callable[..., Callable[..., None]]:
    return precondition(lambda self: bool(act(self.life)))


class EngineStory(RuleBasedStateMachine):
    """A life in which each act is a step's, or what happens before one."""

    def __init__(self, root: Path, around: Around = unchanged, told: Counter[str] | None = None) -> None:
        """`told`: what the lives that ended well have counted."""
        super().__init__()
        self._root = root
        self._around = around
        self._told = told
        self._folder = Path(tempfile.mkdtemp(prefix="umbp-story-", dir="/dev/shm"))
        self._life: EngineLife | None = None

    @property
    def life(self) -> EngineLife:
        assert self._life is not None
        return self._life

    @initialize(engine=drawn_by(drawn_engine))
    def begin(self, engine: tuple[Nature, Shape]) -> None:
        self._life = EngineLife(*engine, self._root, self._folder, self._around)

    # Time

    @rule(seconds=st.sampled_from([0.0, 0.3, 1.0, 6.0]), count=st.integers(1, 8))
    def step(self, seconds: float, count: int) -> None:
        for _ in range(count):
            self.life.pass_time(seconds)
            self.life.step()
            check_accounts(self.life)

    @rule(which=some)
    @can(EngineLife.live)
    def step_with_an_abort_before_its_results(self, which: int) -> None:
        def abort() -> None:
            if live := self.life.live():
                self.life.abort(_of(live, which))

        self.life.step(between=abort)

    @rule()
    @can(lambda life: life.engine.is_in_flight)
    def land(self) -> None:
        self.life.land()

    # What users do

    @rule(one=drawn_by(Admission.drawn))
    @can(EngineLife.may_admit)
    def admit(self, one: Admission) -> None:
        self.life.admit(one)

    @rule(which=some, max_tokens=new_tokens)
    @can(lambda life: life.may_admit() and life.served())
    def ask_again(self, which: int, max_tokens: int) -> None:
        self.life.ask_again(_of(self.life.served(), which), max_tokens)

    @rule(which=some, count=st.integers(1, 3))
    @can(lambda life: life.may_admit() and life.served() and life.may_preempt_all())
    def forget_and_ask_again(self, which: int, count: int) -> None:
        """Only the pool has what these want, all of them the same."""
        self.life.reset(preempts=False)
        served = _of(self.life.served(), which)
        for _ in range(count):
            self.life.ask_again(served)

    @rule(which=some, each=st.integers(1, 3), gives_up=st.booleans(), seconds=st.sampled_from([0.0, 1.0]))
    @can(lambda life: life.may_admit() and life.served() and life.may_preempt_all())
    def lose_a_load_and_ask_again(self, which: int, each: int, gives_up: bool, seconds: float) -> None:
        """Right after its load was lost somebody else wants the same."""
        self.life.reset(preempts=False)
        self.life.loses_each = each
        served = _of(self.life.served(), which)
        first = self.life.ask_again(served)
        for _ in range(3):
            self.step(seconds, 1)
        if gives_up:
            self.life.abort(first)
        self.life.loses_each = 0
        self.life.ask_again(served)

    @rule(which=some)
    @can(EngineLife.live)
    def abort(self, which: int) -> None:
        self.life.abort(_of(self.life.live(), which))

    @rule()
    @can(EngineLife.live)
    def abort_all(self) -> None:
        self.life.abort(*self.life.live())

    @rule(prompt=drawn_by(Prompt.drawn), max_tokens=new_tokens)
    @can(EngineLife.may_begin_session)
    def begin_session(self, prompt: Prompt, max_tokens: int) -> None:
        self.life.begin_session(prompt, max_tokens)

    @rule(which=some, prompt=drawn_by(Prompt.drawn), max_tokens=new_tokens)
    @can(lambda life: [one for one in life.open_sessions() if life.may_continue(one)])
    def continue_session(self, which: int, prompt: Prompt, max_tokens: int) -> None:
        sessions = [one for one in self.life.open_sessions() if self.life.may_continue(one)]
        self.life.continue_session(_of(sessions, which), prompt, max_tokens)

    @rule(which=some, max_tokens=new_tokens)
    @can(EngineLife.open_sessions)
    def end_session(self, which: int, max_tokens: int) -> None:
        self.life.end_session(_of(self.life.open_sessions(), which), max_tokens)

    # What an operator does

    @rule(preempts=st.booleans())
    @can(EngineLife.may_preempt_all)
    def reset(self, preempts: bool) -> None:
        self.life.reset(preempts=preempts)

    @rule()
    @can(lambda life: life.nature.clears)
    def clear(self) -> None:
        self.life.clear()

    @rule()
    @can(EngineLife.may_change_weights)
    def change_weights(self) -> None:
        self.life.change_weights()

    # What goes wrong

    @rule(each=st.integers(0, 5))
    def lose_loads(self, each: int) -> None:
        self.life.loses_each = each

    @rule(blocks=st.integers(1, 60))
    @can(lambda life: not life.borrowed)
    def borrow(self, blocks: int) -> None:
        self.life.borrow(min(blocks, self.life.free_blocks()))

    @rule()
    @can(lambda life: life.borrowed)
    def give_back(self) -> None:
        self.life.give_back()

    @rule()
    @can(EngineLife.may_die)
    def kill(self) -> None:
        self.life.backend.kill()

    @rule()
    @can(EngineLife.may_die)
    def kill_scheduler(self) -> None:
        self.life.backend.kill_scheduler()

    @rule(which=some)
    @can(EngineLife.may_die)
    def kill_rank(self, which: int) -> None:
        self.life.backend.kill_rank(_of(self.life.backend.ranks, which))

    @rule()
    @can(lambda life: life.backend.is_dead)
    def revive(self) -> None:
        self.life.backend.revive()

    @rule()
    @can(EngineLife.may_be_destroyed)
    def destroy(self) -> None:
        self.life.destroy()

    @rule(first=st.integers(0, 100), count=st.integers(1, 12))
    @can(EngineLife.evictable)
    def evict(self, first: int, count: int) -> None:
        keys = self.life.evictable()
        first %= len(keys)
        self.life.evict(keys[first : first + count])

    # What must hold

    @invariant()
    def accounts_are_even(self) -> None:
        if self._life is not None:
            check_accounts(self._life)

    def teardown(self) -> None:
        """A story without an error ends with a drain, which is its last act."""
        try:
            if sys.exception() is None and self._life is not None:
                self._life.drain()
                self._life.sweep(self._life.served()[:8])
                check_drained(self._life)
                if self._told is not None:
                    self._told.update(counters(self._life))
                    self._told["steps"] += self._life.engine.steps
        finally:
            if self._life is not None:
                self._life.close()
            shutil.rmtree(self._folder)


def _of(ones: list[Drawn], which: int) -> Drawn:
    return ones[which % len(ones)]


def tell_stories(
    root: Path,
    count: int,
    *,
    around: Around = unchanged,
    seed: int | None = None,
    shrinks: bool = True,
) -> Counter[str]:
    """So many stories, always the same without a `seed`; returns what was counted in them. What fails is
    raised, with the shortest story of it, or the first where none is to be looked for.
    """
    told: Counter[str] = Counter()

    def make() -> EngineStory:
        return EngineStory(root, around, told)

    run_state_machine_as_test(
        make if seed is None else hypothesis.seed(seed)(make),  # type: ignore[arg-type]
        settings=settings(
            max_examples=count,
            stateful_step_count=STORY_ACTS,
            deadline=None,
            database=None,
            derandomize=seed is None,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
            phases=[Phase.generate, Phase.shrink] if shrinks else [Phase.generate],
        ),
    )
    return told
