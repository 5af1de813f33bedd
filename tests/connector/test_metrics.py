"""What is counted under which tier and for which reason; how long jobs took; and who shows it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from scripted import BLOCK, ScriptedEngine, tokens
from scripted_runtime import PickyRuntime, plain

from umbp.connector.stats import COUNTERS, GAUGES, HISTOGRAMS, LABELS
from umbp.data import BlockTransferPlan, LossReason, TransferJobState, reason_of
from umbp.testing.engine.shape import Layers
from umbp.testing.reference import ReferenceRuntime

OBJECT_BYTES = 2 * 2 * BLOCK * 2 * 4 * 2
"""Of one rank's block: two layers and two heads with keys and values of four numbers each."""


def series(engine: ScriptedEngine, name: str) -> dict[str, float]:
    """A counter's amounts by the values of its labels."""
    found = engine.stats.series.items()
    return {key.partition("|")[2]: amount for key, amount in found if key.partition("|")[0] == name}


@pytest.mark.parametrize("ranks", [1, 2], ids=["tp1", "tp2"])
def test_tokens_and_bytes_are_counted_by_the_tier_that_keeps_them(
    make_pool: Any, make_engine: Any, ranks: int
) -> None:
    engine = make_engine(make_pool(), ranks=ranks)
    engine.run(tokens(100))
    engine.forget_prefixes()
    engine.run(tokens(100))
    for name in ("stored_tokens", "hit_tokens", "loaded_tokens"):
        assert series(engine, name) == {"dram": 96}
    for name in ("stored_bytes", "hit_bytes", "loaded_bytes"):
        assert series(engine, name) == {"dram": 6 * OBJECT_BYTES * ranks}
    assert engine.count("asked_bytes") == 2 * 6 * OBJECT_BYTES * ranks, "by the first request too"
    assert engine.count("failed_load_bytes") == engine.count("dropped_store_bytes") == 0


FULL, WINDOWS = Layers("full", 1), Layers("sliding", 2, 40)


@pytest.mark.parametrize(
    "shape",
    [
        {"layers": (FULL, WINDOWS)},
        {"layers": (WINDOWS,)},
        {"layers": (FULL, Layers("sliding", 2, 40, head_size=2)), "ranks": 2},
        {"layers": (FULL, Layers("chunked", 2, 64))},
        {"layers": (Layers("mla", 2),), "ranks": 2},
        {"layers": (FULL, Layers("sliding", 1, 40)), "stages": 2},
        {"kv_heads": 1, "ranks": 2, "dcp": 2},
    ],
    ids=["windows", "windows_alone", "wide_windows", "chunks", "mla", "stages", "dealt"],
)
def test_what_was_asked_for_and_hit_is_told_in_the_bytes_that_are_then_loaded(
    make_pool: Any, make_engine: Any, shape: dict[str, Any]
) -> None:
    engine = make_engine(make_pool(), **shape)
    engine.run(tokens(200))
    assert engine.count("hit_bytes") == 0
    asked_bytes, asked_tokens = engine.count("asked_bytes"), engine.count("asked_tokens")
    engine.forget_prefixes()
    engine.run(tokens(200))
    assert engine.count("hit_tokens") == engine.count("loaded_tokens") == asked_tokens
    assert engine.count("hit_bytes") == engine.count("loaded_bytes") == asked_bytes > 0


def test_a_runtime_that_names_no_tier_is_counted_as_another(make_engine: Any) -> None:
    runtime = PickyRuntime(ReferenceRuntime(), lambda rank, index, key: False)
    engine = make_engine(plain(runtime, tier="other"))
    engine.run(tokens(40))
    assert series(engine, "stored_tokens") == {"other": 32}


@pytest.mark.parametrize(
    ("error", "reason"), [("damaged: a bit", "damaged"), ("lost: somehow", "failed"), ("absent: x", "absent")]
)
def test_failed_loads_are_counted_by_the_reason_that_the_job_tells(
    make_pool: Any, make_engine: Any, error: str, reason: str
) -> None:
    lose = PickyRuntime(make_pool(), lambda rank, index, key: rank == 1 and index in (2, 3), error)
    engine = make_engine(lose, ranks=2)
    engine.run(tokens(100))
    engine.forget_prefixes()
    engine.run(tokens(100))
    assert series(engine, "failed_load_tokens") == {f"dram|{reason}": 32}
    assert series(engine, "failed_load_bytes") == {f"dram|{reason}": 2 * OBJECT_BYTES}
    assert series(engine, "loaded_tokens") == {"dram": 64}


def test_what_finds_no_room_and_what_comes_behind_it_are_dropped_for_different_reasons(
    make_pool: Any, make_engine: Any
) -> None:
    engine = make_engine(make_pool(4), max_batched_tokens=128)
    engine.run(tokens(100), 40)
    assert series(engine, "stored_tokens") == {"dram": 64}
    assert series(engine, "dropped_store_tokens")["dram|full"] == 32
    assert series(engine, "dropped_store_bytes") == {"dram|full": 2 * OBJECT_BYTES}


def test_what_comes_behind_a_lost_block_is_dropped_in_tokens_and_in_the_bytes_of_all_ranks(
    make_pool: Any, make_engine: Any
) -> None:
    pool = PickyRuntime(make_pool(), error="full: no room")
    pool.refuses = lambda rank, index, key: rank == 0 and index == 1
    engine = make_engine(pool, max_batched_tokens=2 * BLOCK, ranks=2)
    engine.run(tokens(6 * BLOCK + 1))
    assert series(engine, "stored_tokens") == {"dram": BLOCK}
    assert series(engine, "stored_bytes") == {"dram": 3 * OBJECT_BYTES}
    assert series(engine, "dropped_store_tokens") == {"dram|full": BLOCK, "dram|behind": 4 * BLOCK}
    assert series(engine, "dropped_store_bytes") == {
        "dram|full": OBJECT_BYTES,
        "dram|behind": 4 * OBJECT_BYTES * 2,
    }


def test_a_hit_that_is_not_worth_a_load_is_counted_once(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(make_pool(), {"min_load_tokens": 128})
    engine.run(tokens(100))
    engine.forget_prefixes()
    engine.run(tokens(100))
    assert series(engine, "passed_hit_tokens") == {"dram": 96}
    assert series(engine, "passed_hit_bytes") == {"dram": 6 * OBJECT_BYTES}
    assert engine.count("hit_tokens") == engine.count("loaded_tokens") == 0
    assert engine.count("asked_tokens") == 2 * 96


def test_what_a_preempted_request_gets_back_is_not_counted_as_a_hit_again(
    make_pool: Any, make_engine: Any
) -> None:
    engine = make_engine(make_pool())
    engine.run(tokens(100))
    engine.forget_prefixes()
    request = engine.add(tokens(100), 20)
    while request.num_output_tokens < 3:
        engine.step()
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.drain()
    assert request.num_preemptions == 1
    assert engine.count("asked_tokens") == 96 + 96
    assert engine.count("hit_tokens") == engine.count("loaded_tokens") == 96
    assert series(engine, "reloaded_tokens") == {"dram": 96}
    assert series(engine, "reloaded_bytes") == series(engine, "loaded_bytes") == {"dram": 6 * OBJECT_BYTES}
    assert series(engine, "hit_bytes") == {"dram": 6 * OBJECT_BYTES}
    assert engine.count("failed_load_tokens") == 0


def test_every_job_of_every_rank_is_timed(make_pool: Any, make_engine: Any) -> None:
    engine = make_engine(make_pool(), ranks=2, max_batched_tokens=64)
    engine.run(tokens(100))
    assert len(engine.stats.seconds["store_job_seconds"]) == 2 * 2
    engine.forget_prefixes()
    engine.run(tokens(100))
    assert len(engine.stats.seconds["load_job_seconds"]) == 2
    assert all(seconds >= 0 for seconds in engine.stats.seconds["load_job_seconds"])
    total = sum(engine.stats.seconds["store_job_seconds"])
    assert engine.stats.counters["store_seconds"] == pytest.approx(total)


def test_evictions_are_counted_in_objects_and_in_the_pools_own_bytes(
    make_pool: Any, make_engine: Any
) -> None:
    engine = make_engine(make_pool(8))
    for seed in range(4):
        engine.run(tokens(100, seed))
    evicted = series(engine, "evicted_objects")["dram"]
    assert evicted >= 16
    assert engine.count("evicted_bytes") in (0, evicted * 4096), "the reference tells no bytes"


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"ranks": 2},
        {"layers": (FULL, WINDOWS)},
        {"layers": (Layers("sliding", 2, 40, head_size=2), FULL)},
        {"layers": (Layers("mla", 2),), "ranks": 2},
        {"layers": (FULL, Layers("sliding", 1, 40)), "stages": 2},
        {"kv_heads": 1, "ranks": 2, "dcp": 2},
    ],
    ids=["one", "ranks", "windows", "wide_windows", "mla", "stages", "dealt"],
)
def test_evicted_tokens_are_those_that_the_first_rank_has_no_more(
    make_pool: Any, make_engine: Any, shape: dict[str, Any]
) -> None:
    engine = make_engine(make_pool(28), **shape)
    prompts = [engine.run(tokens(100, seed)) for seed in range(1, 13)]
    side = engine.connector.scheduler_side
    group = side._shape.counted
    (stage, *_) = [stage for stage in side._pool._stages if stage.keeps(group.group_id)]
    names = [name for request in prompts for name in group.names(request.block_hashes)]
    left = sum(stage.handle.lookup(stage.codec.keys(names, group.group_id)))
    assert engine.count("dropped_store_tokens") == 0
    gone = engine.count("stored_tokens") - left * group.block_tokens
    assert series(engine, "evicted_tokens") == {"dram": gone}
    assert gone > 0


def test_a_jobs_error_tells_its_reason_by_its_first_word() -> None:
    job = TransferJobState([BlockTransferPlan("a", 1), BlockTransferPlan("b", 2)])
    assert reason_of(job) is LossReason.FAILED
    job.fail(["a"], "absent: not stored")
    assert reason_of(job) is LossReason.ABSENT
    job.fail(["b"], "absently")
    assert reason_of(job) is LossReason.FAILED
    job.cancel()
    assert reason_of(job) is LossReason.CANCELLED


# Who shows it


ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "dashboards" / "umbp.json"

NOT_SHOWN = {
    "load_seconds": "its sum is the histogram's",
    "store_seconds": "its sum is the histogram's",
}
"""What is exported and not on the dashboard, and why."""


def exported() -> dict[str, tuple[str, ...]]:
    """Each name that Prometheus knows, with the labels that are its own."""
    names = {f"{name}_total": LABELS.get(name, ()) for name in COUNTERS}
    names |= dict.fromkeys(GAUGES, ())
    return names | {f"{name}_bucket": ("le",) for name in HISTOGRAMS}


def dashboard() -> Any:
    return json.loads(DASHBOARD.read_text())


def queries() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", ())]


def test_the_dashboard_shows_metrics_that_there_are_and_every_one_of_them() -> None:
    shown = set(re.findall(r"vllm:umbp_(\w+)", " ".join(queries())))
    assert shown <= exported().keys()
    left_out = {name for name in exported() if name not in shown}
    assert left_out == {f"{name}_total" for name in NOT_SHOWN}


def test_the_dashboard_groups_by_labels_that_the_metrics_have() -> None:
    for query in queries():
        for labels, name in re.findall(r"sum by \(([^)]*)\) \(rate\(vllm:umbp_(\w+)", query):
            assert {label.strip() for label in labels.split(",")} <= set(exported()[name]), query


def test_the_dashboards_panels_neither_overlap_nor_share_a_number() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_dashboard_names_no_host_and_no_data_source_of_ours() -> None:
    text = DASHBOARD.read_text()
    assert not re.search(r"https?://|localhost|\d+\.\d+\.\d+\.\d+|instance=", text)
    assert set(re.findall(r'"uid": "([^"]*)"', text)) == {"umbp", "${datasource}"}


def test_the_documentation_tells_of_every_metric_with_its_labels_and_of_every_reason() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    for name, meaning in COUNTERS.items():
        labels = ", ".join(f"`{label}`" for label in LABELS.get(name, ()))
        assert f"| `vllm:umbp_{name}` | {labels + ' ' if labels else ''}| {meaning} |" in text
    for name, meaning in {**GAUGES, **HISTOGRAMS}.items():
        assert f"| `vllm:umbp_{name}` | {meaning} |" in text
    assert re.findall(r"^\| `([a-z]+)` \|", text, re.MULTILINE) == [str(reason) for reason in LossReason]
