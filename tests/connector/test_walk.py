"""A random walk: all that may happen to an engine, in any order, with every byte checked at each step.

`STEPS`, `SEED` and `WALKS` in the environment make it longer, repeat one or take more. A failure prints its
seed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from scripted import BLOCK, ScriptedEngine
from scripted_runtime import WatchedRuntime, slowly
from vllm.v1.request import Request, RequestStatus

from umbp.runtime.wrap.faulty import FaultPlan, FaultyRuntime
from umbp.testing.clock import TickClock

STEPS = int(os.environ.get("STEPS", "120"))
FIRST_SEED = int(os.environ.get("SEED", "1"))
WALKS = int(os.environ.get("WALKS", "1" if "SEED" in os.environ else "16"))

FAULTS = FaultPlan(
    load_keys=0.1, load_jobs=0.05, store_keys=0.1, store_jobs=0.05, lookups=0.05, publishes=0.05
)


class Walk:
    """One engine's life, drawn from one seed."""

    def __init__(
        self,
        seed: int,
        make_pool: Callable[..., WatchedRuntime],
        make_engine: Callable[..., ScriptedEngine],
        *,
        is_faulty: bool,
        may_clear: bool = True,
    ) -> None:
        self.random = random = Random(seed)
        self.is_faulty = is_faulty
        self.is_slow = random.random() < 0.5
        self.clears = random.random() < 0.4 and may_clear
        self.clock = TickClock()
        self.capacity = random.choice([6, 24, 60, 1000])
        self.pool = make_pool(self.capacity)
        runtime: Any = self.pool
        if self.is_slow:
            runtime = slowly(runtime, self.clock, load=1.0, store=1.5)
        if is_faulty:
            runtime = FaultyRuntime(runtime, FAULTS)
        depth = random.choice([1, 1, 2])
        load_async = random.random() < 0.6 or depth == 2
        self.engine = make_engine(
            runtime,
            {
                "load_async": load_async,
                "save_decode_cache": random.random() < 0.5,
                "write_policy": random.choice(["through", "lazy"]),
            },
            depth=depth,
            ranks=random.choice([1, 2]),
            blocks=random.choice([20, 28, 48]),
            prefix_caching=random.random() < 0.8,
            max_batched_tokens=random.choice([BLOCK, 40, 64, 200]),
        )
        self.engine.between = self.in_the_middle
        self.requests: list[Request] = []
        self.counts = dict.fromkeys(("added", "aborted", "cleared", "weights"), 0)

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

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.drain()
        self.check()

    def step(self) -> None:
        self.clock.advance(self.random.choice([0.0, 0.3, 1.0]))
        self.act()
        self.engine.step()

    def drain(self) -> None:
        self.clock.advance(10)
        self.engine.between = lambda: self.clock.advance(1)
        self.engine.drain(limit=2000)

    def act(self) -> None:
        random = self.random
        live = self.live()
        if len(live) < 7 and random.random() < 0.6:
            salt = random.choice([None, None, None, "a", "b"])
            request = self.engine.add(
                self.prompt(), random.randint(1, 24), salt=salt, reads_cache=random.random() < 0.9
            )
            self.requests.append(request)
            self.counts["added"] += 1
        if live and random.random() < 0.06:
            self.abort(random.choice(live))
        if random.random() < 0.1:
            self.engine.land()
        if random.random() < 0.1 and self.can_preempt_all():
            self.engine.scheduler.reset_prefix_cache(reset_running_requests=random.random() < 0.5)
        if self.clears and random.random() < 0.02:
            self.counts["cleared"] += 1
            self.engine.scheduler.reset_prefix_cache(reset_connector=True)
        if self.clears and random.random() < 0.03 and self.can_preempt_all():
            self.counts["weights"] += self.engine.change_weights()

    def in_the_middle(self) -> None:
        live = self.live()
        if live and self.random.random() < 0.04:
            self.abort(self.random.choice(live))

    def live(self) -> list[Request]:
        self.requests = [request for request in self.requests if not request.is_finished()]
        return self.requests

    def abort(self, request: Request) -> None:
        self.counts["aborted"] += 1
        self.engine.abort(request.request_id)

    def can_preempt_all(self) -> bool:
        """vLLM takes blocks away from running requests only: not from a load, nor from one that waits to run
        after its load, nor from a store."""
        scheduler = self.engine.scheduler
        holders = [
            request
            for request in scheduler.requests.values()
            if any(scheduler.kv_cache_manager.get_block_ids(request.request_id))
        ]
        return all(request.status == RequestStatus.RUNNING for request in holders) and not (
            self.engine.connector.has_pending_push_work() or self.engine.is_in_flight
        )

    def check(self) -> None:
        engine = self.engine
        engine.check_drained()
        self.pool.check_unpinned(is_reserved=self.is_faulty)
        for request in engine.finished.values():
            if request.status != RequestStatus.FINISHED_ABORTED:
                assert request.num_output_tokens == request.max_tokens
        if not self.is_faulty and not self.counts["cleared"] and not self.counts["weights"]:
            assert engine.invalid_blocks == []
            assert engine.count("failed_load_tokens") == 0


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + WALKS))
@pytest.mark.parametrize("is_faulty", [False, True], ids=["healthy", "faulty"])
def test_any_order_of_events_leaves_every_byte_right_and_every_account_even(
    make_pool: Any, make_engine: Any, seed: int, is_faulty: bool
) -> None:
    print(f"SEED={seed} STEPS={STEPS}")
    walk = Walk(seed, make_pool, make_engine, is_faulty=is_faulty)
    print(walk.engine.shape, f"slow={walk.is_slow}", f"capacity={walk.capacity}")
    walk.run(STEPS)
    print(walk.counts, walk.engine.stats.counters)


@pytest.mark.parametrize("seed", range(FIRST_SEED, FIRST_SEED + WALKS))
def test_two_engines_on_one_pool_never_see_a_wrong_byte_of_each_other(
    shared_pool: Any, make_engine: Any, seed: int
) -> None:
    print(f"SEED={seed} STEPS={STEPS}")
    order = Random(seed)
    capacity = order.choice([6, 24, 60, 1000])
    walks = [
        Walk(
            seed + 1000 * number,
            lambda _: shared_pool(capacity, "both"),
            make_engine,
            is_faulty=False,
            may_clear=False,
        )
        for number in (1, 2)
    ]
    for walk in walks:
        print(walk.engine.shape, f"slow={walk.is_slow}", f"capacity={capacity}")
    for _ in range(2 * STEPS):
        order.choice(walks).step()
    for walk in walks:
        walk.drain()
    for walk in walks:
        walk.check()
