"""Engines with a cluster's Mooncake Store behind their pools, on real engines and real servers: what one has
stored another restores, and what dies costs a computation.
"""

from __future__ import annotations

import contextlib
import itertools
import shutil
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from e2e import models
from e2e.harness import (
    BLOCK_TOKENS,
    EngineError,
    EnginePool,
    EngineProcess,
    EngineSpec,
    Prompt,
    Result,
    assert_close,
    assert_same,
    gained,
    random_prompt,
)
from e2e.kinds import CHUNKS, NATIVE_ROPE, OWN_CACHE, worker_handle
from umbp.pool import SEAL_BYTES
from umbp.store.base import Outcome
from umbp.store.mooncake import MooncakeStore
from umbp.store.mooncake_settings import MooncakeSettings
from umbp.testing.groups import is_running
from umbp.testing.stores.rig import StoreRig
from umbp.testing.stores.servers import MooncakeCluster, free_ports, why_no_mooncake

# Two engines or ranks and a store's servers: beside other tests they get too little of two processors.
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.alone]

NODE_BYTES = 64 << 20
RESTORE_WITHIN_S = 60
END_WITHIN_S = 20
"""An engine that ends waits 5 s for what is still to be sent and 2 s for a store that hangs."""


def restorable(prompt: Prompt, block_tokens: int = BLOCK_TOKENS) -> int:
    return (len(prompt.tokens) - 1) // block_tokens * block_tokens


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeCluster]:
    """One master, two storage nodes."""
    if why := why_no_mooncake():
        pytest.skip(why)
    made = MooncakeCluster(tmp_path_factory.mktemp("cluster"), NODE_BYTES)
    yield made
    made.end()


@pytest.fixture(scope="module")
def spec(cluster: MooncakeCluster) -> EngineSpec:
    return far_spec(cluster.address)


def far_spec(master: str, **settings: object) -> EngineSpec:
    return EngineSpec(
        connector=(
            ("mode", "distributed"),
            ("store", "mooncake"),
            ("store_options", {"master": master} | settings),
            ("capacity_bytes", 16 << 20),
            ("timeout_ms", 5000),
            # A slow machine may take longer than the default for a question.
            ("lookup_timeout_ms", 2000),
        )
    )


@pytest.fixture(scope="module")
def start(engines: EnginePool) -> Iterator[Callable[[EngineSpec], EngineProcess]]:
    """Engines of the module's own, beside each other."""
    engines.close()  # room for two
    started: list[EngineProcess] = []

    def fresh(spec: EngineSpec) -> EngineProcess:
        engine = engines.fresh(spec)
        started.append(engine)
        engine.record_blocks()
        return engine

    yield fresh
    for engine in started:
        engine.stop()


Start = Callable[[EngineSpec], EngineProcess]


@pytest.fixture(scope="module")
def first(spec: EngineSpec, start: Start) -> EngineProcess:
    return start(spec)


@pytest.fixture(scope="module")
def second(first: EngineProcess, spec: EngineSpec, start: Start) -> EngineProcess:
    return start(spec)


def test_another_engine_restores_what_one_has_stored_with_the_same_tokens_and_bytes(
    first: EngineProcess, second: EngineProcess
) -> None:
    prompt = random_prompt(400, seed=8000)
    cold = first.generate(prompt)
    own_hit = first.generate(prompt)
    digests = first.kv_digests(own_hit, restorable(prompt))
    flush(first)

    restored = second.generate(prompt)

    assert restored.cached_tokens == restorable(prompt)
    assert_same(restored, own_hit)
    assert_close(restored, cold)
    assert second.kv_digests(restored, restorable(prompt)) == digests
    own_hit = second.generate(prompt)
    assert_same(restored, own_hit)


def test_both_restore_many_prompts_of_the_other_at_once_and_the_second_time_from_near(
    first: EngineProcess, second: EngineProcess
) -> None:
    for storing, restoring, seed in ((first, second, 8100), (second, first, 8150)):
        prompts = [random_prompt(120 + 30 * number, seed=seed + number) for number in range(6)]
        cold = [storing.generate(prompt) for prompt in prompts]
        flush(storing)
        before = restoring.metrics()
        check_restored(restoring, prompts, cold)
        restoring.poison()
        check_restored(restoring, prompts, cold)
        tokens = sum(restorable(prompt) for prompt in prompts)
        restoring.generate(random_prompt(8, seed=seed))  # counts come with a step
        assert gained(restoring.metrics(), before, "vllm:umbp_fetched_objects") == tokens / BLOCK_TOKENS
        assert gained(restoring.metrics(), before, "vllm:umbp_loaded_tokens") == 2 * tokens


def check_restored(engine: EngineProcess, prompts: list[Prompt], references: list[Result]) -> None:
    results = engine.generate_all(prompts)
    for prompt, result, reference in zip(prompts, results, references, strict=True):
        assert result.cached_tokens == restorable(prompt)
        assert_close(result, reference)


def test_a_prompt_that_is_changed_early_is_answered_otherwise(
    first: EngineProcess, second: EngineProcess
) -> None:
    """The control of the others: what is restored is what decides the answer."""
    prompt = random_prompt(300, seed=8200)
    cold = first.generate(prompt)
    flush(first)
    changed = second.generate(prompt.changed_at(5))
    assert changed.cached_tokens == 0
    assert changed.logprobs != cold.logprobs


def test_what_lies_damaged_in_the_store_is_computed_and_replaced(
    first: EngineProcess, second: EngineProcess, cluster: MooncakeCluster
) -> None:
    """One payload is another, under its own seal: the load that was promised it finds out."""
    others = keys_in(cluster)
    prompt = random_prompt(300, seed=8250)
    cold = first.generate(prompt)
    own_hit = first.generate(prompt)
    flush(first)
    stored = sorted(keys_in(cluster) - others)
    assert len(stored) == len(prompt.tokens) // BLOCK_TOKENS
    ((size,),) = first.call_workers("e2e.test_distributed:object_sizes")
    victim = spoil(cluster, stored[len(stored) // 2], size + SEAL_BYTES)
    before = second.metrics()

    result = second.generate(prompt)

    assert_close(result, cold)
    flush(second)
    second.generate(random_prompt(8, seed=1))  # counts come with a step
    after = second.metrics()
    assert gained(after, before, "vllm:umbp_failed_fetch_objects") == 1
    assert victim in keys_in(cluster), "a whole one was not sent"
    assert first.call_workers("e2e.test_distributed:lose_near") == [True]
    first.poison()
    again = first.generate(prompt)
    assert again.cached_tokens == own_hit.cached_tokens == restorable(prompt)
    assert_same(again, own_hit)


def keys_in(cluster: MooncakeCluster) -> set[str]:
    """What the master knows."""
    (port,) = [each.partition("=")[2] for each in cluster.master.process.args if "metrics_port" in each]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/get_all_keys", timeout=10) as answer:
        return set(answer.read().decode().split())


def spoil(cluster: MooncakeCluster, key: str, size: int) -> str:
    """Another payload, of numbers like KV's, with the seal that is there."""
    rig = StoreRig(MooncakeStore(MooncakeSettings(master=cluster.address)), 2 * size)
    _, (content,) = rig.get({key: size})
    assert rig.remove([key]) == [Outcome.DONE]
    payload = bytes(each ^ 0x83 for each in content[:-SEAL_BYTES])
    assert rig.put({key: payload + content[-SEAL_BYTES:]}) == [Outcome.DONE]
    rig.store.close()
    return key


def object_sizes(worker: Any) -> list[int]:
    """Runs in a worker."""
    return list(worker_handle()._groups.object_sizes)


KINDS = {
    "two ranks": {"tensor_parallel": 2},
    "windows": {"model": models.SLIDING, "max_model_tokens": 640, "arguments": CHUNKS},
    "a near pool that is shared": {},
    "two ranks that hold the same": {
        "model": models.LATENT,
        "tensor_parallel": 2,
        "max_model_tokens": 512,
        "block_tokens": 16,
        "arguments": (("dtype", "float32"),),
        "custom_ops": NATIVE_ROPE,
        "environment": OWN_CACHE,
    },
}


@pytest.mark.parametrize("name", KINDS)
def test_what_was_lost_near_comes_back_from_far(cluster: MooncakeCluster, start: Start, name: str) -> None:
    """On one engine, whose pool is emptied: what it then restores has been at the storage nodes."""
    # Two ranks that wait for each other on few processors leave the nodes little time.
    kind = replace(far_spec(cluster.address, timeout_ms=20_000), **KINDS[name])
    folder = tempfile.mkdtemp(prefix="umbp-test-", dir="/dev/shm")
    if name == "a near pool that is shared":
        kind = replace(kind, connector=(*(kind.connector or ()), ("pool", "near"), ("pool_dir", folder)))
    prompt = random_prompt(400, seed=8300 + len(name))
    with start(kind) as engine:
        cold = engine.generate(prompt)
        hit = engine.generate(prompt)
        promised = restorable(prompt, kind.block_tokens)
        digests = engine.kv_digests(hit, promised)
        flush(engine)
        assert all(engine.call_workers("e2e.test_distributed:lose_near"))
        engine.poison()
        before = engine.metrics()
        restored = engine.generate(prompt)
        assert restored.cached_tokens == hit.cached_tokens == promised
        assert_same(restored, hit)
        assert_close(restored, cold)
        assert engine.kv_digests(restored, promised) == digests
        engine.generate(random_prompt(8, seed=1))
        after = engine.metrics()
        assert gained(after, before, "vllm:umbp_fetched_objects") > 0
        if name == "two ranks that hold the same":
            # Each block once, and the last one, which no hit takes, when it was computed again.
            assert after["vllm:umbp_sent_objects"] == len(prompt.tokens) // kind.block_tokens + 1
    shutil.rmtree(folder)


def lose_near(worker: Any) -> bool:
    """Runs in a worker: what it keeps near is gone."""
    pool, namespace_id = worker_handle()._keeper.current()
    return bool(pool.clear(namespace_id))


@pytest.mark.parametrize("what", ["killed", "silent"])
def test_without_the_master_engines_serve_on_and_hits_return_when_it_is_back(
    first: EngineProcess, second: EngineProcess, cluster: MooncakeCluster, what: str
) -> None:
    seeds = itertools.count(8400 if what == "killed" else 8450)
    prompts = [random_prompt(300, seed=next(seeds)) for _ in range(3)]
    cold = [first.generate(prompt) for prompt in prompts]
    flush(first)
    if what == "killed":
        cluster.master.kill()
    else:
        cluster.master.stop()
    for prompt, reference in zip(prompts[:2], cold, strict=False):
        result = second.generate(prompt)
        assert result.cached_tokens == 0
        assert result.finish_reason == "length"
        assert_close(result, reference)
    first.generate(random_prompt(200, seed=next(seeds)))
    if what == "killed":
        cluster.revive_master()
    else:
        cluster.master.go_on()
    deadline_s = time.monotonic() + RESTORE_WITHIN_S
    for seed in seeds:
        assert time.monotonic() < deadline_s
        prompt = random_prompt(200, seed=seed)
        reference = first.generate(prompt)
        flush(first)
        result = second.generate(prompt)
        assert_close(result, reference)
        if result.cached_tokens == restorable(prompt):
            break
    if what == "silent":
        check_restored(second, prompts[2:], cold[2:])
    for engine in (first, second):
        assert_nothing_is_held(engine)
    told = second.log.read_text(errors="replace")
    assert "UMBP: the store 'mooncake' can't be used at the moment" in told
    assert "UMBP: the store 'mooncake' can be used again, after " in told


def assert_nothing_is_held(engine: EngineProcess) -> None:
    flush(engine)  # what is being sent is held
    assert engine.call_workers("e2e.test_distributed:pinned_near") == [0]


def pinned_near(worker: Any) -> int:
    """Runs in a worker: how many objects are held, once all invariants are proved."""
    handle = worker_handle()
    handle.audit()
    pool, _ = handle._keeper.current()
    return int(pool.stats()["pinned"])


# The ends: these two use up the engines that the tests above have shared.


def test_an_engine_that_ends_beside_a_silent_master_ends_in_seconds(
    first: EngineProcess, cluster: MooncakeCluster
) -> None:
    first.generate(random_prompt(300, seed=8500))
    cluster.master.stop()
    first.generate(random_prompt(300, seed=8501))
    check_end(first)
    cluster.master.go_on()


def test_an_engine_that_ends_beside_a_dead_master_ends_in_seconds(
    second: EngineProcess, cluster: MooncakeCluster
) -> None:
    second.generate(random_prompt(300, seed=8502))
    cluster.master.kill()
    second.generate(random_prompt(300, seed=8503))
    check_end(second)


def check_end(engine: EngineProcess) -> None:
    """It leaves as an operator's engine does; nothing stays, nothing crashes."""
    (core,) = engine.call_workers("e2e.test_standalone:pid_of")
    begun_s = time.monotonic()
    engine.call("e2e.test_distributed:shut_down")
    while is_running(core) or orphans(engine):
        assert time.monotonic() - begun_s < END_WITHIN_S, orphans(engine)
    print(f"the engine ended in {time.monotonic() - begun_s:.1f} s")
    log = engine.log.read_text(errors="replace")
    for crash in ("Segmentation fault", "SIGSEGV", "Fatal Python error", "core dumped"):
        assert crash not in log
    engine.stop()


def orphans(engine: EngineProcess) -> list[int]:
    """Processes of the engine that its first one did not start."""
    found = []
    for pid in engine.pids()[1:]:
        with contextlib.suppress(OSError):
            status = (Path("/proc") / str(pid) / "stat").read_text()
            state, parent = status.rpartition(")")[2].split()[:2]
            if int(parent) != engine.pid and state not in "ZX":
                found.append(pid)
    return found


def shut_down(llm: Any) -> None:
    """Runs in the engine's first process."""
    llm.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({}, "no Mooncake master answers at 127.0.0.1:"),
        (
            {"masters": "a"},
            "store 'mooncake' has no option 'masters' in 'store_options'; did you mean 'master'?",
        ),
    ],
    ids=["no master", "wrong option"],
)
def test_a_start_without_a_store_ends_with_one_sentence(
    engines: EnginePool, settings: dict[str, object], sentence: str
) -> None:
    if why := why_no_mooncake():
        pytest.skip(why)
    spec = far_spec(f"127.0.0.1:{free_ports(1)[0]}", **settings)
    engine = engines.unstarted(replace(spec, environment=(("E2E_STORE_START_TIMEOUT_S", "3"),)))
    with pytest.raises(EngineError):
        engine.start()
    log = engine.log.read_text(errors="replace")
    assert any(sentence in line and "Error: " in line for line in log.splitlines()), log[-4000:]


def flush(engine: EngineProcess) -> None:
    """Wait until what the engine has stored has gone out."""
    assert all(engine.call_workers("e2e.test_distributed:flush_worker"))


def flush_worker(worker: Any) -> bool:
    """Runs in a worker."""
    return bool(worker_handle().far.flush(60.0))
