"""Rules that hold on several kinds of engines, as one body each, and the accounts that they look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from e2e.harness import EngineProcess, Prompt, Result, assert_close, assert_same, gained


@dataclass(frozen=True, slots=True)
class Restored:
    """How a prompt was restored: the engine's metrics just before and after, and the KV by rank and layer."""

    before: Mapping[str, float]
    after: Mapping[str, float]
    digests: Sequence[Mapping[str, Sequence[str]]]

    def gained(self, name: str) -> float:
        """By how much one of UMBP's metrics has grown."""
        return gained(self.after, self.before, f"vllm:umbp_{name}")


def assert_restored_as_own_hit(engine: EngineProcess, prompt: Prompt, tokens: int) -> Restored:
    """A prompt whose KV has left the engine is answered, from so many restored tokens, as the engine's own
    prefix cache would have answered it; its blocks have the same bytes. (With its own cache off, the second
    answer is restored too: then two restored answers are compared.) `engine.record_blocks()` comes first.
    """
    cold = engine.generate(prompt)
    hit = engine.generate(prompt)
    hit_digests = engine.kv_digests(hit, tokens)
    before = engine.metrics()
    engine.poison()

    result = engine.generate(prompt)

    assert result.cached_tokens == tokens
    assert_same(result, hit)
    assert_close(result, cold)
    assert engine.kv_digests(result, tokens) == hit_digests
    restored = Restored(before, engine.metrics(), hit_digests)
    assert restored.gained("loaded_tokens") == restored.gained("hit_tokens") == tokens
    assert restored.gained("loaded_bytes") == restored.gained("hit_bytes")
    assert restored.gained("failed_load_tokens") == 0
    return restored


def assert_nothing_fails_while_evicting(
    engine: EngineProcess, prompts: Sequence[Prompt], *, rounds: int
) -> None:
    """Prompts that don't fit into the pool together, again and again: every answer is right, no load fails,
    the pools of all ranks evict, and the accounts are even.
    """
    cold = [engine.generate(prompt) for prompt in prompts]
    before, evicted = engine.metrics(), _evictions(engine)
    for round_ in range(rounds):
        engine.poison()
        order = [*prompts[round_:], *prompts[:round_]]
        for result, prompt in zip(engine.generate_all(order), order, strict=True):
            assert_finished(result)
            assert_close(result, cold[prompts.index(prompt)])
        # Prompts in a circle are never found again by age; the latest one is.
        latest = order[-1]
        engine.generate(latest)
        engine.poison()
        assert_close(engine.generate(latest), cold[prompts.index(latest)])
    after = engine.metrics()
    assert all(now > then for now, then in zip(_evictions(engine), evicted, strict=True))
    assert gained(after, before, "vllm:umbp_loaded_tokens") > 0
    assert gained(after, before, "vllm:umbp_failed_load_tokens") == 0
    assert_even_accounts(engine)


def _evictions(engine: EngineProcess) -> list[int]:
    """Of the pools themselves: their metric is brought up to date once a second."""
    return [pool["evicted"] for pool in engine.call_workers("e2e.rules:audited_pool")]


def assert_finished(result: Result) -> None:
    assert result.finish_reason == "length", f"request {result.request_id} ended by {result.finish_reason}"


def assert_even_accounts(engine: EngineProcess) -> None:
    """After a drain nothing is pinned, promised or in flight; the pools prove their invariants."""
    for pool in engine.call_workers("e2e.rules:audited_pool"):
        assert pool["pinned"] == 0
        assert pool["deferred_here"] == 0
    if engine.spec.is_in_process:
        assert engine.call("e2e.rules:scheduler_accounts") == {
            "blocks in use": 0,
            "loads": 0,
            "stores": 0,
            "requests": 0,
        }


def audited_pool(worker: Any) -> dict[str, int]:
    """Runs in a worker: its pool's figures, once all invariants are proved."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    handle = get_kv_transfer_group().worker_side._handle
    handle = getattr(handle, "_inner", handle)
    handle.audit()
    stats: dict[str, int] = handle._keeper.current()[0].stats()
    return stats


def scheduler_accounts(llm: Any) -> dict[str, int]:
    """Runs in an in-process engine: what its scheduler still has open."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    side = scheduler.connector.scheduler_side
    side.audit()
    pool = scheduler.kv_cache_manager.block_pool
    return {
        "blocks in use": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        "loads": len(side._loads),
        "stores": len(side._stores),
        "requests": len(side._requests),
    }
