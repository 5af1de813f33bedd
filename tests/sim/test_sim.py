"""The exact curves against what they stand for, on chains from small random trees; the readers of traces."""

from __future__ import annotations

import gzip
import json
import lzma
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from umbp.errors import ConfigError
from umbp.sim import Trace, lru_curve, optimal_hits, read_trace, replay
from umbp.sim.optimum import next_uses
from umbp.sim.trace import make_trace


def trace_of(paths: list[list[int]], gap_s: float = 1.0) -> Trace:
    """Chains as paths in a tree: the id of a block is its whole path."""
    ids: dict[tuple[int, ...], int] = {}
    rows = []
    for number, path in enumerate(paths):
        chain = [ids.setdefault(tuple(path[: end + 1]), len(ids)) for end in range(len(path))]
        rows.append((number * gap_s, chain, 10, ""))
    return make_trace(512, rows)


def small_traces(requests: int, depth: int) -> st.SearchStrategy[Trace]:
    paths = st.lists(st.integers(0, 2), max_size=depth)
    return st.lists(paths, min_size=1, max_size=requests).map(trace_of)


def lru_hits(trace: Trace, pool_blocks: int) -> int:
    """Leaf-first LRU in a plain list, old to young."""
    stored: list[int] = []
    hits = 0
    for request in trace.requests:
        chain = request.blocks.tolist()
        hits += next((i for i, block in enumerate(chain) if block not in stored), len(chain))
        for block in reversed(chain):
            if block in stored:
                stored.remove(block)
            stored.append(block)
        stored = stored[max(0, len(stored) - pool_blocks) :]
    return hits


def best_hits(trace: Trace, pool_blocks: int) -> int:
    """Every choice of what to keep, tried: sets of stored blocks, with the hits that led there."""
    reached = {frozenset[int](): 0}
    for request in trace.requests:
        chain = request.blocks.tolist()
        after: dict[frozenset[int], int] = {}
        for stored, hits_before in reached.items():
            found = next((i for i, block in enumerate(chain) if block not in stored), len(chain))
            hits = hits_before + found
            blocks = sorted(stored | set(chain))
            for choice in product([False, True], repeat=len(blocks)):
                kept = frozenset(block for block, is_kept in zip(blocks, choice, strict=True) if is_kept)
                if len(kept) <= pool_blocks:
                    after[kept] = max(after.get(kept, 0), hits)
        reached = after
    return max(reached.values())


@given(small_traces(requests=30, depth=6))
@settings(deadline=None, max_examples=200)
def test_the_curve_is_leaf_first_lru_at_every_size(trace: Trace) -> None:
    curve = lru_curve(trace).tolist()
    assert curve == [lru_hits(trace, blocks) for blocks in range(trace.block_count + 1)]


@given(small_traces(requests=6, depth=3), st.integers(0, 4))
@settings(deadline=None, max_examples=100)
def test_no_choice_of_what_to_keep_beats_the_optimum_and_one_reaches_it(trace: Trace, blocks: int) -> None:
    assert optimal_hits(next_uses(trace), blocks) == best_hits(trace, blocks)


@given(small_traces(requests=25, depth=5), st.integers(1, 12))
@settings(deadline=None, max_examples=40)
def test_the_real_pool_hits_what_the_curve_says_and_no_policy_exceeds_the_optimum(
    trace: Trace, blocks: int
) -> None:
    curve = lru_curve(trace)
    assert replay(trace, "lru", blocks) == curve[min(blocks, trace.block_count)]
    assert replay(trace, "hazard", blocks) <= optimal_hits(next_uses(trace), blocks)


def test_two_replays_of_a_trace_are_alike() -> None:
    trace = trace_of([[n % 3, n % 7, n % 11, n] for n in range(400)], gap_s=7.0)
    assert replay(trace, "hazard", 60) == replay(trace, "hazard", 60)


def write(path: Path, text: str) -> Path:
    data = text.encode()
    path.write_bytes({".xz": lzma.compress, ".gz": gzip.compress}.get(path.suffix, bytes)(data))
    return path


MOONCAKE = [
    {"timestamp": 3000, "input_length": 1100, "output_length": 7, "hash_ids": [4, 90, 17]},
    {"timestamp": 1000, "input_length": 512, "output_length": 1, "hash_ids": [4]},
    {"timestamp": 2000, "input_length": 5, "output_length": 1, "hash_ids": [8]},
]


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.xz", "trace.jsonl.gz"])
def test_of_a_mooncake_trace_full_blocks_are_read_in_the_order_of_time(tmp_path: Path, name: str) -> None:
    trace = read_trace(write(tmp_path / name, "\n".join(map(json.dumps, MOONCAKE)) + "\n"))
    assert trace.block_tokens == 512
    assert [request.time_s for request in trace.requests] == [1.0, 2.0, 3.0]
    assert [request.blocks.tolist() for request in trace.requests] == [[0], [], [0, 1]]
    assert [request.output_tokens for request in trace.requests] == [1, 1, 7]
    assert (trace.references, trace.block_count) == (3, 2)


def test_runs_are_read_with_their_finish(tmp_path: Path) -> None:
    lines = [
        {"format": "kvtrace-runs-1", "block_tokens": 64},
        {"t": 500, "in": 300, "out": 9, "s": 0, "e": 1, "r": [[10, 2], [40, 3]]},
        {"t": 900, "in": 130, "out": 9, "s": 0, "e": 2, "r": [[10, 2]]},
    ]
    trace = read_trace(write(tmp_path / "t.runs", "\n".join(map(json.dumps, lines))))
    assert trace.block_tokens == 64
    assert [request.blocks.tolist() for request in trace.requests] == [[0, 1, 2, 3], [0, 1]]
    assert [request.finish for request in trace.requests] == ["tool_calls", "end_turn"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "is empty"),
        ("not json\n", "line 1 of the trace t.jsonl is no JSON object"),
        ('{"timestamp": 1}\n', "line 1 of the trace t.jsonl lacks 'hash_ids'"),
        ('{"format": "other"}\n', "has the format 'other'"),
        ("[" * 100_000, "line 1 of the trace t.jsonl is no JSON object"),
        (json.dumps(MOONCAKE[0] | {"input_length": -600}), "line 1 of the trace t.jsonl has a wrong value"),
        (
            json.dumps(MOONCAKE[0] | {"hash_ids": [2**70] * 9}),
            "line 1 of the trace t.jsonl has a wrong value",
        ),
        (
            json.dumps(MOONCAKE[0] | {"hash_ids": [float("inf")] * 9}),
            "line 1 of the trace t.jsonl has a wrong value",
        ),
        (
            json.dumps(MOONCAKE[0] | {"timestamp": float("nan")}),
            "line 1 of the trace t.jsonl has a wrong value",
        ),
        (
            json.dumps(MOONCAKE[0])
            + '\n\n{"timestamp": 1, "input_length": 5000, "output_length": 1, "hash_ids": [1]}',
            "line 3 of the trace t.jsonl has a wrong value",
        ),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        read_trace(write(tmp_path / "t.jsonl", text))
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.xz"
    path.write_bytes(lzma.compress(json.dumps(MOONCAKE[0]).encode() * 50)[:-20])
    with pytest.raises(ConfigError, match="can't be read"):
        read_trace(path)
