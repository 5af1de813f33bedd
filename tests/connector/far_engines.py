"""Scripted engines on a real Mooncake Store, and how long each of their steps kept its thread waiting."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.v1.request import Request

from umbp.runtime.pool_worker import PoolWorkerHandle
from umbp.store.gate import StoreGate
from umbp.testing.engine import BLOCK, ScriptedEngine, Shape, tokens
from umbp.testing.stores.servers import MooncakeCluster

NODE_BYTES = 32 << 20
PROMPT = 10 * BLOCK + 3
LOOKUP_S = 0.2
"""How long a step may wait for an answer where the answers are waited for."""
LONG_LOOKUP_S = 2.0
"""Where they are not: any step that waits for one would show."""
SLACK_S = 1.0
"""Steps also wait for the interpreter's lock, on a machine that may be busy: milliseconds as a rule. A step
that waited for a silent store would take `LONG_LOOKUP_S`, or the store's own 1.5 s."""
PATIENCE_S = 60.0
FORWARD_S = 0.002
"""What a step's forward would take: an engine whose requests wait for loads doesn't step without end."""


class TimedEngine(ScriptedEngine):
    """Notes of each step how long its thread waited: for another thread, a lock, a clock, or the world. That
    it had to wait for a processor doesn't count.
    """

    def __init__(self, root: Path, shape: Shape) -> None:
        super().__init__(root, shape)
        self.waits_s: list[float] = []

    def step(self) -> Any:
        begun_s, worked_s = time.monotonic(), _busy_s()
        output = super().step()
        self.waits_s.append(max(time.monotonic() - begun_s - (_busy_s() - worked_s), 0.0))
        return output

    def serve(self, prompt: Sequence[int], max_tokens: int = 2) -> Request:
        """Serve one prompt to its end, whatever its loads wait for, and drain."""
        request = self.add(prompt, max_tokens)
        self.step_until(lambda: not self.scheduler.has_requests() and not self.is_in_flight)
        assert request.request_id in self.finished
        return request

    def restores(self, prompt: Sequence[int]) -> int:
        """Serve a prompt; how many of its tokens were restored."""
        before = self.restored_tokens()
        self.serve(prompt)
        return self.restored_tokens() - before

    def step_until(self, is_reached: Callable[[], bool]) -> None:
        until_s = time.monotonic() + PATIENCE_S
        forward = threading.Event()
        while not is_reached():
            assert time.monotonic() < until_s, f"still busy: {self.scheduler.requests}"
            self.step()
            forward.wait(FORWARD_S)

    def flush(self) -> None:
        """Wait until what was stored has gone out, or was given up."""
        for worker in self.workers:
            assert worker.far is not None
            assert worker.far.flush(PATIENCE_S)

    @property
    def workers(self) -> list[PoolWorkerHandle]:
        handles = []
        for rank in self.ranks:
            assert rank.connector is not None
            handles.append(rank.connector.worker_side._handle)
        return handles

    @property
    def gates(self) -> list[StoreGate]:
        """The workers', one each."""
        return [worker.far._gate for worker in self.workers]  # type: ignore[union-attr]

    @property
    def lookup_gate(self) -> StoreGate:
        (stage,) = self.connector.scheduler_side._pool._stages
        gate = stage.handle._gate
        assert isinstance(gate, StoreGate)
        return gate

    def check_even(self) -> None:
        """Nothing is open, pinned or reserved, and the pools prove their invariants."""
        self.check_drained()
        self.flush()
        for worker in self.workers:
            found = worker._keeper.current()
            assert found is not None
            assert found[0].stats()["pinned"] == 0
            worker.audit()


def far_shape(master: str, options: dict[str, object] | None = None, **shape: Any) -> Shape:
    """An engine of the real mode, on the real store."""
    extra: dict[str, object] = {
        "mode": "distributed",
        "store": "mooncake",
        "store_options": {"master": master},
        "capacity_bytes": "4MiB",
        "min_load_tokens": 0,
    }
    return Shape(extra=extra | (options or {}), **shape)


@dataclass(slots=True)
class Lab:
    """One cluster, one engine that stores, and two that restore: one asks the store beside its steps, the
    other within them.
    """

    cluster: MooncakeCluster
    first: TimedEngine
    beside: TimedEngine
    within: TimedEngine
    seeds: Iterator[int]

    @property
    def engines(self) -> list[TimedEngine]:
        return [self.first, *self.readers]

    @property
    def readers(self) -> list[TimedEngine]:
        return [self.beside, self.within]

    def new(self) -> list[int]:
        """A prompt that nobody has had."""
        prompt: list[int] = tokens(PROMPT, next(self.seeds))
        return prompt

    def stored(self) -> list[int]:
        """A prompt that only the first engine has had, and the cluster has, if it takes it."""
        prompt = self.new()
        self.first.serve(prompt)
        self.first.flush()
        return prompt

    def check_back(self) -> None:
        """What is stored from now on is soon restored again, by the engines that were there all the time."""
        for engine in self.readers:
            until_s = time.monotonic() + PATIENCE_S
            while engine.restores(self.stored()) != 10 * BLOCK:
                assert time.monotonic() < until_s, "no hit has returned"
        for engine in self.engines:
            engine.check_even()

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """No step waits longer than it may."""
        for engine in self.engines:
            engine.waits_s.clear()
        yield
        for engine in self.engines:
            longest = ", ".join(f"{wait_s * 1000:.1f}" for wait_s in sorted(engine.waits_s)[-3:])
            print(f"of {len(engine.waits_s)} steps these waited longest: {longest} ms")
        assert max(self.beside.waits_s) < SLACK_S
        assert max(self.within.waits_s) < LOOKUP_S + SLACK_S


@contextlib.contextmanager
def make_lab(folder: Path, root: Path) -> Iterator[Lab]:
    """Three engines on a cluster of their own; `root` is where scripted engines have their configurations."""
    cluster = MooncakeCluster(folder, NODE_BYTES)
    common: dict[str, object] = {"timeout_ms": 3000}
    goes_on = {"lookup_async": True, "lookup_timeout_ms": int(LONG_LOOKUP_S * 1000)}
    waits = {"lookup_async": False, "lookup_timeout_ms": int(LOOKUP_S * 1000)}
    engines: list[TimedEngine] = []
    try:
        # One by one, as those that have been made are to be closed.
        engines += (
            TimedEngine(root, far_shape(cluster.address, options))
            for options in (common, common | goes_on, common | waits)
        )
        first, beside, within = engines
        yield Lab(cluster, first, beside, within, itertools.count(1))
    finally:
        for engine in engines:
            engine.close()
        cluster.end()


def _busy_s() -> float:
    """How long this thread has had a processor or waited for one."""
    ran_ns, queued_ns, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return (int(ran_ns) + int(queued_ns)) / 1e9
