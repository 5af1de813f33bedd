"""Random walks through lives of engines of every shape: in whatever order things happen, every byte stays
right and every account even.

A failure names the life; `make soak SEED=n LIFE=n` runs the same one again.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

pytest.importorskip("umbp._native", reason="the native core isn't built")

import vllm
from engine_checks import check_drained
from engine_life import counters
from engine_shapes import SHAPES
from random_walk import ACTS, LIFE_STEPS, LifeError, in_words, one_walk, walk_lives, walks_together

from seeds import seeds
from umbp.data import BlockTransferPlan, RankTopology, TransferJobState
from umbp.runtime.base import IUMBPRuntime, UMBPWorkerHandle
from umbp.runtime.wrap.passing import PassingRuntime, PassingWorkerHandle
from umbp.testing.engine import ScriptedEngine, tokens
from umbp.testing.reference import ReferenceRuntime

SEED = 1
STEPS = 50_000 if vllm.__version__.startswith("0.32") else 10_000


@pytest.mark.parametrize("number", seeds(len(SHAPES), quick=8), ids=list(SHAPES))
def test_a_short_life_of_each_shape_leaves_every_byte_right_and_every_account_even(
    root: Path, number: int
) -> None:
    walk_lives(SEED, 40, root, first=number)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_fifty_thousand_steps_leave_every_byte_right_and_every_account_even(root: Path) -> None:
    told = walk_lives(SEED, STEPS, root)
    print(told)
    for what in ACTS:
        assert told[what], f"{what} never happened"
    for counter in ("hit_tokens", "loaded_tokens", "failed_load_tokens", "stored_tokens"):
        assert told[counter], f"nothing was counted as {counter}"


def test_a_life_is_the_same_whenever_it_is_walked_through(root: Path) -> None:
    def story(number: int) -> list[object]:
        told: list[object] = []
        with one_walk(Random(number), list(SHAPES)[number], root) as walk:
            for _ in range(80):
                walk.step()
                told.append((walk.life.clock.now_s, dict(walk.done), walk.life.engine.reused_tokens))
                told.append({k: v for k, v in counters(walk.life).items() if "seconds" not in k})
        return told

    for number in range(0, len(SHAPES), 6):
        assert story(number) == story(number)


@pytest.mark.slow
def test_lives_are_the_same_in_every_process() -> None:
    """A seed that fails in one process fails in every other, whose strings hash otherwise."""

    def told(hash_seed: str) -> str:
        soak = Path(__file__).with_name("walk_soak.py")
        command = [sys.executable, str(soak), "--steps", "500", "--seed", "5", "--life", "4"]
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return re.sub(r"(in|_seconds':) \d+", "", done.stdout.splitlines()[-1])

    one, other = told("1"), told("2")
    assert "'hit_tokens'" in one
    assert one == other


FEW = ("full", "windows", "states", "stages", "drafts")


@pytest.mark.parametrize("name", FEW)
def test_two_engines_on_one_pool_never_see_a_wrong_byte_of_each_other(root: Path, name: str) -> None:
    random = Random(name)
    with walks_together(random, name, root, 2) as walks:
        for _ in range(100):
            random.choice(walks).step()
        for walk in walks:
            walk.end()
        for walk in walks:
            check_drained(walk.life)


@pytest.mark.parametrize("name", SHAPES)
def test_a_pool_that_has_everything_finds_what_the_engines_own_cache_finds(
    root: Path, options_of: Callable[[IUMBPRuntime], dict[str, object]], name: str
) -> None:
    options = options_of(ReferenceRuntime()) | {"save_decode_cache": True}
    engine = ScriptedEngine(root, replace(SHAPES[name], blocks=250, extra=options))

    def reused(prompt: Sequence[int]) -> int:
        before = engine.reused_tokens
        engine.run(prompt)
        return engine.reused_tokens - before

    for count in (48, 113):
        served = list(engine.run(tokens(count, seed=count), 20).all_token_ids)
        for prompt in (served[:count], served, served[:-3] + [7] * 9):
            reused(prompt)
            engine.forget_prefixes()
            restored = reused(prompt)
            assert restored == reused(prompt)
    engine.check_drained()
    engine.close()


# What the walk is for: it finds runtimes that break their contract


class EmptyHandedWorker(PassingWorkerHandle):
    """Says that loads are complete, and has copied nothing."""

    def load(self, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        return completed(plans)


class HastyLoader(PassingWorkerHandle):
    """Says that loads are complete, and copies when it is asked for the next."""

    def __init__(self, inner: UMBPWorkerHandle) -> None:
        super().__init__(inner)
        self.late: Sequence[BlockTransferPlan] = []

    def load(self, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        super().load(self.late)
        self.late = plans
        return completed(plans)


class HastyStorer(PassingWorkerHandle):
    """Says that stores are complete, and copies when it is asked for the next."""

    def __init__(self, inner: UMBPWorkerHandle) -> None:
        super().__init__(inner)
        self.late: Sequence[BlockTransferPlan] = []

    def store(self, plans: Sequence[BlockTransferPlan]) -> TransferJobState:
        super().publish(self.wait(super().store(self.late)))
        self.late = plans
        return completed(plans)

    def publish(self, job: TransferJobState) -> None:
        """It is published when it has been copied."""


def completed(plans: Sequence[BlockTransferPlan]) -> TransferJobState:
    job = TransferJobState(plans)
    job.start()
    job.complete()
    return job


class BrokenRuntime(PassingRuntime):
    """A runtime with workers of one broken kind."""

    def __init__(self, inner: IUMBPRuntime, kind: Callable[[UMBPWorkerHandle], UMBPWorkerHandle]) -> None:
        super().__init__(inner)
        self._kind = kind

    def _around_worker(self, inner: UMBPWorkerHandle, topology: RankTopology) -> UMBPWorkerHandle:
        return self._kind(inner)


@pytest.mark.parametrize("kind", [EmptyHandedWorker, HastyLoader, HastyStorer])
def test_a_runtime_that_breaks_its_contract_is_found_and_its_life_can_be_run_again(
    root: Path, kind: type[PassingWorkerHandle]
) -> None:
    def around(runtime: IUMBPRuntime) -> IUMBPRuntime:
        return BrokenRuntime(runtime, kind)

    with pytest.raises(LifeError, match=r"hold wrong bytes|have been written") as found:
        walk_lives(SEED, 40 * LIFE_STEPS, root, around=around)
    with pytest.raises(LifeError) as again:
        walk_lives(SEED, LIFE_STEPS, root, first=found.value.life, around=around)
    assert str(again.value) == str(found.value)


def test_a_life_that_went_wrong_says_why_also_where_an_assertion_says_nothing() -> None:
    def bare() -> None:
        raise AssertionError

    def told() -> None:
        raise AssertionError("a pin is left")

    for fails, words in ((bare, "raise AssertionError (test_random_walk.py, line "), (told, "a pin is left")):
        with pytest.raises(AssertionError) as found:
            fails()
        assert in_words(found.value).startswith(f"AssertionError: {words}")
