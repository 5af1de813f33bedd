"""`umbp replay`, on a made trace: conversations that go on, one after the other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from umbp.cli.replay import replay


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Ten conversations of four turns; each turn adds a block to its conversation."""
    lines = [
        {
            "timestamp": 1000 * (10 * turn + talk),
            "input_length": 512 * (turn + 1),
            "output_length": 50,
            "hash_ids": [100 * talk + block for block in range(turn + 1)],
        }
        for turn in range(4)
        for talk in range(10)
    ]
    path = tmp_path / "talks.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def run(*args: object) -> str:
    result = CliRunner().invoke(replay, [str(each) for each in args])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("policy", ["lru", "hazard"])
def test_a_pool_that_holds_everything_restores_all_but_new_blocks(trace: Path, policy: str) -> None:
    report = json.loads(run(trace, "--policy", policy, "--pool", "40", "--json"))
    assert report["requests"] == 40
    assert report["different_blocks"] == 40
    assert report["references"] == 100
    assert report["boundless_hit_rate"] == 0.6
    (row,) = report["results"]
    assert row["pool_blocks"] == 40
    assert row["pool_tokens"] == 40 * 512
    assert row["hit_rate"] == row["lru_hit_rate"] == row["optimal_hit_rate"] == 0.6


def test_sizes_are_shares_or_blocks_and_come_in_order(trace: Path) -> None:
    report = json.loads(
        run(trace, "--pool", "50%", "--pool", "3", "--pool", "20", "--token-bytes", "4KiB", "--json")
    )
    assert [row["pool_blocks"] for row in report["results"]] == [3, 20]
    assert [row["pool_bytes"] for row in report["results"]] == [3 * 512 * 4096, 20 * 512 * 4096]
    for row in report["results"]:
        assert row["hit_rate"] <= row["optimal_hit_rate"]


def test_the_table_names_the_pool_that_pays(trace: Path) -> None:
    text = run(trace, "--policy", "lru", "--token-bytes", "1MiB")
    assert "40 requests, 100 full blocks of 512 tokens, 40 different" in text
    assert "restores 60.00 %" in text
    assert "under leaf-first LRU" in text
    assert max(map(len, text.splitlines()[:-1])) <= 100


def test_prompts_that_share_nothing_are_said_to_need_no_pool(tmp_path: Path) -> None:
    path = tmp_path / "once.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}\n')
    assert "no pool pays" in run(path, "--pool", "1")


@pytest.mark.parametrize("size", ["0", "0%", "101%", "many", "-3"])
def test_a_size_that_is_none_is_refused(trace: Path, size: str) -> None:
    result = CliRunner().invoke(replay, [str(trace), "--pool", size])
    assert result.exit_code == 2
    assert "at most 100%" in result.output or "No such option" in result.output
