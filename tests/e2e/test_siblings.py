"""On a real engine beside another connector, under vLLM's MultiConnector: vLLM's own example, which keeps
each prompt in files and loads it within the step. One engine for each order.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import (
    BLOCK_TOKENS,
    UMBP,
    EnginePool,
    EngineSpec,
    Prompt,
    assert_close,
    assert_same,
    gained,
    random_prompt,
)

pytestmark = [pytest.mark.engine, pytest.mark.slow]

LENGTH = 300
RESTORED = (LENGTH - 1) // BLOCK_TOKENS * BLOCK_TOKENS
OURS: dict[str, Any] = {
    "kv_connector": "UMBPStoreConnector",
    "kv_connector_module_path": "umbp.connector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"min_load_tokens": 0, **dict(UMBP)},
}


def spec(files: Path, *, is_ours_first: bool) -> EngineSpec:
    theirs = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(files)},
    }
    return EngineSpec(
        transfer=(
            ("kv_connector", "MultiConnector"),
            ("kv_role", "kv_both"),
            ("kv_load_failure_policy", "recompute"),
            (
                "kv_connector_extra_config",
                {"connectors": [OURS, theirs] if is_ours_first else [theirs, OURS]},
            ),
        ),
        # The example takes a prompt whole.
        arguments=(("max_num_batched_tokens", 1024),),
    )


@pytest.mark.parametrize("is_ours_first", [True, False], ids=["ours first", "ours second"])
def test_beside_the_example_whoever_is_first_restores_and_both_keep_all(
    engines: EnginePool, tmp_path: Path, is_ours_first: bool
) -> None:
    prompt = random_prompt(LENGTH, seed=6000)
    with engines.fresh(spec(tmp_path, is_ours_first=is_ours_first)) as engine:
        cold = engine.generate(prompt)
        hit = engine.generate(prompt)
        engine.poison()
        before = engine.metrics()
        restored = engine.generate(prompt)
        assert_same(restored, hit)
        assert_close(restored, cold)
        after = engine.metrics()
        assert gained(after, before, "vllm:umbp_loaded_tokens") == (RESTORED if is_ours_first else 0)
        assert hit.cached_tokens == RESTORED

        # What only the files have is loaded from them, and kept by ours as well.
        assert engine.reset_prefix_cache(with_connector=True)
        engine.poison()
        assert_same(engine.generate(prompt), hit)
        for kept in tmp_path.iterdir():
            shutil.rmtree(kept)
        engine.poison()
        before = engine.metrics()
        assert_same(engine.generate(prompt), hit)
        assert gained(engine.metrics(), before, "vllm:umbp_loaded_tokens") == RESTORED

        # A beginning that is shared is what the files can't tell.
        other = Prompt(prompt.tokens[: 5 * BLOCK_TOKENS] + random_prompt(90, seed=6001).tokens)
        engine.poison()
        assert engine.generate(other).cached_tokens == 5 * BLOCK_TOKENS
        assert engine.metrics()["vllm:umbp_failed_load_tokens"] == 0
