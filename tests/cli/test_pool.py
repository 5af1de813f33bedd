"""Rules of `umbp pool`: an operator's commands, each of which does what it says or says why not."""

from __future__ import annotations

import json
import os
import re
import signal
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
from umbp.errors import SegmentError, UMBPError
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
    assert (found["high_watermark"], found["low_watermark"]) == (0.9, 0.855)
    assert "from 90 % in use down to 85.5 %" in shown
    assert not [line for line in (shown + umbp("list").stdout).splitlines() if line != line.rstrip()]
    lines = umbp("list").stdout.splitlines()
    assert lines[1].split()[:2] == ["one", "ready"]


def test_the_dead_are_shown_with_what_they_held_until_somebody_uses_the_pool(
    umbp: Umbp, tmp_path: Path
) -> None:
    umbp("create", "one", "--size", "1MiB", "--min-object", "4KiB")
    path = pool_path(tmp_path, "one")
    killed = f"""
import os, signal
from umbp.pool import Pool
pool = Pool.attach({path!r})
pool.reserve(pool.namespace("a"), ["x", "y"], 3000)
os.kill(os.getpid(), signal.SIGKILL)
"""
    died = subprocess.run([sys.executable, "-c", killed], check=False, timeout=60)
    assert died.returncode == -signal.SIGKILL
    for _ in range(2):  # telling takes nothing back
        shown = umbp("stat", "one").stdout
        assert re.search(r"dead, to be reaped +2 ", shown), shown
        (process,) = report(umbp, "one")["processes"]
        assert (process["is_alive"], process["pinned_slots"]) == (False, 2)
        assert "0 (+1 dead)" in umbp("list").stdout
    assert umbp("resize", "one", "512KiB").exit_code == 0
    assert report(umbp, "one")["processes"] == []
    assert report(umbp, "one")["counters"]["reaped"] == 1


def test_every_command_answers_programs_too(umbp: Umbp, tmp_path: Path) -> None:
    path = pool_path(tmp_path, "one")
    made = json.loads(umbp("create", "one", "--size", "1MiB", "--json").stdout)
    assert made["path"] == path
    assert made["processes"] == []
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
        (
            ["create", "one", "--size", "1MiB"],
            "it exists; destroy it first, resize it, or choose another name",
        ),
        (["create", "a b", "--size", "1MiB"], "a pool's name must be"),
        (["create", "two", "--size", "1MiB", "--max-size", "512KiB"], "--max-size 512 KiB is less"),
        (["create", "two", "--size", "900TiB"], "doesn't fit"),
        (["create", "two", "--size", "10KiB"], "at least 160 KiB"),
        (["create", "two", "--size", "1MiB", "--max-size", "2PiB"], "grow to, 1 PiB at most"),
        (
            ["create", "two", "--size", "1MiB", "--max-size", "900TiB", "--min-object", "4KiB"],
            "choose a larger --min-object",
        ),
        (["create", "two", "--size", "1MiB", "--group", "no-such-group"], "no group 'no-such-group'"),
        (
            ["create", "two", "--size", "1MiB", "--slab-size", "5000"],
            "--slab-size must be a multiple of 4 KiB",
        ),
        (["create", "two", "--size", "1MiB", "--slab-size", "0"], "--slab-size must be a multiple of 4 KiB"),
        (
            ["create", "two", "--size", "1MiB", "--slab-size", "2MiB"],
            "--slab-size 2 MiB is more than --size 1 MiB",
        ),
        (["create", "two", "--size", "1MiB", "--min-object", "0"], "--min-object must be at least 1 byte"),
        (
            ["create", "two", "--size", "1MiB", "--min-object", "1GiB"],
            "--min-object 1 GiB, with 128 bytes",
        ),
        (["create", "two", "--size", "1MiB", "--high-watermark", "1.5"], "--high-watermark must be a share"),
        (["create", "two", "--size", "1MiB", "--high-watermark", "nan"], "--high-watermark must be a share"),
        (["create", "two", "--size", "1MiB", "--low-watermark", "0"], "--low-watermark must be above 0"),
        (
            ["create", "two", "--size", "1MiB", "--high-watermark", "0.5", "--low-watermark", "0.6"],
            "up to --high-watermark (0.5), not 0.6",
        ),
        (["create", "two", "--size", "1MiB", "--numa-node", "77"], "--numa-node names memory node 77"),
        (["stat", "tow"], "there is no pool 'tow' in"),
        (["stat", "onee"], "did you mean 'one'?"),
        (["stat", "/nowhere/pool"], "there is no file /nowhere/pool"),
        (["resize", "one", "100MiB"], "what the pool was made to grow to (1 MiB), not 100 MiB"),
        (["resize", "one", "1KiB"], "size must be from one slab (128 KiB)"),
        (["resize", "onee", "1MiB"], "did you mean 'one'?"),
        (["clear", "one", "--namespace", "frist"], "has no namespace 'frist'; did you mean 'first'?"),
        (["clear", "one", "--namespace", "nosuch"], "has no namespace 'nosuch'; there is: 0 (first)"),
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


def test_a_folder_is_shown_as_the_engines_take_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkdir("pools")
    create = ["pool", "create", "one", "--size", "1MiB", "--dir"]
    made = CliRunner().invoke(cli, [*create, "pools"])
    assert f'"pool_dir": "{tmp_path}/pools"' in made.stdout
    nowhere = CliRunner().invoke(cli, [*create, ""])
    assert nowhere.exit_code == 2
    assert "must be a folder, not ''" in nowhere.output
    assert os.listdir(tmp_path) == ["pools"]
    monkeypatch.chdir("pools")
    os.remove("umbp-one")
    os.rmdir(tmp_path / "pools")
    for arguments in ([*create, "there"], ["pool", "stat", "there/umbp-one"]):
        assert "'there" in error_of(CliRunner().invoke(cli, arguments))


@pytest.mark.parametrize("command", [["stat"], ["clear"], ["resize", "8MiB"], ["destroy", "--yes"]])
def test_where_there_is_no_pool_the_way_to_make_one_is_told(
    umbp: Umbp, tmp_path: Path, command: list[str]
) -> None:
    said = error_of(umbp(command[0], "one", *command[1:]))
    assert said == (
        f"there is no pool 'one' in {tmp_path}; `umbp pool create one --dir {tmp_path} --size SIZE` makes it"
    )


def test_of_many_namespaces_a_few_are_named(umbp: Umbp, tmp_path: Path) -> None:
    umbp("create", "one", "--size", "1MiB")
    assert error_of(umbp("clear", "one", "--namespace", "x")).endswith("; it has none yet")
    with Pool.attach(pool_path(tmp_path, "one")) as pool:
        for number in range(10):
            pool.namespace(f"model {number}")
    said = error_of(umbp("clear", "one", "--namespace", "x"))
    assert said.endswith("6 (model 6), 7 (model 7) and 2 more in `umbp pool stat`")


def test_a_file_that_is_no_pool_is_listed_and_the_way_to_delete_it_told(umbp: Umbp, tmp_path: Path) -> None:
    path = tmp_path / "umbp-empty"
    path.touch()
    assert "unusable" in umbp("list").stdout
    assert f"if nobody needs it, rm {path}" in error_of(umbp("destroy", "empty", "--yes"))
    assert path.exists()


def test_of_two_who_make_a_pool_at_once_the_second_hears_what_to_do(tmp_path: Path) -> None:
    """The first takes the name while the second takes its memory."""
    path = tmp_path / "umbp-one"

    def another_is_faster(done_bytes: int, all_bytes: int) -> None:
        path.touch()

    with pytest.raises(SegmentError, match="it exists; destroy it first, resize it, or choose another name"):
        Pool.create(path, MIB, slab_bytes=MIB // 4, min_object_bytes=4096, progress=another_is_faster)


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
