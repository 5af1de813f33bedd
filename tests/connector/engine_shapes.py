"""The kinds of engines that random lives are lives of."""

from __future__ import annotations

from dataclasses import replace

from umbp.testing.engine import BLOCK, Shape
from umbp.testing.engine.shape import Layers

FULL = Layers("full", 1)
WINDOWS = Layers("sliding", 2, 40)
STATES = Layers("mamba", 2)
WIDE, WIDE_STATES = replace(FULL, block_tokens=2 * BLOCK), replace(STATES, block_tokens=2 * BLOCK)

SHAPES: dict[str, Shape] = {
    "full": Shape(),
    "full on ranks": Shape(ranks=2),
    "full in flight": Shape(depth=2),
    "full, other runner": Shape(runner=2),
    "windows": Shape(layers=(FULL, WINDOWS)),
    "windows alone": Shape(layers=(WINDOWS,)),
    "windows in wide blocks": Shape(layers=(FULL, replace(WINDOWS, head_size=2)), ranks=2),
    "windows in flight": Shape(layers=(FULL, WINDOWS), depth=2),
    "chunks": Shape(layers=(FULL, Layers("chunked", 2, 64))),
    "states": Shape(layers=(FULL, STATES)),
    "states on ranks": Shape(layers=(FULL, STATES), ranks=2, runner=2),
    "windows and states": Shape(layers=(FULL, Layers("sliding", 1, 40), Layers("mamba", 1))),
    "mla": Shape(layers=(Layers("mla", 2),), ranks=2),
    "one head for two ranks": Shape(ranks=2, kv_heads=1),
    "stages": Shape(stages=2, ranks=2),
    "stages with windows": Shape(stages=2, layers=(Layers("full", 2), Layers("sliding", 4, 40))),
    "windows on one stage": Shape(stages=2, depth=2, layers=(FULL, Layers("sliding", 1, 40))),
    "dealt tokens": Shape(ranks=2, kv_heads=1, dcp=2),
    "dealt tokens on stages": Shape(ranks=2, kv_heads=1, dcp=2, stages=2, depth=2),
    "dealt tokens and states": Shape(ranks=2, kv_heads=1, dcp=2, layers=(FULL, STATES)),
    "prefill shared out": Shape(pcp=2, layers=(Layers("mla", 2),)),
    "dealt among prefill ranks": Shape(pcp=2, dcp=2, layers=(Layers("mla", 2),)),
    "lookup": Shape(drafts=3),
    "drafts": Shape(drafts=2, drafter="eagle"),
    "drafts in flight": Shape(drafts=2, drafter="eagle", depth=2),
    "drafts and windows": Shape(drafts=2, drafter="mtp", layers=(FULL, WINDOWS)),
    "drafts and states": Shape(drafts=2, layers=(FULL, STATES)),
    "states inside blocks": Shape(layers=(WIDE, WIDE_STATES), match_tokens=BLOCK),
    "states inside blocks in flight": Shape(
        layers=(WIDE, WIDE_STATES), match_tokens=BLOCK, depth=2, runner=2
    ),
    "states inside wide blocks": Shape(
        layers=(replace(FULL, block_tokens=4 * BLOCK), STATES, WINDOWS), match_tokens=BLOCK, ranks=2
    ),
    "states inside blocks and drafts": Shape(
        layers=(WIDE, WIDE_STATES), match_tokens=BLOCK, drafts=2, drafter="eagle"
    ),
    "states inside dealt blocks": Shape(
        ranks=2, kv_heads=1, dcp=2, layers=(FULL, STATES), match_tokens=BLOCK // 2
    ),
    "three groups of two heads": Shape(ranks=4, kv_heads=2, layers=(FULL, WINDOWS)),
    "three stages": Shape(stages=3, layers=(Layers("full", 3), Layers("mamba", 3))),
}
"""Every kind of engine."""

LAYOUTS = ["LBNHC", "LBHNC", "BLNHC", "BLHNC", "LHBNC", "BHLNC"]
"""Every order in which the bytes of layers, blocks, tokens and heads may lie."""


def smallest_pool(shape: Shape) -> int:
    """Blocks that a request of full length needs, and the null block."""
    groups = {"full": 16, "mla": 16, "sliding": 16, "chunked": 16, "mamba": 3 + shape.drafts}
    rarest = min(each.count for each in shape.layers)
    need = sum(-(-each.count // rarest) * groups[each.kind] for each in shape.layers)
    return need + (2 if shape.drafts else 0) + 2
