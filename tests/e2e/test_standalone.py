"""One pool for all engines of a node, on real engines: what one has stored the others restore; engines and
the pool itself come and go.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from e2e import models
from e2e.harness import (
    BLOCK_TOKENS,
    EnginePool,
    EngineProcess,
    EngineSpec,
    Prompt,
    Result,
    assert_close,
    assert_same,
    random_prompt,
)
from e2e.kinds import NATIVE_ROPE
from umbp.pool import Pool
from umbp.pool.sharing import pool_path

pytestmark = [pytest.mark.engine, pytest.mark.slow]

POOL_BYTES = 64 << 20
OTHER = replace(models.TINY, name="other", layers=3)
"""A model whose blocks have another size."""


def restorable(prompt: Prompt, block_tokens: int = BLOCK_TOKENS) -> int:
    return (len(prompt.tokens) - 1) // block_tokens * block_tokens


def umbp(*arguments: str) -> str:
    """The command line, as an operator types it."""
    done = subprocess.run(
        [sys.executable, "-m", "umbp", *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder of the RAM file system, as `pool_dir`."""
    made = Path(tempfile.mkdtemp(prefix="umbp-test-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


@pytest.fixture(scope="module")
def spec(folder: Path) -> EngineSpec:
    return EngineSpec(
        connector=(
            ("mode", "standalone"),
            ("pool", "node"),
            ("pool_dir", str(folder)),
            ("capacity_bytes", POOL_BYTES),
            ("dram_use_hugepages", True),
            ("dram_numa_node", 0),
            ("dram_prefault", True),
        )
    )


@pytest.fixture(scope="module")
def start(engines: EnginePool) -> Iterator[Callable[[EngineSpec], EngineProcess]]:
    """Engines of the module's own, beside each other."""
    engines.close()  # room for two
    started: list[EngineProcess] = []

    def fresh(spec: EngineSpec) -> EngineProcess:
        engine = engines.fresh(spec)
        engine.record_blocks()
        started.append(engine)
        return engine

    yield fresh
    for engine in started:
        engine.stop()


@pytest.fixture(scope="module")
def first(spec: EngineSpec, start: Callable[[EngineSpec], EngineProcess]) -> EngineProcess:
    return start(spec)


@pytest.fixture(scope="module")
def second(
    first: EngineProcess, spec: EngineSpec, start: Callable[[EngineSpec], EngineProcess]
) -> EngineProcess:
    return start(spec)


def test_the_first_request_of_another_engine_is_a_hit_on_the_first_ones_document(
    first: EngineProcess, second: EngineProcess
) -> None:
    prompt = random_prompt(400, seed=7000)
    cold = first.generate(prompt)
    own_hit = first.generate(prompt)
    digests = first.kv_digests(own_hit, restorable(prompt))

    restored = second.generate(prompt)

    assert restored.cached_tokens == restorable(prompt)
    assert_same(restored, own_hit)
    assert_close(restored, cold)
    assert second.kv_digests(restored, restorable(prompt)) == digests


def test_both_store_and_restore_what_the_other_has(first: EngineProcess, second: EngineProcess) -> None:
    prompts = [random_prompt(150 + 30 * i, seed=7100 + i) for i in range(4)]
    stores = [first, second, first, second]
    cold = [engine.generate(prompt) for engine, prompt in zip(stores, prompts, strict=True)]
    for engine in (first, second):
        engine.poison()
        for prompt, reference in zip(prompts, cold, strict=True):
            restored = engine.generate(prompt)
            assert restored.cached_tokens == restorable(prompt)
            assert_close(restored, reference)


def test_the_same_prompt_at_once_on_both_is_stored_once(
    first: EngineProcess, second: EngineProcess, folder: Path
) -> None:
    with Pool.attach(pool_path(folder, "node")) as pool:
        before = pool.stats()["objects"]
        prompt = random_prompt(500, seed=7200)
        ids = [engine.submit(prompt) for engine in (first, second)]
        one, other = (engine.take([name])[0] for engine, name in zip((first, second), ids, strict=True))
        assert_close(one, other)
        assert pool.stats()["objects"] - before == len(prompt.tokens) // BLOCK_TOKENS
        pool.audit()


def test_another_model_shares_the_memory_and_nothing_else(
    first: EngineProcess,
    spec: EngineSpec,
    folder: Path,
    start: Callable[[EngineSpec], EngineProcess],
) -> None:
    prompt = random_prompt(300, seed=7300)
    reference = first.generate(prompt)
    with start(replace(spec, model=OTHER)) as other:
        cold = other.generate(prompt)
        assert cold.cached_tokens == 0
        other.poison()
        restored = other.generate(prompt)
        assert restored.cached_tokens == restorable(prompt)
        assert_close(restored, cold)
        # Clearing one model's namespace leaves the other's alone.
        assert other.reset_prefix_cache(with_connector=True)
        other.poison()
        assert other.generate(prompt).cached_tokens == 0
    first.poison()
    again = first.generate(prompt)
    assert again.cached_tokens == restorable(prompt)
    assert_close(again, reference)
    assert len(stat(folder)["namespaces"]) == 2


def stat(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(umbp("pool", "stat", "node", "--dir", str(folder), "--json"))
    return found


def test_what_an_engine_stored_outlives_its_death_and_what_it_held_does_not(
    second: EngineProcess,
    spec: EngineSpec,
    folder: Path,
    start: Callable[[EngineSpec], EngineProcess],
) -> None:
    """Scenario: all processes of an engine are killed while loads are in flight, and the other is idle. The
    dead's pins are told as such; they are gone when the other has answered something.
    """
    prompt = random_prompt(350, seed=7400)
    with start(spec) as third:
        cold = third.generate(prompt)
        third.poison()
        (worker,) = third.call_workers("e2e.test_standalone:pid_of")
        before = reaped(folder)
        os.kill(worker, signal.SIGSTOP)  # so that the load is not over before we look
        third.submit(prompt)
        asked(lambda: any(pins for _, pins in held(folder)))
    dead = [pins for is_alive, pins in held(folder) if not is_alive]
    assert len(dead) == 2
    assert sum(dead) == restorable(prompt) // BLOCK_TOKENS
    assert reaped(folder) == before
    restored = second.generate(prompt)
    assert restored.cached_tokens == restorable(prompt)
    assert_close(restored, cold)
    until(lambda _: all(is_alive for is_alive, _ in held(folder)), second, prompt)
    assert not any(pins for _, pins in held(folder))
    assert reaped(folder) == before + 2
    with Pool.attach(pool_path(folder, "node")) as pool:
        pool.audit()


def held(folder: Path) -> list[tuple[bool, int]]:
    """By process of the pool: whether it is alive, and how many objects it has pinned."""
    return [(each["is_alive"], each["pinned_slots"]) for each in stat(folder)["processes"]]


def reaped(folder: Path) -> int:
    found: int = stat(folder)["counters"]["reaped"]
    return found


def pid_of(worker: Any) -> int:
    """Runs in a worker."""
    return os.getpid()


def asked(is_reached: Callable[[], bool]) -> None:
    """Asks again and again."""
    deadline_s = time.monotonic() + 20
    while not is_reached():
        assert time.monotonic() < deadline_s


def test_two_ranks_share_the_pool_with_each_other(
    spec: EngineSpec, start: Callable[[EngineSpec], EngineProcess]
) -> None:
    prompt = random_prompt(300, seed=7500)
    with start(replace(spec, tensor_parallel=2)) as engine:
        cold = engine.generate(prompt)
        hit = engine.generate(prompt)
        engine.poison()
        restored = engine.generate(prompt)
        assert restored.cached_tokens == restorable(prompt)
        assert_same(restored, hit)
        assert_close(restored, cold)


def test_latent_kv_that_all_ranks_hold_alike_is_stored_once_and_restored_as_it_was(
    spec: EngineSpec, folder: Path, start: Callable[[EngineSpec], EngineProcess]
) -> None:
    """vLLM has no prefix cache of its own for it on a processor: what is restored is compared with what was
    computed. `test_kinds.py` has its own hits.
    """
    latent = replace(
        spec,
        model=models.LATENT,
        tensor_parallel=2,
        block_tokens=16,
        blocks=64,
        max_model_tokens=512,
        arguments=(("dtype", "float32"),),
        custom_ops=NATIVE_ROPE,
    )
    with start(latent) as engine, Pool.attach(pool_path(folder, "node")) as pool:
        for length in (300, 18 * 16 + 1):
            prompt = random_prompt(length, seed=7550 + length)
            before = pool.stats()["objects"]
            cold = engine.generate(prompt)
            assert pool.stats()["objects"] - before == length // 16
            digests = engine.kv_digests(cold, restorable(prompt, 16))
            engine.poison()
            loaded = engine.metrics()["vllm:umbp_loaded_tokens"]
            restored = engine.generate(prompt)
            assert restored.cached_tokens == restorable(prompt, 16)
            assert restored.token_ids == cold.token_ids
            assert_close(restored, cold)
            assert engine.kv_digests(restored, restored.cached_tokens) == digests
            assert engine.metrics()["vllm:umbp_loaded_tokens"] - loaded == restored.cached_tokens


@pytest.mark.parametrize("by", ["command", "deletion"])
def test_a_pool_destroyed_under_running_engines_is_missed_and_used_again_when_it_is_back(
    first: EngineProcess, second: EngineProcess, folder: Path, by: str
) -> None:
    umbp("pool", "resize", "node", "8MiB", "--dir", str(folder))
    for number in range(8):
        first.generate(random_prompt(900, seed=7800 + 10 * len(by) + number))
    prompt = random_prompt(320, seed=7600 + len(by))
    cold = first.generate(prompt)
    evicted = [engine.metrics()["vllm:umbp_evicted_objects"] for engine in (first, second)]
    assert evicted[0] > 0
    if by == "command":
        umbp("pool", "destroy", "node", "--dir", str(folder), "--yes")
    else:
        Path(pool_path(folder, "node")).unlink()
    for engine in (first, second):
        lost = until(lambda result: result.cached_tokens == 0, engine, prompt)
        assert_close(lost, cold)
        until(lambda _, engine=engine: has_no_pool(engine), engine, prompt)
    umbp("pool", "create", "node", "--dir", str(folder), "--size", "64MiB")
    # Another prompt: blocks whose load has failed are left out for a while.
    prompt = random_prompt(320, seed=7650 + len(by))
    cold = first.generate(prompt)
    for engine in (first, second):
        # The engine is found to store again by its restoring.
        restored = until(lambda result: result.cached_tokens == restorable(prompt), engine, prompt)
        assert_close(restored, cold)
    stored = first.generate(other := random_prompt(320, seed=7700 + len(by)))
    restored = second.generate(other)
    assert restored.cached_tokens == restorable(other)
    assert_close(restored, stored)
    for engine, before in zip((first, second), evicted, strict=True):
        assert engine.metrics()["vllm:umbp_evicted_objects"] >= before


def has_no_pool(engine: EngineProcess) -> bool:
    return engine.metrics()["vllm:umbp_pool_capacity_bytes"] == 0


def until(is_reached: Callable[[Result], bool], engine: EngineProcess, prompt: Prompt) -> Result:
    """Asks an engine that has forgotten the prompt again and again."""
    deadline_s = time.monotonic() + 20
    while time.monotonic() < deadline_s:
        engine.poison()
        result = engine.generate(prompt)
        if is_reached(result):
            return result
    raise AssertionError(f"not within 20 s: {result}")
