"""Random walks through the lives of engines of every shape: all that may happen, in any order, drawn from a
seed and the same in every run.

Each step does none to two acts and lets the engine step once. A life ends with a drain, after which nothing
may be left anywhere.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from random import Random

from engine_checks import check_accounts, check_drained
from engine_choices import Admission, Nature, Prompt, drawn_shape
from engine_life import Around, EngineLife, counters, unchanged
from engine_shapes import SHAPES

LIFE_STEPS = 250

ACTS = {
    "admit": 60,
    "abort": 5,
    "abort_all": 0.5,
    "begin_session": 3,
    "continue_session": 6,
    "reset": 8,
    "clear": 3,
    "change_weights": 4,
    "land": 8,
    "borrow": 8,
    "lose_loads": 4,
    "kill": 5,
    "destroy": 0.6,
    "evict": 5,
}
"""What is tried, and how often."""


class Walk:
    """One life, of which `random` decides everything."""

    acts: Mapping[str, float] = ACTS

    def __init__(self, random: Random, life: EngineLife) -> None:
        self.random = random
        self.life = life
        self.done: Counter[str] = Counter()
        """How often each act could happen, and did."""

    def step(self) -> None:
        self.life.pass_time(self.random.choice([0.0, 0.3, 1.0]))
        for _ in range(self.random.choice([0, 1, 1, 2])):
            (what,) = self.random.choices(list(self.acts), list(self.acts.values()))
            self.done[what] += getattr(self, f"_{what}")()
        self.life.step(self._in_the_middle)
        self.check()

    def check(self) -> None:
        """What holds after every step."""
        check_accounts(self.life)

    def end(self) -> None:
        self.life.drain()
        served = self.life.served()
        self.life.sweep(self.random.sample(served, min(len(served), 8)))

    def _in_the_middle(self) -> None:
        if self.random.random() < 0.04:
            self._abort()

    # The acts: each says whether it could happen

    def _admit(self) -> bool:
        if not self.life.may_admit():
            return False
        self.life.admit(Admission.drawn(self.random))
        return True

    def _abort(self) -> bool:
        if not (live := self.life.live()):
            return False
        self.life.abort(self.random.choice(live))
        return True

    def _abort_all(self) -> bool:
        live = self.life.live()
        self.life.abort(*live)
        return bool(live)

    def _begin_session(self) -> bool:
        if not self.life.may_begin_session():
            return False
        self.life.begin_session(Prompt.drawn(self.random), self.random.randint(1, 8))
        return True

    def _continue_session(self) -> bool:
        """The next input of a session, or its end."""
        if not (sessions := self.life.open_sessions()):
            return False
        session = self.random.choice(sessions)
        if self.life.may_continue(session) and self.random.random() < 0.7:
            self.life.continue_session(session, Prompt.drawn(self.random), self.random.randint(1, 8))
        else:
            self.life.end_session(session, self.random.randint(1, 8))
        return True

    def _reset(self) -> bool:
        if not self.life.may_preempt_all():
            return False
        self.life.reset(preempts=self.random.random() < 0.5)
        return True

    def _clear(self) -> bool:
        if self.life.nature.clears:
            self.life.clear()
        return self.life.nature.clears

    def _change_weights(self) -> bool:
        if not self.life.may_change_weights():
            return False
        self.life.change_weights()
        return True

    def _land(self) -> bool:
        was_in_flight = self.life.engine.is_in_flight
        self.life.land()
        return was_in_flight

    def _borrow(self) -> bool:
        if self.life.borrowed:
            self.life.give_back()
        else:
            self.life.borrow(self.random.randint(0, self.life.free_blocks()))
        return True

    def _lose_loads(self) -> bool:
        self.life.loses_each = 0 if self.life.loses_each else self.random.randint(1, 5)
        return True

    def _kill(self) -> bool:
        """The backend dies, for all or for some, or comes back."""
        backend = self.life.backend
        if not self.life.nature.is_mortal:
            return False
        if backend.is_dead:
            backend.revive()
        elif self.random.random() < 0.4:
            backend.kill()
        elif self.random.random() < 0.3:
            backend.kill_scheduler()
        else:
            backend.kill_rank(self.random.choice(backend.ranks))
        return True

    def _destroy(self) -> bool:
        if self.life.may_be_destroyed():
            self.life.destroy()
        return self.life.may_be_destroyed()

    def _evict(self) -> bool:
        if not (keys := self.life.evictable()):
            return False
        count = min(len(keys), self.random.randint(1, 12))
        self.life.evict(self.random.sample(keys, count))
        return True


class LifeError(AssertionError):
    """A life went wrong."""

    def __init__(self, seed: int, life: int, steps: int, at: int, story: str, *, what: str = "") -> None:
        """`what`: which kind of lives, as `make soak` is told of it."""
        super().__init__(f"seed {seed}, life {life}, step {at}: {story}")
        self.life = life
        self.replay = f"make soak {what}STEPS={steps} SEED={seed} LIFE={life}"


def in_words(error: Exception) -> str:
    """What went wrong. A bare assertion says nothing where pytest has not rewritten it: then its own line."""
    told = str(error).strip()
    if not told:
        last = traceback.extract_tb(error.__traceback__)[-1]
        told = f"{last.line} ({Path(last.filename).name}, line {last.lineno})"
    return f"{type(error).__name__}: {told}"


@contextlib.contextmanager
def one_walk(random: Random, name: str, root: Path, around: Around = unchanged) -> Iterator[Walk]:
    """Through a life of one shape; `around` gives its pool's runtime other properties."""
    with walks_together(random, name, root, 1, around) as (walk,):
        yield walk


@contextlib.contextmanager
def walks_together(
    random: Random, name: str, root: Path, count: int, around: Around = unchanged
) -> Iterator[list[Walk]]:
    """Through lives of one shape; several share one pool, which none of them clears or destroys."""
    folder = Path(tempfile.mkdtemp(prefix="umbp-walk-", dir="/dev/shm"))
    walks: list[Walk] = []
    try:
        for _ in range(count):
            nature = Nature.drawn(random)
            if count > 1:
                nature = replace(nature, pool="standalone", clears=False, is_mortal=False, is_faulty=False)
            if nature.is_faulty:
                nature = replace(nature, fault_seed=random.randrange(1000))
            shape = drawn_shape(random, name, nature)
            walks.append(Walk(random, EngineLife(nature, shape, root, folder, around)))
        yield walks
    finally:
        for walk in walks:
            walk.life.close()
        shutil.rmtree(folder)


Live = Callable[[Random, str, int, int, Counter[str]], Iterator[int]]
"""Lives the life of a shape's name and a number for so many steps: says which step comes next, and counts
what has happened when all is over.
"""


def walk_shapes(
    live: Live,
    seed: int,
    steps: int,
    *,
    steps_each: int,
    kind: str = "",
    what: str = "",
    first: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Counter[str]:
    """So many steps through lives of all shapes in turn, each drawn from its kind, the seed and its number;
    returns what happened how often. `LifeError` tells of the first that goes wrong, and of `what` it is.
    """
    told: Counter[str] = Counter()
    done = 0
    for number in itertools.count(first):
        if done >= steps:
            break
        name = list(SHAPES)[number % len(SHAPES)]
        at, life_steps = 0, min(steps_each, steps - done)
        random = Random(f"{kind}{seed} {number}")
        try:
            for at in live(random, name, number, life_steps, told):  # noqa: B007
                pass
        except Exception as error:
            raise LifeError(seed, number, life_steps, at, in_words(error), what=what) from error
        done += at + 1
        say(f"{done} steps, {number - first + 1} lives, the last one of {name!r}")
    return told


def walk_lives(
    seed: int,
    steps: int,
    root: Path,
    *,
    first: int = 0,
    around: Around = unchanged,
    say: Callable[[str], None] = lambda text: None,
) -> Counter[str]:
    """See `walk_shapes`."""

    def live(random: Random, name: str, number: int, steps: int, told: Counter[str]) -> Iterator[int]:
        count = 2 if number // len(SHAPES) % 4 == 3 else 1
        with walks_together(random, name, root, count, around) as walks:
            for at in range(steps):
                yield at
                random.choice(walks).step()
            for walk in walks:
                walk.end()
            for walk in walks:
                check_drained(walk.life)
                told.update(walk.done)
                told.update(counters(walk.life))

    return walk_shapes(live, seed, steps, steps_each=LIFE_STEPS, first=first, say=say)
