"""What a process has started for its tests ends with it, even where that is killed."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from umbp.testing import launch
from umbp.testing.stores import servers
from umbp.testing.tied import start_tied

WAIT_S = 30.0
STARTS = {
    "redis": "found = [servers.start_redis(folder / 'log')]",
    "mooncake": "made = servers.MooncakeCluster(folder, 16 << 20); found = [made.master, *made.nodes]",
}


@pytest.mark.slow
@pytest.mark.parametrize("is_stopped", [False, True], ids=["at work", "stopped"])
@pytest.mark.parametrize("store", ["redis", "mooncake"])
def test_servers_end_with_who_has_started_them_and_was_killed(
    tmp_path: Path, store: str, is_stopped: bool
) -> None:
    if why := servers.why_no_redis() if store == "redis" else servers.why_no_mooncake():
        pytest.skip(why)
    code = f"""
import sys
from pathlib import Path
from umbp.testing.stores import servers
folder = Path({str(tmp_path)!r})
{STARTS[store]}
for each in found if {is_stopped} else ():
    each.stop()
print(*(each.process.pid for each in found), flush=True)
sys.stdin.read()
"""
    with contextlib.ExitStack() as ending:
        starter = ending.enter_context(
            subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        )
        ending.callback(starter.kill)
        assert starter.stdout is not None
        found = [os.pidfd_open(int(each)) for each in starter.stdout.readline().split()]
        assert len(found) == (1 if store == "redis" else 3)
        for each in found:
            ending.callback(os.close, each)
        assert not select.select(found, [], [], 0)[0], "they live"
        starter.kill()
        for each in found:
            assert select.select([each], [], [], WAIT_S)[0], "it has outlived its starter"


def test_a_program_whose_starter_ended_before_it_was_tied_ends_at_once() -> None:
    another = str(os.getppid())
    command = [sys.executable, "-I", "-S", launch.__file__, another, str(int(signal.SIGTERM)), "true"]
    assert subprocess.run(command, check=False).returncode == -signal.SIGTERM


def test_a_tied_program_gets_its_arguments_and_no_signals_of_pythons() -> None:
    plain = ["grep", "^Sig[IC]", "/proc/self/status"]
    told = []
    for start in (subprocess.Popen, start_tied):
        with start(plain, stdout=subprocess.PIPE) as process:
            told.append(process.communicate()[0])
            assert process.returncode == 0
    assert told[0] == told[1]


def test_a_tied_program_outlives_the_thread_that_asked_for_it() -> None:
    asked: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        asked.append(start_tied(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    with asked[0] as process:
        assert process.communicate(b"alive")[0] == b"alive"
        assert process.returncode == 0


def test_what_can_not_be_started_is_told_on_any_thread() -> None:
    with ThreadPoolExecutor(1) as thread, pytest.raises(FileNotFoundError):
        thread.submit(start_tied, ["cat"], cwd="/nowhere").result()
