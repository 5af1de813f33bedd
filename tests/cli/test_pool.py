"""Rules of `umbp pool`: an operator's commands, each of which does what it says or says why not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from actors import store
from click.testing import CliRunner, Result
from zygote import Zygote

from umbp.cli import cli
from umbp.errors import UMBPError
from umbp.pool import Outcome, Pool, pool_path

MIB = 1 << 20
Umbp = Callable[..., Result]


@pytest.fixture
def umbp(tmp_path: Path) -> Umbp:
    """`umbp pool ARGUMENTS --dir FOLDER`, in this process."""

    def run(*arguments: str, stdin: str | None = None) -> Result:
        return CliRunner().invoke(cli, ["pool", *arguments, "--dir", str(tmp_path)], input=stdin)

    return run


def error_of(result: Result) -> str:
    """The one sentence that `main` would print."""
    assert isinstance(result.exception, UMBPError), result.output
    text = str(result.exception)
    assert len(text.splitlines()) == 1
    return text


def report(umbp: Umbp, name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(umbp("stat", name, "--json").stdout)
    return loaded


def test_a_pools_whole_life(umbp: Umbp, tmp_path: Path) -> None:
    made = umbp("create", "one", "--size", "2MiB", "--max-size", "8MiB", "--slab-size", "256KiB")
    assert made.exit_code == 0, made.output
    assert f'"pool": "one", "pool_dir": "{tmp_path}"' in made.stdout
    assert [each["name"] for each in json.loads(umbp("list", "--json").stdout)["pools"]] == ["one"]
    with Pool.attach(pool_path(tmp_path, "one")) as pool:
        for name in ("first", "second"):
            store(pool, pool.namespace(name), [f"{name}.{i}" for i in range(8)])
        assert umbp("resize", "one", "6MiB").stdout.endswith(": 2 MiB -> 6 MiB\n")
        assert pool.capacity_bytes == 6 * MIB
        assert ": 8 objects cleared" in umbp("clear", "one", "--namespace", "second").stdout
        assert pool.lookup(["first.0", "second.0"]).tolist() == [True, False]
        assert ": 8 objects cleared" in umbp("clear", "one").stdout
        assert umbp("destroy", "one", "--yes").exit_code == 0
        assert pool.is_destroyed
    assert os.listdir(tmp_path) == []
    assert "no pool in" in umbp("list").stdout


def test_what_is_shown_is_what_is(umbp: Umbp, tmp_path: Path) -> None:
    umbp("create", "one", "--size", "1MiB", "--min-object", "4KiB", "--high-watermark", "0.9")
    with Pool.attach(pool_path(tmp_path, "one")) as pool:
        ns = pool.namespace("model [bold]odd[/bold]")
        pool.set_quota(ns, MIB // 2)
        store(pool, ns, ["a", "b", "c"])
        pins, outcomes = pool.acquire(["a"])
        assert outcomes[0] == Outcome.HIT
        shown = umbp("stat", "one").stdout
        found = report(umbp, "one")
        pool.release(pins)
    assert "model [bold]odd[/bold]" in shown
    assert "512 KiB" in shown
    assert str(os.getpid()) in shown
    assert found["namespaces"][0]["objects"] == 3
    assert found["namespaces"][0]["quota_bytes"] == MIB // 2
    assert found["processes"][0]["pinned_slots"] == 1
    assert found["counters"]["hits"] == 1
    assert found["mode"] == "0600"
    assert found["eviction_policy"] in ("lru", "hazard")
    lines = umbp("list").stdout.splitlines()
    assert lines[1].split()[:2] == ["one", "ready"]


def test_every_command_answers_programs_too(umbp: Umbp, tmp_path: Path) -> None:
    path = pool_path(tmp_path, "one")
    assert json.loads(umbp("create", "one", "--size", "1MiB", "--json").stdout)["path"] == path
    with Pool.attach(path) as pool:
        store(pool, pool.namespace("a"), ["x", "y"])
    resized = json.loads(umbp("resize", "one", "512KiB", "--json").stdout)
    assert resized == {"path": path, "before_bytes": MIB, "after_bytes": MIB // 2}
    assert json.loads(umbp("clear", "one", "--json").stdout) == {"path": path, "cleared_objects": 2}
    assert json.loads(umbp("destroy", "one", "--yes", "--json").stdout) == {"path": path, "attached_pids": []}


def test_a_pool_is_made_as_asked(umbp: Umbp, tmp_path: Path) -> None:
    made = umbp(
        *["create", "one", "--size", "1048576", "--slab-size", "64KiB", "--min-object", "8KiB"],
        *["--group", str(os.getegid()), "--prefault", "--hugepages", "off", "--eviction-policy", "hazard"],
    )
    assert made.exit_code == 0, made.output
    found = report(umbp, "one")
    assert (found["slab_bytes"], found["min_object_bytes"], found["capacity_bytes"]) == (65536, 8192, MIB)
    assert (found["group_gid"], found["mode"]) == (os.getegid(), "0660")
    assert found["eviction_policy"] == "hazard"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["create", "one", "--size", "1MiB"], "a file of that name exists"),
        (["create", "a b", "--size", "1MiB"], "a pool's name must be"),
        (["create", "two", "--size", "1MiB", "--max-size", "512KiB"], "--max-size 512 KiB is less"),
        (["create", "two", "--size", "900TiB"], "doesn't fit"),
        (["create", "two", "--size", "10KiB"], "at least 160 KiB"),
        (["create", "two", "--size", "1MiB", "--group", "no-such-group"], "no group 'no-such-group'"),
        (["create", "two", "--size", "1MiB", "--slab-size", "5000"], "multiple of 4096"),
        (["create", "two", "--size", "1MiB", "--slab-size", "2MiB"], "between one slab (2097152 bytes)"),
        (["create", "two", "--size", "1MiB", "--high-watermark", "1.5"], "watermarks must be"),
        (["create", "two", "--size", "1MiB", "--numa-node", "77"], "memory node 77"),
        (["stat", "tow"], "there is no pool 'tow' in"),
        (["stat", "onee"], "did you mean 'one'?"),
        (["stat", "/nowhere/pool"], "there is no file /nowhere/pool"),
        (["resize", "one", "100MiB"], "size must be"),
        (["resize", "one", "1KiB"], "size must be"),
        (["resize", "onee", "1MiB"], "did you mean 'one'?"),
        (["clear", "one", "--namespace", "frist"], "has no namespace 'frist'; did you mean 'first'?"),
        (["clear", "two"], "there is: one"),
        (["destroy", "two", "--yes"], "there is: one"),
        (["destroy", "one"], "give --yes"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_changes_nothing(
    umbp: Umbp, tmp_path: Path, arguments: list[str], said: str
) -> None:
    umbp("create", "one", "--size", "1MiB")
    with Pool.attach(pool_path(tmp_path, "one")) as pool:
        store(pool, pool.namespace("first"), ["x"])
        assert said in error_of(umbp(*arguments))
        assert pool.lookup(["x"]).all()
        assert pool.capacity_bytes == MIB
    assert os.listdir(tmp_path) == ["umbp-one"]


@pytest.mark.parametrize("size", ["1gb", "12 parsecs", "-5", "", "1.5"])
def test_a_size_that_is_none_is_a_usage_error(umbp: Umbp, size: str) -> None:
    result = umbp("create", "one", "--size", size)
    assert result.exit_code == 2
    assert "--size" in result.stderr


def test_a_namespace_is_cleared_by_its_number_or_long_name(umbp: Umbp, tmp_path: Path) -> None:
    umbp("create", "one", "--size", "1MiB")
    long = "m" * 300
    with Pool.attach(pool_path(tmp_path, "one")) as pool:
        for name in ("first", long, "2"):
            store(pool, pool.namespace(name), [f"{name}.x"])
        umbp("clear", "one", "--namespace", long)
        assert pool.lookup(["first.x", f"{long}.x", "2.x"]).tolist() == [True, False, True]
        umbp("clear", "one", "--namespace", "0")
        assert pool.lookup(["first.x", "2.x"]).tolist() == [False, True]
        umbp("clear", "one", "--namespace", "2")  # a name before a number
        assert not pool.lookup(["2.x"]).any()
        pool.namespace(long + "2")
        assert "several namespaces" in error_of(umbp("clear", "one", "--namespace", long))


def test_destroying_names_who_uses_it_and_asks(umbp: Umbp, tmp_path: Path, zygote: Zygote) -> None:
    umbp("create", "one", "--size", "1MiB")
    actor = zygote.spawn("serve", pool_path(tmp_path, "one"))
    actor.call("lookup", ["x"])
    result = umbp("destroy", "one", "--yes")
    assert f"1 processes use {tmp_path}/umbp-one (pid {actor.pid})" in result.stderr
    assert actor.call("lookup", ["x"]) == [False]


def test_a_question_is_asked_on_a_terminal_only(
    umbp: Umbp, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    umbp("create", "one", "--size", "1MiB")
    monkeypatch.setattr("umbp.cli.pool.change.is_terminal", lambda: True)
    assert umbp("destroy", "one", stdin="n\n").exit_code == 1
    assert os.listdir(tmp_path) == ["umbp-one"]
    assert umbp("destroy", "one", stdin="y\n").exit_code == 0
    assert os.listdir(tmp_path) == []


def test_a_damaged_pool_is_told_and_can_be_destroyed(umbp: Umbp, tmp_path: Path) -> None:
    umbp("create", "one", "--size", "1MiB")
    with (tmp_path / "umbp-one").open("r+b") as file:
        file.seek(40)
        file.write(b"\xff" * 8)
    listed = umbp("list")
    assert listed.exit_code == 0
    assert "unusable" in listed.stdout
    assert "its header is damaged" in listed.stdout
    shown = umbp("stat", "one")
    assert shown.exit_code == 1
    assert "its header is damaged" in shown.stdout
    assert umbp("destroy", "one", "--yes").exit_code == 0
    assert os.listdir(tmp_path) == []


def test_the_commands_end_in_a_sentence_and_need_neither_vllm_nor_torch(tmp_path: Path) -> None:
    code = (
        "import atexit, sys; from umbp.cli import main\n"
        "atexit.register(lambda: print(*sorted({'vllm', 'torch'} & set(sys.modules)), 'loaded'))\n"
        "main()"
    )

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, "pool", *arguments, "--dir", str(tmp_path)]
        return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)

    made = run("create", "one", "--size", "1MiB")
    assert made.returncode == 0, made.stderr
    assert made.stdout.splitlines()[-1].strip() == "loaded"
    again = run("create", "one", "--size", "1MiB")
    assert again.returncode == 2
    assert again.stderr.startswith("umbp: ")
    assert len(again.stderr.splitlines()) == 1
