"""From how many tokens on a hit is worth loading: by what loads have taken of late, and what steps have.

Pure arithmetic over seconds that others have measured. Scheduler thread only.

A load of k tokens is expected to take `a + b k` seconds from its plan to its end, the engine's own steps in
between included, or its share of them where several loads are under way: prompts that are computed instead
queue up as well. Computing them makes a step longer by `c k`. What a step takes anyway is not counted on
either side: the request's last tokens are computed in one in any case, and others generate in it or don't.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

STEPS_FORGET = 0.98
LOADS_FORGET = 0.9
"""How much an observation still counts for when one more has been made; steps are many, and loads few."""

ENOUGH = 8
"""Before so many loads and so many steps have been seen, every hit is worth loading."""

OUTLIER = 4.0
"""A stall is counted as so many times what was expected, at most."""

DOUBT = 1.25
"""A load must be expected to take so much longer than computing before it is left out."""

TRIAL = 16
"""Of hits that aren't worth loading every so many-th is loaded all the same, so that a change is noticed."""


@dataclass(slots=True)
class Line:
    """A straight line through pairs of tokens and seconds, newer ones counting for more."""

    forget: float
    count: int = 0
    _weight: float = 0.0
    _tokens: float = 0.0
    _seconds: float = 0.0
    _tokens_squared: float = 0.0
    _product: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Take in one observation."""
        forget = self.forget
        if self.count >= ENOUGH:
            expected = self.at(tokens)
            seconds = min(seconds, OUTLIER * expected or seconds)
            if seconds * OUTLIER < expected:
                # Nothing is that much faster by chance: what made the others slow is over.
                forget *= 0.5
        self.count += 1
        self._weight = self._weight * forget + 1
        self._tokens = self._tokens * forget + tokens
        self._seconds = self._seconds * forget + seconds
        self._tokens_squared = self._tokens_squared * forget + tokens * tokens
        self._product = self._product * forget + tokens * seconds

    @property
    def slope(self) -> float | None:
        """Seconds a token; None where all observations were of the same number of tokens."""
        spread = self._weight * self._tokens_squared - self._tokens * self._tokens
        if spread <= 1e-6 * self._weight * self._tokens_squared:
            return None
        return max((self._weight * self._product - self._tokens * self._seconds) / spread, 0.0)

    def at(self, tokens: int) -> float:
        """The seconds that so many tokens are expected to take; 0 before anything was seen."""
        if not self._weight:
            return 0.0
        mean = self._seconds / self._weight
        return max(mean + (self.slope or 0.0) * (tokens - self._tokens / self._weight), 0.0)


class LoadWorth:
    """Learns from steps and loads whether a hit should be loaded or computed."""

    def __init__(self, fixed_tokens: int | None = None) -> None:
        """`fixed_tokens`: the threshold as the user has set it; nothing is learned then."""
        self._fixed_tokens = fixed_tokens
        self._steps = Line(STEPS_FORGET)
        self._loads = Line(LOADS_FORGET), Line(LOADS_FORGET)
        """Of what pools have, and of what must be fetched first."""
        self._left_out = 0

    def observe_step(self, tokens: int, seconds: float) -> None:
        """A step that computed so many tokens of prompts took so long, with what it generated beside."""
        self._steps.add(tokens, seconds)

    def observe_load(self, tokens: int, seconds: float, others: float = 0.0, *, is_far: bool = False) -> None:
        """A load of so many tokens ended so long after it was planned, with so many others beside it.
        `is_far`: some of them had to be fetched into the pool first.
        """
        self._loads[is_far].add(tokens, seconds / (1.0 + others))

    def is_worth(self, tokens: int, *, is_far: bool = False) -> bool:
        """Whether a hit of so many tokens should be loaded; asked once for each hit."""
        if self.pays(tokens, is_far=is_far):
            return True
        if self._fixed_tokens is not None:
            return False
        self._left_out += 1
        return self._left_out % TRIAL == 0

    def pays(self, tokens: int, *, is_far: bool = False) -> bool:
        """Whether a load of so many tokens is expected to take no longer than computing them."""
        if self._fixed_tokens is not None:
            return tokens >= self._fixed_tokens
        seconds_a_token, loads = self._steps.slope, self._loads[is_far]
        if min(self._steps.count, loads.count) < ENOUGH or seconds_a_token is None:
            return True
        return loads.at(tokens) <= DOUBT * seconds_a_token * tokens


SMALL_STEP_TOKENS = 32
SMALL_STEPS = 16
"""Of steps with fewer tokens of prompts, which hardly do more than generate, every so many-th is timed."""

STEPS_IN_FLIGHT = 64
"""More steps than this are never under way: older ones were lost, as on a failure of the engine's."""


class StepTimer:
    """Times the engine's steps from their plan, or from the end of the one before, to their results.

    Steps are numbered by what `begin` returns; results name their step, as not every step has any.
    """

    def __init__(self, worth: LoadWorth, clock: Callable[[], float]) -> None:
        self._worth = worth
        self._clock = clock
        self._begun: dict[int, tuple[int, float]] = {}
        self._next_step = 0
        self._small_steps = 0
        self._last_end_s = float("-inf")

    def begin(self, tokens: int) -> int:
        """A step that computes so many tokens of prompts is planned; its number, or -1 where it isn't
        timed.
        """
        if tokens < SMALL_STEP_TOKENS:
            self._small_steps += 1
            if self._small_steps % SMALL_STEPS:
                return -1
        step = self._next_step
        self._next_step += 1
        self._begun.pop(step - STEPS_IN_FLIGHT, None)
        self._begun[step] = tokens, self._clock()
        return step

    def end(self, step: int) -> None:
        """The results of that step are in; -1 stands for one that isn't timed."""
        now = self._clock()
        if (begun := self._begun.pop(step, None)) is not None:
            tokens, planned_s = begun
            self._worth.observe_step(tokens, now - max(planned_s, self._last_end_s))
        self._last_end_s = now
