"""Starts and ends of real engines: bad input is one sentence, a killed engine leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e import models
from e2e.harness import UMBP, EngineError, EnginePool, EngineProcess, EngineSpec, random_prompt
from umbp.testing.groups import is_running, shared_memory_of, taking_along

pytestmark = [pytest.mark.engine, pytest.mark.slow]

POOL_BYTES = 1 << 30
KILLED = EngineSpec(connector=(("total_capacity_bytes", POOL_BYTES),), tensor_parallel=2)


@pytest.mark.parametrize(
    ("connector", "sentence"),
    [
        ((("capacity_byte", 1 << 20),), "unknown option 'capacity_byte'; did you mean 'capacity_bytes'?"),
        ((("capacity_bytes", "900TiB"),), "doesn't fit"),
    ],
    ids=["unknown option", "more memory than there is"],
)
def test_bad_input_stops_the_start_with_one_sentence(
    tmp_path: Path, connector: tuple[tuple[str, object], ...], sentence: str
) -> None:
    model = models.make_model(models.TINY, tmp_path)
    engine = EngineProcess(EngineSpec(connector=connector, is_fresh=True), model, tmp_path / "log")
    with pytest.raises(EngineError):
        engine.start()
    log = (tmp_path / "log").read_text(errors="replace")
    assert any(sentence in line and "Error: " in line for line in log.splitlines()), log[-4000:]


def test_the_policy_fail_is_warned_of_loudly(engines: EnginePool) -> None:
    engine = engines.get(EngineSpec(connector=UMBP, transfer=(("kv_load_failure_policy", "fail"),)))
    warnings = [line for line in engine.log.read_text(errors="replace").splitlines() if "WARNING" in line]
    assert any('"kv_load_failure_policy": "recompute"' in line for line in warnings)


def test_two_engines_on_one_host_keep_apart_and_one_survives_the_others_death(tmp_path: Path) -> None:
    model = models.make_model(models.TINY, tmp_path)
    spec = EngineSpec(connector=UMBP)
    prompt = random_prompt(200, seed=3000)
    with (
        EngineProcess(spec, model, tmp_path / "first") as first,
        EngineProcess(spec, model, tmp_path / "second") as second,
    ):
        first.generate(prompt)
        assert second.generate(prompt).cached_tokens == 0, "embedded pools are an engine's own"
        kill_all(first)
        second.poison()
        assert second.generate(prompt).cached_tokens == 192


def test_latent_attention_that_is_turned_wrongly_is_refused_in_a_sentence_with_a_remedy(
    tmp_path: Path,
) -> None:
    """Scenario: vLLM's rotary kernel for processors gave each query another angle in another batch, so
    restored prompts were answered otherwise than computed ones, and so were its own cache's hits.
    """
    spec = EngineSpec(
        model=models.LATENT,
        connector=UMBP,
        block_tokens=16,
        max_model_tokens=512,
        arguments=(("max_num_batched_tokens", 512),),
    )
    log = tmp_path / "engine.log"
    engine = EngineProcess(spec, models.make_model(models.LATENT, tmp_path), log)
    with pytest.raises(EngineError):
        engine.start()
    said = log.read_text(errors="replace")
    assert "UMBP can't serve latent attention (MLA) with vLLM's rotary kernel" in said, said[-4000:]
    assert 'start vLLM with --compilation-config \'{"custom_ops": ["-rotary_embedding"]}\'' in said


@pytest.mark.alone  # it looks at the whole machine's shared memory
def test_an_engine_killed_five_times_over_leaves_nothing_behind(tmp_path: Path) -> None:
    """`kill -9` of the engine core and its workers while they store and restore: no memory is held, no file
    is left, no process stays, and the next start doesn't hang.
    """
    seed = 4
    chance = random.Random(seed)
    model = models.make_model(models.TINY, tmp_path)
    prompts = [random_prompt(300, seed=3100 + i) for i in range(4)]
    files = shared_memory_files()
    memory = shared_memory_bytes()
    for round_ in range(5):
        engine = EngineProcess(KILLED, model, tmp_path / f"round{round_}").start()
        cold = engine.generate(prompts[0])
        engine.poison()
        assert engine.generate(prompts[0]).token_ids == cold.token_ids
        for prompt in prompts:
            engine.submit(prompt)
        engine.step(chance.randrange(3))
        kill_all(engine)
    assert until(lambda: shared_memory_bytes() < memory + POOL_BYTES // 2), (
        "memory of a dead engine is still held"
    )
    assert shared_memory_files() <= files


def kill_all(engine: EngineProcess) -> None:
    """SIGKILL to each process of the engine, workers and core first, as an out-of-memory killer might."""
    pids = engine.pids()
    memory = shared_memory_of(pids)
    with taking_along(pids):
        for pid in reversed(pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        engine.stop()
        assert until(lambda: not any(map(is_running, pids)))
    assert not [each for each in memory if each.exists()]


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Whether the condition comes true in time; what the kernel does after a kill takes a moment."""
    deadline_s = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        os.sched_yield()
    return True


def shared_memory_bytes() -> int:
    """Memory of all anonymous and named segments on the host, pools among them."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel doesn't tell its shared memory")


def shared_memory_files() -> set[str]:
    """What of ours lies in the RAM file system; others' files come and go."""
    return {path.name for path in Path("/dev/shm").iterdir() if "umbp" in path.name.lower()}
