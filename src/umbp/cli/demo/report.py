"""What the demo tells: a table for people, one JSON object for programs."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

import umbp
from umbp.cli.demo.engine import Answer
from umbp.cli.demo.measure import Measurement, Round

_WIDEST = 1000


def versions(engine: Mapping[str, Any], model: str) -> dict[str, str]:
    """What was measured with: `engine` is the engine's own description of itself."""
    return {
        "umbp": umbp.__version__,
        "vllm": str(engine["vllm"]),
        "torch": str(engine["torch"]),
        "python": platform.python_version(),
        "model": model,
    }


def as_json(result: Measurement, used: Mapping[str, str]) -> dict[str, Any]:
    """One object; times are medians over the rounds in seconds, counts the least of all rounds."""
    last = result.rounds[-1]
    return {
        "ttft_cold_s": result.cold_s,
        "ttft_engine_hit_s": result.engine_hit_s,
        "ttft_restored_s": result.restored_s,
        "restored_over_engine_hit": result.restored_s / result.engine_hit_s,
        "restored_over_cold": result.restored_s / result.cold_s,
        "prompt_tokens": last.cold.prompt_tokens,
        "tokens_cached_by_engine": min(each.engine_hit.cached_tokens for each in result.rounds),
        "tokens_restored": result.tokens_restored,
        "bytes_restored": result.bytes_restored,
        "tokens_failed": sum(each.failed_tokens for each in result.rounds),
        "identical": result.is_identical,
        "control_differs": result.is_control_different,
        "control_tokens_cached": result.control.cached_tokens,
        "answer": last.restored.text,
        "rounds": [_round(each) for each in result.rounds],
        "problems": result.problems(),
        "versions": dict(used),
    }


def _round(each: Round) -> dict[str, Any]:
    return {
        "ttft_cold_s": each.cold.ttft_s,
        "ttft_engine_hit_s": each.engine_hit.ttft_s,
        "ttft_restored_s": each.restored.ttft_s,
        "tokens_restored": each.restored_tokens,
        "bytes_restored": each.restored_bytes,
        "identical": each.is_identical,
    }


def show(console: Console, result: Measurement, used: Mapping[str, str]) -> None:
    """The table, as lines where it doesn't fit, and what it means."""
    last = result.rounds[-1]
    title = f"{last.cold.prompt_tokens} tokens, time to first token, median of {len(result.rounds)}"
    rows = _rows(result)
    table = Table(title=title, title_justify="left")
    for column in ("the document was", "seconds", "from .. to", "of cold", "reused"):
        table.add_column(column, justify="right" if table.columns else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    if console.measure(table, options=console.options.update(width=_WIDEST)).maximum <= console.width:
        console.print(table)
    else:
        console.print(title, style="italic", highlight=False)
        for name, seconds, span, of_cold, cached in rows:
            console.print(f"{name}:", highlight=False)
            console.print(f"  {seconds} s, {of_cold} of cold")
            console.print(f"  from {span} s")
            console.print(f"  {cached} tokens reused")
    moved = f"{result.tokens_restored} tokens, {result.bytes_restored / 1e6:.1f} MB"
    console.print(
        f"Restored a round: {moved}; {result.restored_s / result.engine_hit_s:.2f} of the engine's own hit."
    )
    same = "the same text, tokens and probabilities to the bit" if result.is_identical else "NOT the same"
    console.print(f"Restored against the engine's own cache: {same}.")
    differs = "other probabilities" if result.is_control_different else "NO other probabilities"
    console.print(
        f"Control, one early word changed: {result.control.cached_tokens} tokens reused, {differs}."
    )
    console.print(f"The answer, restored: {_one_line(last.restored.text)!r}", highlight=False, markup=False)
    console.print(
        ", ".join(f"{name} {value}" for name, value in used.items()),
        style="dim",
        highlight=False,
        markup=False,
    )


def _rows(result: Measurement) -> list[tuple[str, str, str, str, str]]:
    return [
        (name, f"{time_s:.3f}", _span(answers), f"{time_s / result.cold_s:.3f}", _cached(answers))
        for name, time_s, answers in (
            ("new (cold)", result.cold_s, [each.cold for each in result.rounds]),
            ("in vLLM's own cache", result.engine_hit_s, [each.engine_hit for each in result.rounds]),
            ("in UMBP's pool", result.restored_s, [each.restored for each in result.rounds]),
        )
    ]


def _span(answers: list[Answer]) -> str:
    times = [answer.ttft_s for answer in answers]
    return f"{min(times):.3f} .. {max(times):.3f}"


def _cached(answers: list[Answer]) -> str:
    return str(min(answer.cached_tokens for answer in answers))


def _one_line(text: str) -> str:
    return " ".join(text.split())
