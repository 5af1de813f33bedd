"""The scripted engine by itself, without a connector: its model, on every kind of cache group."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from vllm.v1.core.kv_cache_utils import get_group_id

from umbp.testing.engine import BLOCK, ScriptedEngine, Shape, WrongByteError, tokens
from umbp.testing.engine.memory import GARBAGE
from umbp.testing.engine.shape import Layers

FULL = Layers("full", 1)
SHAPES = {
    "full": Shape(),
    "sliding": Shape(layers=(FULL, Layers("sliding", 2, 40))),
    "sliding alone": Shape(layers=(Layers("sliding", 2, 40),)),
    "wide blocks": Shape(layers=(FULL, Layers("sliding", 2, 40, head_size=2))),
    "chunked": Shape(layers=(FULL, Layers("chunked", 2, 64))),
    "state": Shape(layers=(FULL, Layers("mamba", 2))),
    "state inside blocks": Shape(
        layers=(Layers("full", 1, block_tokens=32), Layers("mamba", 2, block_tokens=32)), match_tokens=BLOCK
    ),
    "state inside blocks, guessed": Shape(
        layers=(Layers("full", 1, block_tokens=32), Layers("mamba", 2, block_tokens=32)),
        match_tokens=BLOCK,
        drafts=2,
        drafter="eagle",
    ),
    "three kinds": Shape(layers=(FULL, Layers("sliding", 1, 40), Layers("mamba", 1))),
    "mla on ranks": Shape(layers=(Layers("mla", 2),), ranks=2),
    "one head for two ranks": Shape(ranks=2, kv_heads=1),
    "stages": Shape(layers=(Layers("full", 2), Layers("sliding", 4, 40)), ranks=2, stages=2),
    "dealt tokens": Shape(ranks=2, kv_heads=1, dcp=2),
    "dealt latent tokens": Shape(ranks=2, dcp=2, layers=(Layers("mla", 2),)),
    "dealt beside states": Shape(ranks=2, kv_heads=1, dcp=2, layers=(FULL, Layers("mamba", 2))),
    "prefill shared out": Shape(ranks=2, pcp=2, layers=(Layers("mla", 2),)),
    "dealt among prefill ranks": Shape(pcp=2, dcp=2, layers=(Layers("mla", 2),)),
    "guessed by lookup": Shape(drafts=3),
    "guessed by a layer": Shape(drafts=2, drafter="eagle"),
    "guessed beside windows": Shape(drafts=2, drafter="mtp", layers=(FULL, Layers("sliding", 2, 40))),
    "guessed with states": Shape(drafts=2, layers=(FULL, Layers("mamba", 2))),
    "guessed in flight": Shape(drafts=2, drafter="eagle", depth=2),
    "in flight": Shape(depth=2, layers=(FULL, Layers("sliding", 2, 40))),
    "second runner": Shape(runner=2, layers=(FULL, Layers("sliding", 2, 40))),
}


def bare(root: Path, shape: Shape, **changes: Any) -> ScriptedEngine:
    return ScriptedEngine(root, replace(shape, has_connector=False, **changes))


def cached_blocks(engine: ScriptedEngine, group_id: int) -> list[int]:
    """Those of one group in the engine's prefix cache."""
    return [
        block.block_id
        for block in engine.pool.blocks
        if block.block_hash is not None and get_group_id(block.block_hash) == group_id
    ]


@pytest.mark.parametrize("name", SHAPES)
def test_the_engines_own_hits_are_right_on_every_kind_of_cache_group(root: Path, name: str) -> None:
    random = Random(name)
    engine = bare(root, SHAPES[name], blocks=60, max_batched_tokens=random.choice([40, 64, 100]))
    prompts = [tokens(length, seed) for seed in range(3) for length in (20, 64, 90, 130)]
    for _ in range(80):
        live = [request for request in engine.scheduler.requests.values() if not request.is_finished()]
        if len(live) < 5:
            engine.add(random.choice(prompts), random.randint(1, 40))
        if live and random.random() < 0.04:
            engine.abort(random.choice(live).request_id)
        engine.step()
    engine.drain(2000)
    engine.check_drained()
    assert engine.finished
    assert engine.reused_tokens > 0


@pytest.mark.parametrize("name", SHAPES)
def test_a_wrong_byte_in_any_layers_of_any_rank_is_found_by_the_next_hit(root: Path, name: str) -> None:
    parts = len(bare(root, SHAPES[name]).ranks) * len(bare(root, SHAPES[name]).ranks[-1].memory.parts)
    for number in range(parts):
        engine = bare(root, SHAPES[name])
        engine.run(tokens(9 * BLOCK + 5), 2)
        part = [part for rank in engine.ranks for part in rank.memory.parts][number]
        cached = cached_blocks(engine, part.group_id)
        assert cached
        part.memory[:, cached] = GARBAGE
        with pytest.raises(WrongByteError):
            engine.run(tokens(9 * BLOCK + 5), 2)


@pytest.mark.parametrize("first_reads_cache", [False, True], ids=["is computing", "gets a copy of"])
def test_vllm_by_itself_goes_on_from_a_copy_of_a_block_that_another_request_of_the_step(
    root: Path, first_reads_cache: bool
) -> None:
    """Faults of vLLM's, which the connector's requests are spared (test_tails): where this fails they need
    not be any more.
    """
    engine = bare(root, SHAPES["state inside blocks"], max_batched_tokens=200)
    engine.run(tokens(BLOCK + 1))
    engine.add(tokens(100), reads_cache=first_reads_cache)
    engine.add(tokens(80))
    with pytest.raises(WrongByteError):
        engine.drain()


def test_what_lies_before_a_window_may_be_anything(root: Path) -> None:
    engine = bare(root, SHAPES["sliding"])
    request = engine.add(tokens(9 * BLOCK), 4)
    while request.num_output_tokens < 1:
        engine.step()
    for part in engine.ranks[0].memory.parts:
        if part.like.kind == "sliding":
            table = engine._courses[request.request_id].tables[part.group_id]
            block, offset = divmod(part.first_read(request.num_computed_tokens), BLOCK)
            assert offset
            part.memory[:, table[block], :, :offset] = GARBAGE
    engine.drain()
    assert request.num_output_tokens == 4


def test_drafts_are_partly_right(root: Path) -> None:
    engine = bare(root, SHAPES["guessed by lookup"])
    steps = engine.steps
    request = engine.run(tokens(40), 60)
    # One token a step without drafts, four with none that is wrong.
    assert 60 / 4 < engine.steps - steps < 60
    plain = bare(root, SHAPES["full"])
    assert list(plain.run(tokens(40), 60).output_token_ids) == list(request.output_token_ids)
