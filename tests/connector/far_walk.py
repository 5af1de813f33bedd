"""Random walks through lives of engines whose pools have a cluster store behind them, which goes down, hangs,
loses, damages and claims objects meanwhile.

What the store's threads do meets the engine's steps as the machine has it: a seed draws the same acts again,
and not always the same life.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from engine_checks import check_drained
from engine_choices import Nature, drawn_shape
from engine_life import Around, EngineLife, counters, unchanged
from engine_shapes import SHAPES
from random_walk import ACTS, Walk, walk_shapes

from umbp.options import Options, parse_options
from umbp.pool import Pool
from umbp.pool.sharing import pool_path
from umbp.runtime.base import IUMBPRuntime
from umbp.runtime.distributed import DistributedRuntime
from umbp.runtime.far.worker import WorkerFar
from umbp.runtime.pool_worker import PoolWorkerHandle
from umbp.store.base import ClusterStore
from umbp.store.gate import Backoff, StoreGate
from umbp.testing.engine import Shape, tokens
from umbp.testing.runtimes import MortalRuntime, PickyRuntime
from umbp.testing.stores.memory import MemoryCluster

LIFE_STEPS = 200
MUCH_ROOM = 200
"""Objects; some lives have less than a request needs."""
VERBS = ("exists", "get", "put")
WELL_S = 60.0
"""A store that works again and isn't found well in this time never will be."""
PATIENT_MS = 60_000
"""A step that waited for so long was no step that doesn't wait."""

FAR_ACTS = {
    **{act: often for act, often in ACTS.items() if act not in ("kill", "destroy", "evict")},
    "ask_again": 25,
    "go_down": 4,
    "hang": 6,
    "damage": 5,
    "claim": 4,
    "lose": 5,
    "let_probe": 2,
}


class QuickNode(DistributedRuntime):
    """One engine's runtime, which asks a store that failed again very soon."""

    def __init__(self, cluster: MemoryCluster, options: Options) -> None:
        self._cluster = cluster

        def connect(options: Options, *, serves_memory: bool) -> ClusterStore:
            return cluster.connect()

        super().__init__(options, connect)

    def _open_gate(self, *, serves_memory: bool, before_return: Callable[[ClusterStore], bool]) -> StoreGate:
        gate = StoreGate(
            "memory",
            self._cluster.connect,
            before_return=before_return,
            backoff=Backoff(first_s=0.005, most_s=0.02),
        )
        gate.open(WELL_S)
        return gate


class FarLife(EngineLife):
    """One engine's life with a store behind its pool."""

    def __init__(
        self,
        nature: Nature,
        shape: Shape,
        root: Path,
        folder: Path,
        cluster: MemoryCluster,
        options: dict[str, object],
        around: Around = unchanged,
    ) -> None:
        self.cluster = cluster
        self.is_patient = options["timeout_ms"] == PATIENT_MS
        self._far_options = options
        super().__init__(nature, shape, root, folder, around)
        for rank in self.engine.ranks:
            assert rank.connector is not None
            worker: Any = rank.connector.worker_side
            worker._nap = time.sleep

    def _make_pool(self) -> IUMBPRuntime:
        options: dict[str, object] = {"mode": "distributed", "store": "memory", "num_workers": 1}
        size = self.nature.objects * 4096
        if self.nature.is_shared:
            path = pool_path(self._folder, "p")
            if not Path(path).exists():
                Pool.create(path, size, slab_bytes=4096, min_object_bytes=512).close()
            options |= {"pool": "p", "pool_dir": str(self._folder)}
        else:
            options |= {"capacity_bytes": size}
        return QuickNode(self.cluster, parse_options(options | self._far_options))

    def _runtime(self, around: Around) -> IUMBPRuntime:
        self.backend = MortalRuntime(PickyRuntime(around(self.pool), self._is_lost))
        return self.backend

    def fars(self) -> list[WorkerFar]:
        workers = [one for one in self.pool.handles if isinstance(one, PoolWorkerHandle)]
        return [one.far for one in workers if isinstance(one.far, WorkerFar)]

    def gates(self) -> list[StoreGate]:
        schedulers = [one for one in self.pool.handles if not isinstance(one, PoolWorkerHandle)]
        return [one._gate for one in (*schedulers, *self.fars())]

    def check(self) -> None:
        """At any time."""
        self.engine.connector.scheduler_side.audit()
        for rank, reports in enumerate(self.engine.reports):
            assert reports <= self.engine.loads, f"rank {rank} reported {reports} of {self.engine.loads}"
        for gate in self.gates():
            gate.audit()
            assert not (self.is_patient and gate.counts().timeouts), "a step has waited for the store"

    def wait_well(self) -> None:
        """The store works again: return when everybody knows, and what was to be sent is there."""
        until_s = time.monotonic() + WELL_S

        def is_quiet(gate: StoreGate) -> bool:
            counts = gate.counts()
            return gate.is_well and not (counts.running or counts.waiting or counts.held_stores)

        while not all(map(is_quiet, self.gates())):
            assert time.monotonic() < until_s, f"not well: {self.gates()}"
            time.sleep(0.002)
        for far in self.fars():
            assert far.flush(WELL_S), "what waits to be sent never goes out"


class FarWalk(Walk):
    """One life, and what happens to the store."""

    acts = FAR_ACTS
    life: FarLife

    def check(self) -> None:
        self.life.check()

    def _ask_again(self) -> bool:
        """For what the engine's own cache has no more, and a small pool neither."""
        if not self.life.may_admit() or not (served := self.life.served()):
            return False
        self._reset()
        self.life.ask_again(self.random.choice(served), self.random.randint(1, 4))
        return True

    def _clear(self) -> bool:
        # A clear waits for the store, and is the one thing that does.
        return not self._is_ill() and super()._clear()

    def _change_weights(self) -> bool:
        return not self._is_ill() and super()._change_weights()

    def _is_ill(self) -> bool:
        return self.life.cluster.is_down or bool(self.life.cluster._hanging_verbs)

    def _go_down(self) -> bool:
        self.life.cluster.is_down = not self.life.cluster.is_down
        return True

    def _hang(self) -> bool:
        if self.life.cluster._hanging_verbs:
            self.life.cluster.go_on()
        else:
            self.life.cluster.hang(*self.random.sample(VERBS, self.random.randint(1, 3)))
        return True

    def _some(self) -> list[str]:
        keys = list(self.life.cluster.objects)
        return self.random.sample(keys, min(len(keys), self.random.randint(1, 6)))

    def _damage(self) -> bool:
        for key in (some := self._some()):
            with contextlib.suppress(KeyError):
                self.random.choice([self.life.cluster.damage, self.life.cluster.cut])(key)
        return bool(some)

    def _claim(self) -> bool:
        """It says that it has what it has not."""
        for key in (some := self._some()):
            self.life.cluster.claimed.add(key)
            self.life.cluster.objects.pop(key, None)
        return bool(some)

    def _lose(self) -> bool:
        for key in (some := self._some()):
            self.life.cluster.objects.pop(key, None)
        return bool(some)

    def _let_probe(self) -> bool:
        """The breaker's pause passes."""
        time.sleep(0.03)
        return True


def mend(cluster: MemoryCluster) -> None:
    """All is well from now on."""
    cluster.is_down = False
    cluster.claimed.clear()
    cluster.go_on()


def far_options(random: Random, *, waits: bool) -> dict[str, object]:
    """`waits`: the engine's loads are within its steps."""
    is_patient = not waits and random.random() < 0.5
    timeout_ms = PATIENT_MS if is_patient else random.choice([20, 100])
    return {
        "timeout_ms": timeout_ms,
        "lookup_timeout_ms": timeout_ms,
        "lookup_async": is_patient or random.random() < 0.7,
    }


@contextlib.contextmanager
def far_walks(random: Random, name: str, root: Path, count: int) -> Iterator[list[FarWalk]]:
    """Through lives of engines of one shape on one cluster; those that share a pool share one."""
    folder = Path(tempfile.mkdtemp(prefix="umbp-walk-", dir="/dev/shm"))
    cluster = MemoryCluster(room_bytes=random.choice([1 << 30, 1 << 18]))
    walks: list[FarWalk] = []
    shape = None
    try:
        for _ in range(count):
            nature = replace(
                Nature.drawn(random),
                pool=random.choice(["embedded", "standalone"]),
                objects=random.choice([MUCH_ROOM, 40, 24, 12]),
                load_s=0.0,
                store_s=0.0,
                is_faulty=False,
                is_mortal=False,
                lacks="",
            )
            if count > 1:
                nature = replace(nature, clears=False)
            own = drawn_shape(random, name, nature)
            shape = own if shape is None else replace(own, layout=shape.layout)
            options = far_options(random, waits=not shape.extra["load_async"])
            walks.append(FarWalk(random, FarLife(nature, shape, root, folder, cluster, options)))
        yield walks
        assert not cluster.misuses, cluster.misuses
    finally:
        mend(cluster)
        for walk in walks:
            walk.life.close()
        shutil.rmtree(folder)


def end_far(walks: list[FarWalk], root: Path) -> None:
    """All is well again: everybody is served, nothing is left, and what is stored is found."""
    cluster = walks[0].life.cluster
    mend(cluster)
    for walk in walks:
        walk.life.wait_well()
        walk.end()
    for walk in walks:
        walk.life.wait_well()
    for walk in walks:
        walk.life.check()
        check_drained(walk.life)
    for walk in walks:
        _check_found_again(walk, root)


def _check_found_again(walk: FarWalk, root: Path) -> None:
    """By an engine whose own pool is empty, of what this one stores now."""
    life = walk.life
    has_other_weights = bool(walk.done["change_weights"])
    if life.shape.role != "kv_both" or not life.shape.prefix_caching or has_other_weights:
        return
    if life.shape.policy == "fail":
        # What a pool of a few slots has no room to fetch ends the request.
        return
    cluster = life.cluster
    life.cluster.room_bytes = 1 << 30
    # No other tokens are these: what the store had of any was perhaps damaged.
    prompt = tokens(113, seed=walk.random.randrange(1 << 30))
    dropped_before = counters(life)["dropped_send_objects"]
    life.engine.run(prompt, 20)
    life.wait_well()
    before = life.engine.restored_tokens()
    life.engine.forget_prefixes()
    life.engine.run(prompt, 20)
    is_near = life.engine.restored_tokens() > before
    nature = replace(life.nature, pool="embedded", objects=2000, clears=False)
    options: dict[str, object] = {"timeout_ms": PATIENT_MS, "lookup_timeout_ms": PATIENT_MS}
    fresh = FarLife(nature, life.shape, root, life._folder, cluster, options)
    try:
        fresh.engine.run(tokens(1))  # prefill ranks tell of their pools with their first step
        fresh.engine.run(prompt, 20)
        has_room = life.nature.objects >= MUCH_ROOM  # a small pool evicts what has not been sent
        # A machine with much to do may need longer than some lives' stores are waited for.
        is_sent = counters(life)["dropped_send_objects"] == dropped_before
        if has_room and is_near and is_sent and life.shape.extra["write_policy"] == "through":
            assert fresh.engine.restored_tokens() > 0, "what was stored is not found again"
    finally:
        fresh.close()


def walk_far_lives(
    seed: int, steps: int, root: Path, *, first: int = 0, say: Callable[[str], None] = lambda text: None
) -> Counter[str]:
    """See `walk_shapes`."""

    def live(random: Random, name: str, number: int, steps: int, told: Counter[str]) -> Iterator[int]:
        count = 1 + (number + number // len(SHAPES)) % 2
        with far_walks(random, name, root, count) as walks:
            for at in range(steps):
                yield at
                random.choice(walks).step()
            end_far(walks, root)
            for walk in walks:
                told.update(walk.done)
                told.update(counters(walk.life))

    return walk_shapes(
        live, seed, steps, steps_each=LIFE_STEPS, kind="far ", what="FAR=1 ", first=first, say=say
    )
