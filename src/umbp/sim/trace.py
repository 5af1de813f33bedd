"""Recorded requests: who asked when for which blocks, without their text.

Two formats, each one JSON object a line, plain or compressed by xz or gzip:

- Mooncake's (of the FAST'25 paper's public traces): `timestamp` (ms), `input_length`, `output_length`
  (tokens), `hash_ids`, one id for each 512 tokens begun;
- `kvtrace-runs-1`: a first line `{"format": "kvtrace-runs-1", "block_tokens": N}`, then for each request `t`
  (ms), `in`, `out` (tokens), `e` (finish: 0 unknown, 1 tool use, 2 end of turn, 3 other) and `r`, its ids as
  runs `[first, count]`.

In both an equal id means an equal prefix up to there. A prompt's last block counts only if it is full:
engines cache no others.
"""

from __future__ import annotations

import gzip
import json
import lzma
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, TextIO, TypeAlias

import numpy as np
import numpy.typing as npt

from umbp.errors import ConfigError

MOONCAKE_BLOCK_TOKENS = 512
RUNS_FORMAT = "kvtrace-runs-1"
FINISHES = ("", "tool_calls", "end_turn", "")
"""The finish reasons of the runs format, by its numbers, as `Pool.note` takes them."""

Blocks = npt.NDArray[np.int64]
Row: TypeAlias = tuple[float, Sequence[int], int, str]
"""Time in s, ids from the root, output tokens, finish."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One prompt: its full blocks from the root on, numbered from 0 within the trace."""

    time_s: float
    blocks: Blocks
    output_tokens: int
    finish: str


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests by time. `block_count` different blocks occur in them, numbered from 0 without gaps."""

    block_tokens: int
    requests: tuple[Request, ...]

    @cached_property
    def references(self) -> int:
        """Full blocks asked for, all requests together."""
        return sum(len(request.blocks) for request in self.requests)

    @cached_property
    def block_count(self) -> int:
        return 1 + max(
            (int(request.blocks.max()) for request in self.requests if len(request.blocks)), default=-1
        )


def read_trace(path: str | Path) -> Trace:
    """A trace file in either format. For any other file `ConfigError`, a sentence with the line's number."""
    path = Path(path)
    try:
        with _opened(path) as file:
            return _parsed(file, path.name)
    except (OSError, EOFError, UnicodeDecodeError, lzma.LZMAError) as error:
        reason = isinstance(error, OSError) and error.strerror
        raise ConfigError(f"the trace {path} can't be read: {reason or 'it is damaged or no text'}") from None


def make_trace(block_tokens: int, rows: Iterable[Row]) -> Trace:
    """A trace of rows, which are sorted by time, and whose ids are numbered anew."""
    rows = sorted(rows, key=lambda row: row[0])
    columns = [np.asarray(ids, dtype=np.int64) for _, ids, _, _ in rows]
    ids = np.concatenate(columns) if columns else np.empty(0, np.int64)
    numbers = np.unique(ids, return_inverse=True)[1]
    ends = np.cumsum([len(column) for column in columns], dtype=np.int64)[:-1]
    requests = (
        Request(time_s, blocks, output_tokens, finish)
        for (time_s, _, output_tokens, finish), blocks in zip(rows, np.split(numbers, ends), strict=False)
    )
    return Trace(block_tokens, tuple(requests))


def _opened(path: Path) -> TextIO:
    if path.suffix == ".xz":
        return lzma.open(path, "rt", encoding="utf-8")
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return path.open(encoding="utf-8")


def _parsed(file: TextIO, name: str) -> Trace:
    lines = _objects(file, name)
    first = next(lines, None)
    if first is None:
        raise ConfigError(f"the trace {name} is empty")
    if "format" not in first[1]:
        return make_trace(MOONCAKE_BLOCK_TOKENS, _rows(_mooncake_row, [first], lines, name))
    block_tokens = first[1].get("block_tokens")
    if first[1]["format"] != RUNS_FORMAT or not isinstance(block_tokens, int) or block_tokens < 1:
        raise ConfigError(
            f"the trace {name} has the format {first[1]['format']!r}; known are {RUNS_FORMAT!r} with its "
            "block_tokens, and Mooncake's, which has no header"
        )
    return make_trace(block_tokens, _rows(lambda row: _runs_row(row, block_tokens), [], lines, name))


def _objects(file: TextIO, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise ConfigError(f"line {number} of the trace {name} is no JSON object; a trace has one a line")
        yield number, value


def _rows(
    parse: Callable[[dict[str, Any]], Row], first: list[Any], rest: Iterator[Any], name: str
) -> Iterator[Row]:
    for number, row in (*first, *rest):
        try:
            yield parse(row)
        except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
            what = f"lacks {error}" if isinstance(error, KeyError) else "has a wrong value"
            raise ConfigError(
                f"line {number} of the trace {name} {what}; see the formats in umbp.sim.trace"
            ) from None


def _mooncake_row(row: dict[str, Any]) -> Row:
    ids = row["hash_ids"]
    full = row["input_length"] // MOONCAKE_BLOCK_TOKENS
    if not 0 <= full <= len(ids):
        raise ValueError
    full_ids = _ids([int(each) for each in ids[:full]])
    return _seconds(row["timestamp"]), full_ids, int(row["output_length"]), ""


def _runs_row(row: dict[str, Any], block_tokens: int) -> Row:
    full = row["in"] // block_tokens
    numbers = chain.from_iterable(range(first, first + count) for first, count in row["r"])
    return _seconds(row["t"]), _ids(list(islice(numbers, full))), int(row["out"]), FINISHES[row.get("e", 0)]


def _ids(numbers: list[int]) -> list[int]:
    """`ValueError` unless they can be held in 64 bits."""
    if numbers and not (min(numbers) >= -(1 << 63) and max(numbers) < 1 << 63):
        raise ValueError
    return numbers


def _seconds(time_ms: float) -> float:
    if not math.isfinite(time_ms):
        raise ValueError
    return time_ms / 1000
