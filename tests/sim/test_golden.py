"""Real traces: the figures that are known of them, reached through the real pool and by the exact curves."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest

from umbp.sim import Trace, lru_curve, optimal_hits, read_trace, replay
from umbp.sim.optimum import next_uses

TRACES = os.environ.get("UMBP_TRACES")
pytestmark = pytest.mark.skipif(not TRACES, reason="UMBP_TRACES names no folder with request traces")

FILES = {
    "conversation": "conversation_trace.jsonl.xz",
    "synthetic": "synthetic_trace.jsonl.xz",
    "cc_v8": "cc_v8_local_512.runs.jsonl.xz",
}
PERCENT = (1, 2, 5, 10, 20, 50)
LRU = {
    "conversation": (0.05439, 0.08015, 0.20221, 0.28824, 0.35847, 0.37846),
    "synthetic": (0.03698, 0.07754, 0.15503, 0.25739, 0.39519, 0.60101),
    "cc_v8": (0.75152, 0.91655, 0.95640, 0.96235, 0.96320, 0.96354),
}
HAZARD = {
    "conversation": (0.0974, 0.1313, 0.2204, 0.3011, 0.3562, 0.3792),
    "synthetic": (0.0441, 0.0843, 0.1713, 0.2785, 0.4499, 0.6463),
    "cc_v8": (0.7798, 0.9206, 0.9561, 0.9623, 0.9631, 0.9635),
}
OPTIMUM = {
    "conversation": (0.250, 0.321, 0.382, 0.382, 0.382, 0.382),
    "synthetic": (0.182, 0.259, 0.393, 0.510, 0.615, 0.659),
    "cc_v8": (0.866, 0.947, 0.964, 0.964, 0.964, 0.964),
}
HALF_A_POINT = 0.005

chat = pytest.mark.parametrize("name", ["conversation", "synthetic"])
coding = pytest.mark.parametrize("name", [pytest.param("cc_v8", marks=pytest.mark.slow)])


@cache
def trace_of(name: str) -> Trace:
    assert TRACES
    return read_trace(Path(TRACES) / FILES[name])


def blocks_of(trace: Trace, percent: int) -> int:
    return round(percent / 100 * trace.block_count)


def check_exact_curves(name: str) -> None:
    trace = trace_of(name)
    curve, uses = lru_curve(trace), next_uses(trace)
    sizes = [blocks_of(trace, percent) for percent in PERCENT]
    assert tuple(round(int(curve[blocks]) / trace.references, 5) for blocks in sizes) == LRU[name]
    best = [optimal_hits(uses, blocks) / trace.references for blocks in sizes]
    assert best == pytest.approx(OPTIMUM[name], abs=0.0006)


@chat
def test_the_exact_curves_of_chat_are_the_golden_ones(name: str) -> None:
    check_exact_curves(name)


@coding
def test_the_exact_curves_of_coding_agents_are_the_golden_ones(name: str) -> None:
    check_exact_curves(name)


def check_real_pool(name: str, percent: int) -> None:
    trace, at = trace_of(name), PERCENT.index(percent)
    blocks = blocks_of(trace, percent)
    assert round(replay(trace, "lru", blocks) / trace.references, 5) == LRU[name][at]
    rate = replay(trace, "hazard", blocks) / trace.references
    assert rate == pytest.approx(HAZARD[name][at], abs=HALF_A_POINT)


@pytest.mark.parametrize(("name", "percent"), [("conversation", 1), ("synthetic", 20)])
def test_the_real_pool_reaches_the_golden_rates_of_chat(name: str, percent: int) -> None:
    check_real_pool(name, percent)


@pytest.mark.slow
@chat
@pytest.mark.parametrize("percent", PERCENT)
def test_the_real_pool_reaches_the_golden_rates_of_chat_at_every_size(name: str, percent: int) -> None:
    check_real_pool(name, percent)


@coding
@pytest.mark.parametrize("percent", PERCENT)
def test_the_real_pool_reaches_the_golden_rates_of_coding_agents(name: str, percent: int) -> None:
    check_real_pool(name, percent)
