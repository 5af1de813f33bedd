"""One engine of each kind of model and of each way to run one, for the tests of them all.

Each is started once: its pool is hardly larger than a long prompt, so that a few prompts make it evict, and
its loads are made to fail when a test says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from e2e import models
from e2e.harness import BLOCK_TOKENS, EngineProcess, EngineSpec
from umbp.runtime.wrap.faulty import FAULTS_VARIABLE, FaultPlan

CHUNKS = (("max_num_batched_tokens", 128),)
NO_FAULTS = ((FAULTS_VARIABLE, FaultPlan(seed=7).to_json()),)
# Of a load in several cache groups all is lost with any one of its keys: hardly any succeeds by the first.
SOME_FAIL = (FaultPlan(seed=7, load_keys=0.2), FaultPlan(seed=7, load_jobs=0.2))


@dataclass(frozen=True, slots=True)
class Kind:
    """`groups` are the kinds of the cache groups, by vLLM's names; `hit_tokens` what the longest hit is a
    multiple of, and `dropped_tokens` what the engine leaves out of the end of each hit.
    """

    spec: EngineSpec
    groups: tuple[str, ...]
    hit_tokens: int = BLOCK_TOKENS
    dropped_tokens: int = 0

    def restorable(self, tokens: int) -> int:
        """Whole blocks, with at least one token left to compute, and without what the engine drops."""
        return max((tokens - 1) // self.hit_tokens * self.hit_tokens - self.dropped_tokens, 0)


def _spec(
    pool_bytes: int,
    *,
    model: models.Shape = models.TINY,
    options: tuple[tuple[str, Any], ...] = (),
    ranks: int = 1,
    stages: int = 1,
    blocks: int = 64,
    arguments: tuple[tuple[str, Any], ...] = CHUNKS,
    environment: tuple[tuple[str, str], ...] = (),
    **more: Any,
) -> EngineSpec:
    return EngineSpec(
        model=model,
        connector=(("total_capacity_bytes", pool_bytes), *options),
        tensor_parallel=ranks,
        pipeline_parallel=stages,
        is_in_process=ranks == stages == 1,
        blocks=blocks,
        max_model_tokens=640,
        environment=(*NO_FAULTS, *environment),
        arguments=arguments,
        **more,
    )


FULL, LATENT, WINDOW, CHUNK, STATE = (
    "FullAttentionSpec",
    "MLAAttentionSpec",
    "SlidingWindowSpec",
    "ChunkedLocalAttentionSpec",
    "MambaSpec",
)
NGRAM = (
    ("method", "ngram"),
    ("num_speculative_tokens", 3),
    ("prompt_lookup_max", 3),
    ("prompt_lookup_min", 1),
)
EAGLE = (("method", "eagle"), ("num_speculative_tokens", 2))

MIB = 1 << 20

NATIVE_ROPE = ("-rotary_embedding",)
"""vLLM's rotary kernel for processors turns latent attention's queries wrongly."""
OWN_CACHE = (("E2E_KEEP_PREFIX_CACHE", "1"),)
"""vLLM has no prefix cache of its own for latent attention on a processor: its hits are the reference."""

KINDS = {
    # In single precision answers don't turn on how many tokens are computed at once.
    "latent": Kind(
        _spec(
            9 * MIB // 2,
            model=models.LATENT,
            blocks=160,
            block_tokens=16,
            arguments=(("dtype", "float32"),),
            environment=OWN_CACHE,
            custom_ops=NATIVE_ROPE,
        ),
        groups=(LATENT,),
        hit_tokens=16,
    ),
    "sliding window": Kind(_spec(2 * MIB, model=models.SLIDING), groups=(WINDOW, WINDOW, FULL)),
    "sliding window, two ranks": Kind(
        _spec(2 * MIB, model=models.SLIDING, ranks=2), groups=(WINDOW, WINDOW, FULL)
    ),
    "sliding window, two stages": Kind(
        _spec(2 * MIB, model=models.SLIDING, stages=2), groups=(WINDOW, WINDOW, FULL)
    ),
    "chunked local": Kind(_spec(2 * MIB, model=models.CHUNKED), groups=(CHUNK, FULL)),
    "gated delta": Kind(
        _spec(2 * MIB, model=models.DELTA, arguments=(("max_num_batched_tokens", 320),)),
        groups=(STATE, STATE, STATE, FULL),
        hit_tokens=160,
    ),
    "gated delta, two ranks": Kind(
        _spec(2 * MIB, model=models.DELTA, ranks=2, arguments=(("max_num_batched_tokens", 320),)),
        groups=(STATE, STATE, STATE, FULL),
        hit_tokens=160,
    ),
    "gated delta, two stages": Kind(
        _spec(2 * MIB, model=models.DELTA, stages=2, arguments=(("max_num_batched_tokens", 320),)),
        groups=(STATE, STATE, STATE, FULL),
        hit_tokens=160,
    ),
    # vLLM's CPU build leaves no state within a chunk of Mamba 2: each chunk is one block.
    "mamba": Kind(
        _spec(MIB // 2, model=models.MAMBA, arguments=(("max_num_batched_tokens", BLOCK_TOKENS),)),
        groups=(STATE,),
    ),
    "one KV head, two ranks": Kind(_spec(3 * MIB // 2, model=models.ONE_HEAD, ranks=2), groups=(FULL,)),
    "n-gram speculation": Kind(
        _spec(MIB, speculative=NGRAM, options=(("load_async", False),)), groups=(FULL,)
    ),
    "EAGLE speculation": Kind(
        _spec(3 * MIB // 2, speculative=EAGLE, draft=models.DRAFT),
        groups=(FULL,),
        dropped_tokens=BLOCK_TOKENS,
    ),
}


def set_faults(engine: EngineProcess, plan: FaultPlan) -> None:
    """From now on, of an engine that was started with a fault plan."""
    engine.call_workers("e2e.kinds:change_faults", plan.to_json())


def change_faults(worker: Any, plan: str) -> None:
    """Runs in a worker."""
    from umbp.runtime.wrap.faulty import FaultyWorkerHandle

    handle = worker_handle()
    while not isinstance(handle, FaultyWorkerHandle):
        handle = handle._inner
    handle._plan = FaultPlan.parse(plan)


def worker_handle() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group().worker_side._handle
