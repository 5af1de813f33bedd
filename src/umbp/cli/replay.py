"""`umbp replay`: how large a pool pays, from a trace of real requests."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from umbp.kinds import Size, format_size
from umbp.sim.curve import lru_curve
from umbp.sim.optimum import next_uses, optimal_hits
from umbp.sim.replay import replay as replay_through_pool
from umbp.sim.trace import Trace, read_trace

DEFAULT_POOLS = ("1%", "2%", "5%", "10%", "20%", "50%")
WORTHWHILE = 0.9
"""The advice names the smallest pool with this share of the hits that a boundless one has."""


class PoolSize(click.ParamType[str]):
    """`5%` of the trace's different blocks, or a number of blocks."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        percent = re.fullmatch(r"(\d+(?:\.\d+)?)%", text)
        if not (percent and 0 < float(percent[1]) <= 100) and not re.fullmatch(r"[1-9]\d{0,9}", text):
            self.fail(
                f"write a share such as 5%, above 0% and at most 100%, or a number of blocks, not {value!r}",
                param,
                ctx,
            )
        return text


class Bytes(click.ParamType[int]):
    """A size as the options take it."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return Size(low=1).parse(int(value) if str(value).isdigit() else value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@dataclass(frozen=True, slots=True)
class Row:
    """One pool size: hits of full blocks, by the policy asked for, by leaf-first LRU and at best."""

    blocks: int
    hits: int
    lru_hits: int
    optimal_hits: int


@click.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False))
@click.option(
    "--policy",
    type=click.Choice(["lru", "hazard"]),
    default="hazard",
    show_default=True,
    help="The eviction policy; leaf-first LRU is shown beside any.",
)
@click.option(
    "--pool",
    "pools",
    type=PoolSize(),
    multiple=True,
    help="A pool size: 5% of the trace's different blocks, or a number of blocks. May be repeated.",
)
@click.option("--token-bytes", type=Bytes(), help="KV bytes of a token, to show pool sizes in bytes as well.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
def replay(trace: str, policy: str, pools: tuple[str, ...], token_bytes: int | None, as_json: bool) -> None:
    """Replays the requests of TRACE through pools of several sizes: what each would have restored.

    TRACE is a file in Mooncake's format or in runs (see umbp.sim.trace), plain, .xz or .gz. Rates are shares
    of all full blocks that prompts asked for. "lru" is exact; "at best" is what no policy can exceed.
    """
    requests = read_trace(trace)
    curve = lru_curve(requests)
    uses = next_uses(requests)
    rows = []
    for blocks in sorted({_blocks(text, requests.block_count) for text in pools or DEFAULT_POOLS}):
        lru_hits = int(curve[min(blocks, requests.block_count)])
        hits = lru_hits if policy == "lru" else _replayed(requests, policy, blocks)
        rows.append(Row(blocks, hits, lru_hits, optimal_hits(uses, blocks)))
    boundless, enough = int(curve[-1]), int((curve >= WORTHWHILE * curve[-1]).argmax())
    if as_json:
        report = _as_dict(requests, policy, rows, boundless, enough, token_bytes)
        click.echo(json.dumps(report, indent=2))
        return
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(_table(requests, policy, rows, token_bytes))
    console.print(escape(_advice(requests, boundless, enough, token_bytes)), soft_wrap=True)


def _blocks(text: str, different: int) -> int:
    share = text.removesuffix("%")
    return int(text) if share == text else max(1, round(float(share) / 100 * different))


def _replayed(trace: Trace, policy: str, blocks: int) -> int:
    with click.progressbar(
        length=len(trace.requests),
        label=f"a pool of {blocks} blocks",
        file=sys.stderr,
        hidden=not sys.stderr.isatty(),
        update_min_steps=1000,
    ) as bar:
        return replay_through_pool(trace, policy, blocks, lambda done: bar.update(1))


def _rate(hits: int, trace: Trace) -> float:
    return hits / trace.references if trace.references else 0.0


def _as_dict(
    trace: Trace, policy: str, rows: list[Row], boundless: int, enough: int, token_bytes: int | None
) -> dict[str, Any]:
    return {
        "requests": len(trace.requests),
        "block_tokens": trace.block_tokens,
        "references": trace.references,
        "different_blocks": trace.block_count,
        "boundless_hit_rate": _rate(boundless, trace),
        "worthwhile_pool_blocks": enough,
        "policy": policy,
        "results": [
            {
                "pool_blocks": row.blocks,
                "pool_tokens": row.blocks * trace.block_tokens,
                "pool_bytes": None if token_bytes is None else row.blocks * trace.block_tokens * token_bytes,
                "hit_rate": _rate(row.hits, trace),
                "lru_hit_rate": _rate(row.lru_hits, trace),
                "optimal_hit_rate": _rate(row.optimal_hits, trace),
            }
            for row in rows
        ],
    }


def _table(trace: Trace, policy: str, rows: list[Row], token_bytes: int | None) -> Table:
    table = Table(
        title=f"{len(trace.requests):,} requests, {trace.references:,} full blocks of "
        f"{trace.block_tokens} tokens, {trace.block_count:,} different",
        title_justify="left",
    )
    columns = ["pool, blocks", "of all", "tokens", *(["bytes"] if token_bytes else []), "lru", "at best"]
    if policy != "lru":
        columns.insert(-2, policy)
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        rates = [_percent(_rate(hits, trace)) for hits in (row.hits, row.lru_hits, row.optimal_hits)]
        size = [
            f"{row.blocks:,}",
            _percent(row.blocks / trace.block_count if trace.block_count else 0),
            f"{row.blocks * trace.block_tokens:,}",
        ]
        if token_bytes:
            size.append(format_size(row.blocks * trace.block_tokens * token_bytes))
        table.add_row(*size, *(rates if policy != "lru" else rates[1:]))
    return table


def _advice(trace: Trace, boundless: int, enough: int, token_bytes: int | None) -> str:
    if boundless == 0:
        return "No prompt shares a full block with an earlier one: no pool pays."
    tokens = enough * trace.block_tokens
    size = f"{enough:,} blocks ({tokens:,} tokens"
    size += f", {format_size(tokens * token_bytes)})" if token_bytes else ")"
    return (
        f"However large, a pool restores {_percent(_rate(boundless, trace))}; {WORTHWHILE:.0%} of that takes "
        f"{size} under leaf-first LRU."
    )


def _percent(share: float) -> str:
    return f"{100 * share:.2f} %"
