"""The doctor at a cluster store, and storage nodes: real servers, real processes, real signals."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from umbp.cli import store_checks
from umbp.cli.checks import Check
from umbp.cli.listening import listening
from umbp.cli.store.node import ENDINGS
from umbp.cli.store_checks import check_store
from umbp.options import Options, parse_options
from umbp.store.base import ClusterStore, Outcome
from umbp.store.mooncake_master import MasterFigures, master_figures
from umbp.testing.stores import servers
from umbp.testing.stores.memory import MemoryCluster, MemoryStore
from umbp.testing.stores.servers import Server
from umbp.testing.tied import start_tied

NODE_BYTES = 64 << 20


def configured(store: str, /, **settings: object) -> Options:
    return parse_options({"mode": "distributed", "store": store, "store_options": settings})


def found(options: Options, *arguments: int, **how: object) -> dict[str, Check]:
    return {check.name: check for check in check_store(options, *arguments, **how)}  # type: ignore[arg-type]


def bad(checks: dict[str, Check]) -> list[str]:
    return [name for name, check in checks.items() if check.state == "bad"]


class TestAnyStore:
    """What doesn't hang on which store it is, at one in memory."""

    @pytest.fixture
    def cluster(self) -> Iterator[MemoryCluster]:
        made = MemoryCluster()
        yield made
        made.go_on()
        assert not made.misuses
        assert not made.objects, "the doctor leaves nothing"

    @pytest.fixture
    def look(self, cluster: MemoryCluster) -> Callable[[], dict[str, Check]]:
        def make_store(options: Options, *, serves_memory: bool) -> ClusterStore:
            assert not serves_memory
            return cluster.connect()

        return lambda: found(configured("memory"), make_store=make_store)

    def test_a_small_object_goes_there_and_back(self, look: Callable[[], dict[str, Check]]) -> None:
        checks = look()
        assert not bad(checks)
        for step in ("put", "found", "fetched", "removed", "gone"):
            assert f"{step} " in checks["object"].text

    @pytest.mark.parametrize("verb", ["open", "put", "get", "exists", "remove"])
    def test_one_that_hangs_is_bad_in_bounded_time(
        self,
        look: Callable[[], dict[str, Check]],
        cluster: MemoryCluster,
        monkeypatch: pytest.MonkeyPatch,
        verb: str,
    ) -> None:
        monkeypatch.setattr(store_checks, "CALL_TIMEOUT_S", 0.1)
        monkeypatch.setattr(store_checks, "LEAVE_S", 0.1)
        monkeypatch.setattr(store_checks, "OPEN_TIMEOUT_S", 0.1)
        cluster.hang(verb)
        checks = look()
        (name,) = bad(checks)
        assert name == ("store" if verb == "open" else "object")
        assert ("silent" if verb == "open" else "doesn't answer") in checks[name].text
        cluster.go_on()
        cluster.objects.clear()

    def test_one_without_room_is_bad(
        self, look: Callable[[], dict[str, Check]], cluster: MemoryCluster
    ) -> None:
        cluster.room_bytes = 1000
        checks = look()
        assert bad(checks) == ["object"]
        assert "no room" in checks["object"].text

    def test_one_that_gives_other_bytes_is_bad(self, cluster: MemoryCluster) -> None:
        class Liar(MemoryStore):
            def get(
                self, keys: Sequence[str], addresses: Sequence[int], sizes: Sequence[int]
            ) -> list[Outcome]:
                return [Outcome.DONE] * len(keys)

        checks = found(configured("memory"), make_store=lambda _, *, serves_memory: Liar(cluster))
        assert bad(checks) == ["object"]
        assert "other bytes" in checks["object"].text

    def test_one_that_cannot_be_opened_is_bad(self, cluster: MemoryCluster) -> None:
        cluster.is_down = True
        options = configured("memory")
        checks = found(options, make_store=lambda _, *, serves_memory: cluster.connect())
        assert bad(checks) == ["store"]


@pytest.mark.parametrize(
    ("told", "state"),
    [
        ({"version": "0.3.13.post1", "tried with": "0.3.13"}, "ok"),
        ({"version": "0.3.130", "tried with": "0.3.13"}, "note"),
        ({"version": "7.0.1", "tried with": "6.2"}, "note"),
        ({}, "note"),
    ],
)
def test_a_version_that_the_adapter_was_not_tried_with_is_noted(told: dict[str, str], state: str) -> None:
    (check,) = store_checks.check_version("attic", told)
    assert check.state == state


@pytest.mark.parametrize(
    ("clock", "state", "word"),
    [("1000.5", "ok", "apart"), ("1060", "note", "ahead"), ("900", "note", "behind")],
)
def test_clocks_that_are_apart_are_noted(clock: str, state: str, word: str) -> None:
    (check,) = store_checks.check_clock("attic", {"clock": clock}, 1000.0)
    assert check.state == state
    assert word in check.text


def test_a_store_that_tells_no_time_is_said_to_be_unchecked() -> None:
    (check,) = store_checks.check_clock("attic", {}, 1000.0)
    assert "isn't checked" in check.text


class TestMemoryOfACluster:
    def test_none_on_offer_is_bad_unless_the_workers_bring_some(self) -> None:
        nothing = MasterFigures(0, 0, 1, ())
        assert store_checks.mooncake_memory(nothing, 0, Options()).state == "bad"
        assert store_checks.mooncake_memory(nothing, 1 << 30, Options()).state == "ok"

    def test_less_than_the_engines_own_pool_is_noted(self) -> None:
        small = MasterFigures(1 << 30, 0, 1, (("10.0.0.1:4711", 1 << 30),))
        options = parse_options({"capacity_bytes": "2GiB"})
        assert store_checks.mooncake_memory(small, 0, options).state == "note"
        assert store_checks.mooncake_memory(small, 0, Options()).state == "ok"

    def test_a_worker_that_hasnt_the_memory_that_it_is_to_offer_is_bad(self) -> None:
        for segment, states in (("1000000GiB", ["bad"]), ("16MiB", []), (0, [])):
            options = configured("mooncake", master="h:1", segment_bytes=segment)
            checks = list(store_checks.check_segment(options))
            assert [check.state for check in checks] == states
            assert all("doesn't fit" in check.text for check in checks)

    def test_rdma_needs_memory_that_may_be_locked(self, monkeypatch: pytest.MonkeyPatch) -> None:
        options = configured("mooncake", master="h:1", protocol="rdma")
        for limit, state in ((8 << 20, "bad"), (8 << 30, "ok"), (resource.RLIM_INFINITY, "ok")):
            monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
            (check,) = store_checks.check_locked_memory(options)
            assert check.state == state
        assert not list(store_checks.check_locked_memory(configured("mooncake", master="h:1")))


def test_where_a_process_listens_is_told_with_its_port() -> None:
    before = listening()
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("::1", 0), family=socket.AF_INET6) as six,
    ):
        here = {f"127.0.0.1:{one.getsockname()[1]}", f"[::1]:{six.getsockname()[1]}"}
        assert listening() - before == here
    assert listening() == before


@pytest.fixture(scope="module")
def closed_port() -> int:
    return servers.free_ports(1)[0]


class TestRedis:
    @pytest.fixture(autouse=True)
    def needs(self) -> None:
        if why := servers.why_no_redis():
            pytest.skip(why)

    @pytest.fixture
    def start(self, tmp_path: Path) -> Iterator[Callable[..., int]]:
        begun: list[Server] = []

        def make(*flags: str) -> int:
            begun.append(servers.start_redis(tmp_path / "log", 0, *flags))
            return int(begun[-1].address.rpartition(":")[2])

        yield make
        for each in begun:
            each.kill()

    def test_one_that_is_set_up_well_is_ok_clock_and_all(self, start: Callable[..., int]) -> None:
        port = start("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
        checks = found(configured("redis", port=port))
        assert {check.state for check in checks.values()} == {"ok"}, checks
        assert "apart" in checks["clocks"].text
        assert "listen nowhere" in checks["listening"].text

    def test_one_that_refuses_when_full_is_noted_and_bad_when_it_is(self, start: Callable[..., int]) -> None:
        checks = found(configured("redis", port=start("--maxmemory", "1")))
        assert bad(checks) == ["object"]
        assert checks["store memory"].state == "note"
        assert "allkeys-lru" in checks["store memory"].text

    def test_a_wrong_password_is_bad(
        self, start: Callable[..., int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        port = start("--requirepass", "sesame")
        for password, is_right in ((None, False), ("parsley", False), ("sesame", True)):
            if password is None:
                monkeypatch.delenv("UMBP_REDIS_PASSWORD", raising=False)
            else:
                monkeypatch.setenv("UMBP_REDIS_PASSWORD", password)
            checks = found(configured("redis", port=port))
            assert bad(checks) == ([] if is_right else ["store"])
            if password is None:
                assert (
                    "wants a password; put it in the environment's UMBP_REDIS_PASSWORD"
                    in checks["store"].text
                )
            assert not any("sesame" in check.text for check in checks.values())

    def test_one_that_refuses_is_not_told_to_be_away(self, start: Callable[..., int]) -> None:
        checks = found(configured("redis", port=start(), database=77))
        assert bad(checks) == ["store"]
        assert "refuses us (DB index is out of range); is 'database' there" in checks["store"].text

    def test_something_else_is_not_taken_for_one(self) -> None:
        def answer(server: socket.socket) -> None:
            with server.accept()[0] as one:
                one.recv(1)
                one.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        with socket.create_server(("127.0.0.1", 0)) as other, ThreadPoolExecutor(1) as beside:
            beside.submit(answer, other)
            checks = found(configured("redis", port=other.getsockname()[1]))
        assert bad(checks) == ["store"]
        assert "is no Redis (Protocol error" in checks["store"].text

    def test_none_is_bad(self, closed_port: int) -> None:
        checks = found(configured("redis", port=closed_port))
        assert bad(checks) == ["store"]
        assert "start one there" in checks["store"].text

    def test_a_silent_one_is_bad(self, tmp_path: Path) -> None:
        server = servers.start_redis(tmp_path / "log")
        try:
            server.stop()
            port = int(server.address.rpartition(":")[2])
            assert bad(found(configured("redis", port=port, timeout_ms=200))) == ["store"]
        finally:
            server.kill()


def node_process(master: str, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "umbp", "store", "node", "--master", master, "--json", *more]
    return start_tied(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


class TestMooncake:
    @pytest.fixture(scope="class")
    @classmethod
    def metrics_port(cls) -> int:
        return servers.free_ports(1)[0]

    @pytest.fixture(scope="class")
    @classmethod
    def master(cls, metrics_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
        if why := servers.why_no_mooncake():
            pytest.skip(why)
        log = tmp_path_factory.mktemp("mooncake") / "master.log"
        server = servers.start_master(log, 0, f"--metrics_port={metrics_port}")
        yield server
        server.kill()

    def test_a_node_offers_its_memory_and_takes_it_back_when_it_is_told_to_end(
        self, master: Server, metrics_port: int
    ) -> None:
        options = configured("mooncake", master=master.address)
        checks = found(options, metrics_port)
        assert bad(checks) == ["store memory", "object"], "no node yet"
        assert "umbp store node" in checks["store memory"].text
        node = node_process(master.address, "--segment", str(NODE_BYTES))
        try:
            assert node.stdout is not None
            told = json.loads(node.stdout.readline())
            assert told["segment_bytes"] == NODE_BYTES
            figures = master_figures("127.0.0.1", metrics_port, 5.0)
            assert figures is not None
            assert (figures.total_bytes, figures.segments) == (NODE_BYTES, ((told["client"], NODE_BYTES),))
            checks = found(options, metrics_port)
            assert not bad(checks), checks
            assert "64 MiB on offer in 1 segment" in checks["store memory"].text
            assert checks["store version"].state == "ok"
            assert "0.0.0.0:" in checks["listening"].text, "whatever Mooncake is told"
            assert "isn't checked" in checks["clocks"].text
            node.send_signal(signal.SIGTERM)
            assert node.wait(30) == 0
            left = master_figures("127.0.0.1", metrics_port, 5.0)
            assert left is not None
            assert left.total_bytes == 0, "at once, not when the master misses it"
        finally:
            node.kill()
            node.communicate()

    def test_a_node_whose_master_is_dead_ends_all_the_same(self, master: Server, tmp_path: Path) -> None:
        mortal = servers.start_master(tmp_path / "log")
        node = node_process(mortal.address, "--segment", str(NODE_BYTES), "--timeout-ms", "500")
        try:
            assert node.stdout is not None
            assert json.loads(node.stdout.readline())["master"] == mortal.address
            mortal.kill()
            node.send_signal(signal.SIGTERM)
            assert node.wait(30) == 0
        finally:
            node.kill()
            node.communicate()

    def test_no_thread_of_a_node_takes_the_signal_that_is_to_end_it(self, master: Server) -> None:
        """Whenever it comes: one that a thread doesn't block, while nobody waits for it, is the end. (The
        kernel shows the first thread's as not blocked while that waits for them.)
        """
        node = node_process(master.address, "--segment", str(NODE_BYTES))
        try:
            assert node.stdout is not None
            node.stdout.readline()
            taken = {
                status.parent.name: [number.name for number in ENDINGS if not blocked >> (number - 1) & 1]
                for status in Path(f"/proc/{node.pid}/task").glob("*/status")
                for blocked in [int(re.findall(r"SigBlk:\s*(\w+)", status.read_text())[0], 16)]
                if status.parent.name != str(node.pid)
            }
            assert taken
            assert not any(taken.values()), taken
        finally:
            node.kill()
            node.communicate()

    def test_a_node_stays_through_what_it_was_started_to_ignore(self, master: Server) -> None:
        """As `nohup` and a shell's `&` start it."""
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        try:
            node = node_process(master.address, "--segment", str(NODE_BYTES))
        finally:
            signal.signal(signal.SIGHUP, before)
        try:
            assert node.stdout is not None
            node.stdout.readline()
            node.send_signal(signal.SIGHUP)
            with pytest.raises(subprocess.TimeoutExpired):
                node.wait(1.0)
            node.send_signal(signal.SIGTERM)
            assert node.wait(30) == 0
        finally:
            node.kill()
            node.communicate()

    def test_a_master_that_tells_no_figures_is_noted(self, master: Server, closed_port: int) -> None:
        checks = found(configured("mooncake", master=master.address), closed_port)
        assert checks["store memory"].state == "note"
        assert "isn't checked" in checks["store memory"].text

    def test_none_is_bad(self, master: Server, closed_port: int) -> None:
        checks = found(configured("mooncake", master=f"127.0.0.1:{closed_port}"))
        assert bad(checks) == ["store"]
        assert "start mooncake_master there" in checks["store"].text

    def test_a_silent_one_is_bad(self, master: Server, tmp_path: Path) -> None:
        silent = servers.start_master(tmp_path / "log")
        try:
            silent.stop()
            checks = found(configured("mooncake", master=silent.address, timeout_ms=200))
            assert bad(checks) == ["store"]
        finally:
            silent.kill()

    @pytest.mark.parametrize(
        ("arguments", "word"),
        [
            (("--segment", "16MiB"), "there, or mend --master\n"),
            (("--segment", "1MiB"), "--segment must be at least 16 MiB, not 1 MiB"),
            (("--segment", "16MiB", "--protocol", "rdma"), "--protocol is rdma"),
            (("--segment", "0"), "--segment must be at least 16 MiB, not 0 B"),
            (("--segment", "1000000GiB"), "--segment of 976.56 TiB doesn't fit"),
            (("--segment", "16MiB", "--protocol", "smoke-signals"), "protocol"),
            (("--segment", "16MiB", "--device", "mlx5_0"), "device"),
        ],
    )
    def test_a_node_that_cannot_be_says_why_in_one_sentence(
        self, master: Server, closed_port: int, arguments: tuple[str, ...], word: str
    ) -> None:
        command = [sys.executable, "-m", "umbp", "store", "node", "--master", f"127.0.0.1:{closed_port}"]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 2
        assert done.stderr.startswith("umbp: ")
        assert word in done.stderr

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (("--segment", "16MiB", "--local-hostname", "a..b"), "--local-hostname can't be found: a..b"),
            (("--segment", "16MiB", "--timeout-ms", "200"), "doesn't answer as a Mooncake master"),
        ],
    )
    def test_a_node_that_cannot_join_says_why_in_one_sentence(
        self, master: Server, tmp_path: Path, arguments: tuple[str, ...], words: str
    ) -> None:
        silent = servers.start_master(tmp_path / "log")
        try:
            if "--timeout-ms" in arguments:
                silent.stop()
            command = [sys.executable, "-m", "umbp", "store", "node", "--master", silent.address]
            done = subprocess.run(
                [*command, *arguments], capture_output=True, text=True, check=False, timeout=60
            )
        finally:
            silent.kill()
        assert done.returncode == 2
        assert done.stderr.startswith("umbp: ")
        assert words in done.stderr

    @pytest.mark.parametrize(
        ("url", "words"),
        [
            (
                "http://127.0.0.1:{closed}/metadata",
                "no metadata server answers at http://127.0.0.1:{closed} (",
            ),
            ("http://me:secret@127.0.0.1:{master}/x?y", "metadata server at http://127.0.0.1:{master} ("),
            ("http://127.0.0.1:{metrics}/x", "at http://127.0.0.1:{metrics} is no metadata server"),
            ("redis://127.0.0.1", "knows no metadata server of the kind 'redis'"),
        ],
    )
    def test_a_metadata_server_that_cannot_be_used_is_told_in_our_words(
        self, master: Server, metrics_port: int, closed_port: int, url: str, words: str
    ) -> None:
        ports = {"closed": closed_port, "metrics": metrics_port, "master": master.address.rpartition(":")[2]}
        settings = {"master": master.address, "metadata": url.format(**ports)}
        checks = found(configured("mooncake", **settings))
        assert bad(checks) == ["store"]
        text = checks["store"].text
        assert words.format(**ports) in text
        assert text.endswith("mend 'metadata' in 'store_options' (P2PHANDSHAKE needs no server)")
        assert "secret" not in text
        assert "curl" not in text

    def test_the_doctor_tells_all_of_it_in_one_object(self, master: Server, metrics_port: int) -> None:
        config = {
            "kv_connector": "UMBPConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "mode": "distributed",
                "store": "mooncake",
                "store_options": {"master": master.address},
                "capacity_bytes": "1MiB",
            },
        }
        code = "from umbp.cli import checks, main\nchecks.check_vllm = lambda: iter(())\nmain()"
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                code,
                "doctor",
                json.dumps(config),
                "--json",
                "--metrics-port",
                str(metrics_port),
            ],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONHASHSEED": "7"},
        )
        assert done.returncode == 1, done.stderr
        assert done.stderr == "", "what Mooncake says is in the object"
        checks = {each["name"]: each for each in json.loads(done.stdout)["checks"]}
        assert checks["store"]["state"] == "ok"
        assert checks["object"]["state"] == "bad", "no node offers memory"
        assert "7 here" in checks["hash seed of all hosts"]["text"]
