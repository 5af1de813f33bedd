"""A machine for random lives of an engine: all that may happen to one, in any order, drawn from a seed.

A life is one engine of one shape with one pool. Each of its steps does something to it and lets the engine
step once; the scripted engine compares every byte that a forward reads with the model, spoils what changes
hands and watches what nobody owns. A life ends with a drain, after which nothing may be left anywhere.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import scripted_runtime
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from umbp.connector import compat
from umbp.errors import UMBPError
from umbp.options import parse_options
from umbp.runtime.base import IUMBPRuntime
from umbp.runtime.embedded import EmbeddedRuntime
from umbp.runtime.standalone import Pool, StandaloneRuntime, pool_path
from umbp.runtime.wrap.faulty import FaultPlan, FaultyRuntime
from umbp.testing.clock import TickClock
from umbp.testing.engine import BLOCK, ScriptedEngine, Shape
from umbp.testing.engine.shape import Layers
from umbp.testing.reference import ReferenceRuntime
from umbp.testing.runtimes import EagerRuntime, MortalRuntime, WatchedRuntime, plain, slowly

FULL = Layers("full", 1)
WINDOWS = Layers("sliding", 2, 40)
STATES = Layers("mamba", 2)

SHAPES: dict[str, Shape] = {
    "full": Shape(),
    "full on ranks": Shape(ranks=2),
    "full in flight": Shape(depth=2),
    "full, other runner": Shape(runner=2),
    "windows": Shape(layers=(FULL, WINDOWS)),
    "windows alone": Shape(layers=(WINDOWS,)),
    "windows in wide blocks": Shape(layers=(FULL, replace(WINDOWS, head_size=2)), ranks=2),
    "windows in flight": Shape(layers=(FULL, WINDOWS), depth=2),
    "chunks": Shape(layers=(FULL, Layers("chunked", 2, 64))),
    "states": Shape(layers=(FULL, STATES)),
    "states on ranks": Shape(layers=(FULL, STATES), ranks=2, runner=2),
    "windows and states": Shape(layers=(FULL, Layers("sliding", 1, 40), Layers("mamba", 1))),
    "mla": Shape(layers=(Layers("mla", 2),), ranks=2),
    "one head for two ranks": Shape(ranks=2, kv_heads=1),
    "stages": Shape(stages=2, ranks=2),
    "stages with windows": Shape(stages=2, layers=(Layers("full", 2), Layers("sliding", 4, 40))),
    "windows on one stage": Shape(stages=2, depth=2, layers=(FULL, Layers("sliding", 1, 40))),
    "dealt tokens": Shape(ranks=2, kv_heads=1, dcp=2),
    "dealt tokens on stages": Shape(ranks=2, kv_heads=1, dcp=2, stages=2, depth=2),
    "dealt tokens and states": Shape(ranks=2, kv_heads=1, dcp=2, layers=(FULL, STATES)),
    "prefill shared out": Shape(pcp=2, layers=(Layers("mla", 2),)),
    "dealt among prefill ranks": Shape(pcp=2, dcp=2, layers=(Layers("mla", 2),)),
    "lookup": Shape(drafts=3),
    "drafts": Shape(drafts=2, drafter="eagle"),
    "drafts in flight": Shape(drafts=2, drafter="eagle", depth=2),
    "drafts and windows": Shape(drafts=2, drafter="mtp", layers=(FULL, WINDOWS)),
    "drafts and states": Shape(drafts=2, layers=(FULL, STATES)),
    "states inside blocks": Shape(
        layers=(replace(FULL, block_tokens=2 * BLOCK), replace(STATES, block_tokens=2 * BLOCK)),
        match_tokens=BLOCK,
    ),
    "three groups of two heads": Shape(ranks=4, kv_heads=2, layers=(FULL, WINDOWS)),
    "three stages": Shape(stages=3, layers=(Layers("full", 3), Layers("mamba", 3))),
}
"""Every kind of engine."""

FAULTS = FaultPlan(
    load_keys=0.1, load_jobs=0.05, store_keys=0.1, store_jobs=0.05, lookups=0.05, publishes=0.05
)
LIFE_STEPS = 250
LAYOUTS = ["LBNHC", "LBHNC", "BLNHC", "BLHNC", "LHBNC", "BHLNC"]

Around = Callable[[IUMBPRuntime], IUMBPRuntime]


@dataclass(frozen=True, slots=True)
class Nature:
    """What a life is like beside its engine's shape."""

    pool: str
    objects: int
    load_s: float = 0.0
    store_s: float = 0.0
    is_faulty: bool = False
    is_mortal: bool = False
    clears: bool = False
    lacks: str = ""
    """A capability that the runtime does not state."""

    @classmethod
    def drawn(cls, random: Random) -> Nature:
        is_slow = random.random() < 0.5
        return cls(
            pool=random.choice(["reference", "reference", "embedded", "standalone"]),
            objects=random.choice([12, 40, 120, 2000]),
            load_s=random.choice([0.5, 1.0, 6.0]) if is_slow else 0.0,
            store_s=random.choice([0.5, 1.5, 6.0]) if is_slow else 0.0,
            is_faulty=random.random() < 0.4,
            is_mortal=random.random() < 0.4,
            clears=random.random() < 0.4,
            lacks=random.choice(["hold", "presence", "watch", "lookup_raw"]) if random.random() < 0.2 else "",
        )


def make_pool(kind: str, objects: int, folder: Path) -> IUMBPRuntime:
    """A pool with room for so many objects."""
    if kind == "reference":
        return ReferenceRuntime(objects)
    if kind == "embedded":
        options = parse_options({"capacity_bytes": objects * 4096, "num_workers": 1})
        return EmbeddedRuntime(options)
    path = pool_path(folder, "p")
    if not Path(path).exists():
        Pool.create(path, objects * 4096, slab_bytes=4096, min_object_bytes=512).close()
    options = parse_options({"mode": "standalone", "pool": "p", "pool_dir": str(folder), "num_workers": 1})
    return StandaloneRuntime(options)


def unchanged(runtime: IUMBPRuntime) -> IUMBPRuntime:
    return runtime


class Life:
    """One engine's life. `random` decides everything, but for a nature that is given."""

    def __init__(
        self,
        random: Random,
        name: str,
        root: Path,
        folder: Path,
        around: Around = unchanged,
        nature: Nature | None = None,
    ) -> None:
        self.random = random
        self.name = name
        self.counts: Counter[str] = Counter()
        self.clock = TickClock()
        self._folder = folder
        self._borrowed: list[KVCacheBlock] = []
        self._sessions: dict[str, Request] = {}
        self._ended: set[str] = set()
        self._ids = itertools.count()
        self.nature = nature or Nature.drawn(random)
        self._build(root, folder, around)

    def _build(self, root: Path, folder: Path, around: Around) -> None:
        random, nature = self.random, self.nature
        self.pool = WatchedRuntime(make_pool(nature.pool, nature.objects, folder))
        runtime: Any = around(EagerRuntime(self.pool))
        if nature.load_s or nature.store_s:
            runtime = slowly(runtime, self.clock, load=nature.load_s, store=nature.store_s)
        runtime = self.backend = MortalRuntime(runtime)
        if nature.lacks:
            plain(runtime, **{nature.lacks: False})
        if nature.is_faulty:
            runtime = FaultyRuntime(runtime, replace(FAULTS, seed=random.randrange(1000)))
        self._table_key = f"machine {id(self)}"
        scripted_runtime.TABLE[self._table_key] = runtime
        self.shape = self._drawn_shape()
        self.engine = ScriptedEngine(root, self.shape)
        self.engine.between = self._in_the_middle
        self._count_admissions()
        use_clock(self.engine, self.clock)

    def _count_admissions(self) -> None:
        """Note how many tokens the engine wants of what it was promised."""
        connector = self.engine.connector
        admit = connector.update_state_after_alloc

        def counted(request: Request, blocks: Any, external_tokens: int) -> None:
            self.counts["admitted_tokens"] += external_tokens
            admit(request, blocks, external_tokens)

        connector.update_state_after_alloc = counted  # type: ignore[method-assign]

    def _drawn_shape(self) -> Shape:
        random, shape = self.random, SHAPES[self.name]
        in_flight = shape.depth > 1 or shape.stages > 1
        options = {
            "load_async": in_flight or random.random() < 0.6,
            "save_decode_cache": random.random() < 0.5,
            "write_policy": random.choice(["through", "through", "lazy"]),
            "timeout_ms": random.choice([30_000, 2_000]),
        }
        # Only these lay a block of a state, or of other sizes, out as one run.
        layouts = ["LBNHC"] if len(shape.layers) > 1 or self.nature.pool == "reference" else LAYOUTS
        return replace(
            shape,
            blocks=smallest_pool(shape) + random.choice([2, 8, 30]),
            max_batched_tokens=random.choice([24, 40, 64, 200]),
            prefix_caching=shape.has_state or random.random() < 0.85,
            # By priority vLLM takes back what it has just given out, and forgets what it has cached of it.
            order="fcfs" if shape.match_tokens else random.choice(["fcfs", "fcfs", "priority"]),
            role=random.choice(["kv_both"] * 6 + ["kv_producer", "kv_consumer"]),
            policy=random.choice(["recompute"] * 6 + ["fail"]),
            layout=random.choice(layouts),
            tells_events=random.random() < 0.3,
            extra={"mode": scripted_runtime.MODE, "plugin_options": {"runtime": self._table_key}} | options,
        )

    def __str__(self) -> str:
        return f"{self.name}: {self.nature}, {self.shape}"

    def close(self) -> None:
        self.engine.close()
        scripted_runtime.TABLE.pop(self._table_key, None)

    # A step

    def step(self) -> None:
        self.clock.advance(self.random.choice([0.0, 0.3, 1.0]))
        for _ in range(self.random.choice([0, 1, 1, 2])):
            self.act()
        self.engine.step()
        self.pool.audit()

    def act(self) -> None:
        """One thing that may happen; nothing, where what was drawn can't happen now."""
        (what,) = self.random.choices(list(ACTS), list(ACTS.values()))
        before = self.counts[what]
        getattr(self, f"_{what}")()
        if self.counts[what] == before:
            self.counts[what] += 1

    def _in_the_middle(self) -> None:
        """What arrives between a step's forward and its results."""
        if self.random.random() < 0.04:
            self._abort()

    # What users do

    def prompt(self) -> list[int]:
        """Families share their beginnings; ends lie on block borders as often as not."""
        random = self.random
        family = random.randrange(3)
        shared = random.choice([0, BLOCK, 4 * BLOCK, 6 * BLOCK])
        tail = random.choice([1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, random.randint(1, 90)])
        ending = random.randrange(4)
        return [(family * 101 + i * 7) % 900 + 3 for i in range(shared)] + [
            (family * 13 + ending * 57 + i * 11) % 900 + 3 for i in range(tail)
        ]

    def _admit(self) -> None:
        random = self.random
        if len(self.live()) >= 7:
            return
        self.engine.add(
            self.prompt(),
            random.randint(1, 30),
            salt=random.choice([None, None, None, "a", "b"]),
            reads_cache=random.random() < 0.9,
            priority=random.randrange(3),
        )

    def _abort(self) -> None:
        if live := self.live():
            self.engine.abort(self.random.choice(live).request_id)

    def _abort_all(self) -> None:
        self.engine.abort(*[request.request_id for request in self.live()])

    def _begin_session(self) -> None:
        # With steps in flight vLLM loses the tokens of a session that is preempted as its turn ends.
        if self.shape.drafts or self.shape.depth * self.shape.stages > 1 or len(self.live()) >= 7:
            return
        request = self.engine.add(
            self.prompt()[:90], self.random.randint(1, 8), request_id=f"s{next(self._ids)}", resumable=True
        )
        self._sessions[request.request_id] = request

    def _continue_session(self) -> None:
        """The next input of a session, or its end."""
        sessions = self._open_sessions()
        if not sessions:
            return
        session = self.random.choice(sessions)
        may_grow = session.num_tokens < 120 and not session.streaming_queue
        self._feed(session, self.prompt()[:40] if may_grow and self.random.random() < 0.7 else None)

    def _feed(self, session: Request, more: list[int] | None) -> None:
        if more is None:
            self._ended.add(session.request_id)
        self.engine.add(
            more or [1],
            self.random.randint(1, 8),
            request_id=session.request_id,
            resumable=more is not None,
        )

    def _open_sessions(self) -> list[Request]:
        return [
            one
            for one in self._sessions.values()
            if not one.is_finished() and one.request_id not in self._ended
        ]

    # What an operator does

    def _reset(self) -> None:
        """The engine's own cache is emptied, with whatever runs."""
        if self._can_preempt_all():
            self.engine.scheduler.reset_prefix_cache(reset_running_requests=self.random.random() < 0.5)

    def _clear(self) -> None:
        if self.nature.clears:
            self.engine.scheduler.reset_prefix_cache(reset_connector=True)

    def _change_weights(self) -> None:
        if self.nature.clears and self._can_preempt_all():
            self.engine.change_weights()

    # What goes wrong

    def _land(self) -> None:
        self.engine.land()

    def _borrow(self) -> None:
        """Others take blocks, so that allocation fails and requests are preempted."""
        if self._borrowed:
            self._give_back()
            return
        free = self.engine.pool.get_num_free_blocks()
        self._borrowed = self.engine.pool.get_new_blocks(self.random.randint(0, free))

    def _give_back(self) -> None:
        self.engine.pool.free_blocks(self._borrowed)
        self._borrowed = []

    def _kill(self) -> None:
        if not self.nature.is_mortal:
            return
        if self.backend.is_dead:
            self.backend.revive()
        elif self.random.random() < 0.4:
            self.backend.kill()
        elif self.random.random() < 0.3:
            self.backend.kill_scheduler()
        else:
            self.backend.kill_rank(self.random.choice(self.backend.ranks))

    def _destroy(self) -> None:
        """Somebody destroys the pool's file; it does not come back."""
        if self.nature.is_mortal and self.nature.pool == "standalone":
            with contextlib.suppress(UMBPError), Pool.attach(pool_path(self._folder, "p")) as pool:
                pool.destroy()

    def _evict(self) -> None:
        """The pool loses some of what nobody holds."""
        inner = self.pool._inner
        if isinstance(inner, ReferenceRuntime):
            held = inner.shelf.held_keys()
            free = [key for key in inner.shelf.objects if key not in held]
            for key in self.random.sample(free, min(len(free), self.random.randint(1, 12))):
                inner.shelf.remove(key)

    # The end

    def drain(self) -> None:
        for session in self._open_sessions():
            self._feed(session, None)
        self._give_back()
        self.clock.advance(10)
        self.engine.between = lambda: self.clock.advance(1)
        self.engine.drain(limit=2000)
        self._sweep()

    def _sweep(self) -> None:
        """Ask for what was served once more, now that only the pool has it."""
        self.backend.revive()
        self.engine.scheduler.reset_prefix_cache()
        served = [one for one in self.engine.finished.values() if one.num_tokens < 240]
        for one in self.random.sample(served, min(len(served), 8)):
            self.engine.add(list(one.all_token_ids), salt=one.cache_salt)
        self.engine.drain(limit=2000)

    def check(self) -> None:
        """After the drain: what runtimes and engine have is what they should have."""
        self.engine.check_drained()
        may_leave = self.nature.is_faulty or self.nature.is_mortal
        self.pool.check_unpinned(is_reserved=may_leave)
        if self.shape.tells_events and not self.nature.is_mortal:
            self._check_events()
        for request in self.engine.finished.values():
            self._check_end(request)
        self._check_counters()

    def _check_counters(self) -> None:
        """Whatever was admitted has been loaded or has failed, once."""
        count = self.engine.count
        ended = count("loaded_tokens") + count("reloaded_tokens") + count("failed_load_tokens")
        assert ended == self.counts["admitted_tokens"]
        assert count("hit_tokens") <= self.counts["admitted_tokens"]

    def _check_end(self, request: Request) -> None:
        if request.status == RequestStatus.FINISHED_ERROR:
            assert self.shape.policy == "fail"
        elif request.status != RequestStatus.FINISHED_ABORTED and request.request_id not in self._sessions:
            assert request.num_output_tokens == request.max_tokens

    def _check_events(self) -> None:
        """Replayed, the events are what every rank has."""
        side = self.engine.connector.scheduler_side
        if side._events is None:
            return
        self.engine.step()
        told = {
            (group_id, block_hash) for group_id, hashes in side._events._told.items() for block_hash in hashes
        }
        assert len(told) == len(self.engine.events.stored)
        for group_id, block_hash in told:
            assert (group_id, compat.outside_hash(block_hash)) in self.engine.events.stored
            assert self._is_loadable(group_id, block_hash), "it is told, and can't be loaded"
        if isinstance(inner := self.pool._inner, ReferenceRuntime):
            names = [key.rpartition(":") for key in inner.shelf.objects]
            kept = {(int(head.rpartition(":g")[2]), bytes.fromhex(digest)) for head, _, digest in names}
            assert told == {one for one in kept if self._is_loadable(*one)}, "what can be loaded isn't told"

    def _is_loadable(self, group_id: int, block_hash: bytes) -> bool:
        """By the pool's own word, which no fault stands before."""
        handles = [handle for handle in self.pool.handles if hasattr(handle, "present_raw")]
        stages = self.engine.connector.scheduler_side._pool._stages
        return all(
            handle.present_raw(group_id, [block_hash])[0]
            for handle, stage in zip(handles, stages, strict=True)
            if stage.keeps(group_id)
        )

    # Inside

    def live(self) -> list[Request]:
        return [one for one in self.engine.scheduler.requests.values() if not one.is_finished()]

    def _can_preempt_all(self) -> bool:
        """vLLM takes blocks away from running requests only: not from a load, nor from one that waits to run
        after its load, nor from a store.
        """
        scheduler = self.engine.scheduler
        holders = [
            request
            for request in scheduler.requests.values()
            if any(scheduler.kv_cache_manager.get_block_ids(request.request_id))
        ]
        return all(request.status == RequestStatus.RUNNING for request in holders) and not (
            self.engine.connector.has_pending_push_work() or self.engine.is_in_flight or self._borrowed
        )


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
    "kill": 5,
    "destroy": 0.15,
    "evict": 5,
}
"""What may happen, and how often."""


def smallest_pool(shape: Shape) -> int:
    """Blocks that a request of full length needs, and the null block."""
    groups = {"full": 16, "mla": 16, "sliding": 16, "chunked": 16, "mamba": 3 + shape.drafts}
    rarest = min(each.count for each in shape.layers)
    need = sum(-(-each.count // rarest) * groups[each.kind] for each in shape.layers)
    return need + (2 if shape.drafts else 0) + 2


def use_clock(engine: ScriptedEngine, clock: TickClock) -> None:
    """The connector's time is the machine's, so that a life is the same in every run."""
    side: Any = engine.connector.scheduler_side
    side._clock = side._quarantine._clock = clock
    for rank in engine.ranks:
        assert rank.connector is not None
        worker: Any = rank.connector.worker_side
        worker._clock = clock
        worker._nap = lambda seconds: None


class LifeError(AssertionError):
    """A life went wrong."""

    def __init__(self, seed: int, life: int, steps: int, at: int, story: str) -> None:
        super().__init__(f"seed {seed}, life {life}, step {at}: {story}")
        self.life = life
        self.replay = f"make soak STEPS={steps} SEED={seed} LIFE={life}"


@contextlib.contextmanager
def one_life(random: Random, name: str, root: Path, around: Around = unchanged) -> Iterator[Life]:
    """A life of one shape; `around` gives its pool's runtime other properties."""
    with lives_together(random, name, root, 1, around) as (life,):
        yield life


@contextlib.contextmanager
def lives_together(
    random: Random, name: str, root: Path, count: int, around: Around = unchanged
) -> Iterator[list[Life]]:
    """Lives of one shape; several share one pool, which none of them clears or destroys."""
    folder = Path(tempfile.mkdtemp(prefix="umbp-machine-", dir="/dev/shm"))
    lives: list[Life] = []
    try:
        for _ in range(count):
            nature = Nature.drawn(random)
            if count > 1:
                nature = replace(nature, pool="standalone", clears=False, is_mortal=False, is_faulty=False)
            lives.append(Life(random, name, root, folder, around, nature))
        yield lives
    finally:
        for life in lives:
            life.close()
        shutil.rmtree(folder)


def live(
    seed: int,
    steps: int,
    root: Path,
    *,
    first: int = 0,
    around: Around = unchanged,
    say: Callable[[str], None] = lambda text: None,
) -> Counter[str]:
    """So many steps of lives of all shapes in turn, each drawn from the seed and its number; returns what
    happened how often. `LifeError` tells of the first that goes wrong.
    """
    told: Counter[str] = Counter()
    done = 0
    for number in itertools.count(first):
        if done >= steps:
            break
        turn, place = divmod(number, len(SHAPES))
        name = list(SHAPES)[place]
        at, life_steps = 0, min(LIFE_STEPS, steps - done)
        random = Random(f"{seed} {number}")
        try:
            with lives_together(random, name, root, 2 if turn % 4 == 3 else 1, around) as lives:
                for at in range(life_steps):  # noqa: B007
                    random.choice(lives).step()
                for life in lives:
                    life.drain()
                for life in lives:
                    life.check()
                    told.update(life.counts)
                    told.update({what: int(count) for what, count in life.engine.stats.counters.items()})
        except Exception as error:
            raise LifeError(seed, number, life_steps, at, f"{type(error).__name__}: {error}") from error
        done += at + 1
        say(f"{done} steps, {number - first + 1} lives, the last one of {name!r}")
    return told
