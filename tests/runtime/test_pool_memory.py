"""The options on a pool's memory reach the pool, and what can't be had is one warning."""

from __future__ import annotations

import logging
import threading

import pytest
from thp import without_huge_pages

from umbp.data import KVLayoutDescriptor, KVRegion, RankTopology, UMBPNamespace
from umbp.errors import ConfigError
from umbp.options import parse_options
from umbp.pool.memory import memory_nodes
from umbp.runtime.embedded import EmbeddedRuntime
from umbp.runtime.factory import create_runtime
from umbp.runtime.pool_memory import progress_log
from umbp.testing.clock import TickClock
from umbp.testing.tensors import FakeTensor


def said_at_start(caplog: pytest.LogCaptureFixture, **extra: object) -> list[logging.LogRecord]:
    """A worker starts with these options and stores nothing; what its log says."""
    runtime = EmbeddedRuntime(parse_options({"capacity_bytes": "16MiB", **extra}))
    layout = KVLayoutDescriptor((KVRegion("layer", 0, 4096, 4096, 0),), RankTopology())
    worker = runtime.create_worker_handle(UMBPNamespace("n"), RankTopology(), layout)
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="vllm.umbp"):
        worker.register_buffers({"layer": FakeTensor.zeros((32, 4096))})
        for thread in threading.enumerate():
            if thread.name == "umbp-prefault":
                thread.join(timeout=60)
    worker.close()
    return list(caplog.records)


def warnings(records: list[logging.LogRecord]) -> list[str]:
    return [record.getMessage() for record in records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(("value", "count"), [(True, 1), ("auto", 0), (False, 0)])
def test_huge_pages_that_cannot_be_had_are_warned_of_once_where_they_were_asked_for(
    caplog: pytest.LogCaptureFixture, value: object, count: int
) -> None:
    with without_huge_pages():
        found = warnings(said_at_start(caplog, dram_use_hugepages=value))
    assert len(found) == count
    assert all("huge pages" in line and "works with small ones" in line for line in found)


@pytest.mark.parametrize(
    "extra",
    [
        {"dram_prefault": True},
        {"dram_prefault": "auto"},
        {"dram_prefault": False},
        {"dram_numa_node": 0},
        {},
    ],
)
def test_what_can_be_had_is_said_without_a_warning(
    caplog: pytest.LogCaptureFixture, extra: dict[str, object]
) -> None:
    if "dram_numa_node" in extra and 0 not in memory_nodes():
        pytest.skip("this kernel tells of no memory node 0")
    records = said_at_start(caplog, **extra)
    assert warnings(records) == [] or "Operation not permitted" in warnings(records)[0]
    lines = [record.getMessage() for record in records]
    assert any("the pool's memory: taken in" in line for line in lines)
    mapped = [line for line in lines if "mapped the pool's pages" in line]
    if extra.get("dram_prefault") is False:
        assert mapped == []
    else:
        (line,) = mapped
        assert ("in the background" in line) == (extra.get("dram_prefault") is not True)


@pytest.mark.parametrize("extra", [{"mode": "embedded"}, {"mode": "standalone", "pool": "p"}])
def test_a_node_that_is_not_there_stops_the_start_before_anything_is_made(extra: dict[str, object]) -> None:
    options = parse_options({"capacity_bytes": "16MiB", "dram_numa_node": 1023, **extra})
    with pytest.raises(ConfigError, match="names memory node 1023"):
        create_runtime(options)


def test_progress_is_said_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    clock = TickClock()
    with caplog.at_level(logging.INFO, logger="vllm.umbp"):
        progress = progress_log("taking it", clock)
        for done in range(40):
            progress(done << 30, 40 << 30)
            clock.advance(0.5)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 9
    assert lines[0] == "UMBP: taking it: 4 GiB of 40 GiB"
