"""Starts and ends beside a real Mooncake master that is well, silent, dead or not there: bounded in time, a
sentence each, and no crash.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import far_life
import pytest

from umbp.data import KVLayoutDescriptor, RankTopology, UMBPNamespace
from umbp.errors import ConfigError, UMBPError
from umbp.options import parse_options
from umbp.runtime import distributed
from umbp.runtime.distributed import DistributedRuntime
from umbp.testing.stores.servers import MooncakeCluster, free_ports, why_no_mooncake

pytestmark = pytest.mark.slow

START_TIMEOUT_S = 4.0
SLACK_S = 5.0
"""One attempt more may be under way."""
CLOSE_WITHIN_S = 12.0
"""What waits to be sent is waited for 5 s, a store that hangs 2 s by each half of the engine."""
END_WITHIN_S = 30.0
"""An interpreter that ends also waits for calls inside Mooncake, and Mooncake for the master: for 11 s where
that is dead and this process has offered memory."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeCluster]:
    if why := why_no_mooncake():
        pytest.skip(why)
    made = MooncakeCluster(tmp_path_factory.mktemp("cluster"), 16 << 20)
    yield made
    made.end()


def far_options(address: str, **settings: object) -> dict[str, object]:
    return {
        "mode": "distributed",
        "store": "mooncake",
        "store_options": {"master": address} | settings,
        "capacity_bytes": "4MiB",
    }


@pytest.mark.parametrize("offers", [False, True], ids=["a client alone", "with memory on offer"])
@pytest.mark.parametrize("master", ["well", "silent", "dead"])
def test_whoever_ends_ends_in_seconds_and_without_a_crash(
    cluster: MooncakeCluster, master: str, offers: bool
) -> None:
    """Scenario: a call was inside Mooncake when the interpreter ended, and aborted the process."""
    settings = {"segment_bytes": "16MiB"} if offers else {}
    arguments = [
        sys.executable,
        str(Path(far_life.__file__)),
        json.dumps(far_options(cluster.address, **settings)),
    ]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "serves\n"
            if master == "silent":
                cluster.master.stop()
            elif master == "dead":
                cluster.master.kill()
            begun_s = time.monotonic()
            told, _ = process.communicate("\n", timeout=120)
            took_s = time.monotonic() - begun_s
        finally:
            process.kill()
            if master == "silent":
                cluster.master.go_on()
            elif master == "dead":
                cluster.revive_master()
    print(f"beside a master that is {master}: {told.strip()}, ended in {took_s:.1f} s")
    assert process.returncode == 0, signal.strsignal(-process.returncode)
    assert float(told.split()[2]) < CLOSE_WITHIN_S
    assert took_s < END_WITHIN_S


@pytest.mark.parametrize("half", ["worker", "scheduler"])
@pytest.mark.parametrize(
    ("master", "sentence"),
    [
        ("absent", "no Mooncake master answers at 127.0.0.1:"),
        ("silent", "answer as a Mooncake master"),
    ],
)
def test_a_start_beside_no_master_ends_with_one_sentence_in_its_time(
    cluster: MooncakeCluster, monkeypatch: pytest.MonkeyPatch, master: str, sentence: str, half: str
) -> None:
    monkeypatch.setattr(distributed, "START_TIMEOUT_S", START_TIMEOUT_S)
    address = cluster.address if master == "silent" else f"127.0.0.1:{free_ports(1)[0]}"
    runtime = DistributedRuntime(parse_options(far_options(address)))
    create = runtime.create_worker_handle if half == "worker" else runtime.create_scheduler_handle
    topology = RankTopology()
    begun_s = time.monotonic()
    if master == "silent":
        cluster.master.stop()
    try:
        with pytest.raises(UMBPError, match=sentence) as caught:
            create(UMBPNamespace("start"), topology, KVLayoutDescriptor((), topology))
    finally:
        cluster.master.go_on()
    assert time.monotonic() - begun_s < START_TIMEOUT_S + SLACK_S
    assert "\n" not in str(caught.value)
    assert f"does not answer within {START_TIMEOUT_S:g} s" in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"masters": "a:1"}, "did you mean 'master'"),
        ({"master": "nowhere"}, "host:port"),
        ({"segment_bytes": "lots"}, "segment_bytes"),
    ],
)
def test_a_wrong_setting_is_told_before_anything_is_made(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        DistributedRuntime(parse_options(far_options("127.0.0.1:1", **settings)))
    assert "\n" not in str(caught.value)
