"""Rules of `umbp bench`: one object for programs, a table for people, honest rows."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

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
    assert [(row["op"], row["verify"], row["threads"]) for row in rows] == [
        (op, verify, threads)
        for op in ("store", "load")
        for verify in ("far", "always")
        for threads in (1, 3)
    ]
    for row in rows:
        assert (row["objects"], row["ranges"], row["range_bytes"]) == (3, 2, 5000)
        assert isinstance(row["gib_per_s"], float)
        assert isinstance(row["ratio_to_memcpy"], float)
        assert min(row["gib_per_s"], row["ratio_to_memcpy"]) > 0


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
