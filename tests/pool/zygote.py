"""A small process that forks actors: real processes of their own, in milliseconds, with the package imported.

It imports once and holds no pool, so its children attach like any stranger. Started as `python zygote.py FD`;
each request on that socket carries the actor's end of a socket pair; the answer is the actor's pid. It never
waits for a child unless asked to, so a killed actor stays a zombie, which is one of the things to test.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


class Actor:
    """One forked process, driven by JSON lines. `call` raises EOFError once it is dead."""

    def __init__(self, zygote: Zygote, pid: int, connection: socket.socket) -> None:
        self.zygote = zygote
        self.pid = pid  # as this process sees it
        self.zygotes_pid = pid  # as the zygote sees it, which may live in a pid namespace of its own
        self.connection = connection
        self.file = connection.makefile("rw", encoding="utf-8")
        self.is_waited_for = False

    def send(self, verb: str, *args: Any) -> None:
        try:
            self.file.write(json.dumps([verb, *args]) + "\n")
            self.file.flush()
        except (BrokenPipeError, ConnectionResetError):
            raise EOFError(f"actor {self.pid} is dead") from None

    def receive(self) -> Any:
        try:
            line = self.file.readline()
        except ConnectionResetError:
            line = ""
        if not line:
            raise EOFError(f"actor {self.pid} is dead")
        kind, value = json.loads(line)
        if kind == "error":
            raise RuntimeError(value)
        return value

    def call(self, verb: str, *args: Any) -> Any:
        self.send(verb, *args)
        return self.receive()

    def has_answer(self, timeout_s: float) -> bool:
        return bool(select.select([self.connection], [], [], timeout_s)[0])

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone (a zombie, not yet waited for)."""
        os.kill(self.pid, signal.SIGKILL)
        self.wait_until_dead()

    def wait_until_dead(self) -> None:
        """All its descriptors are closed by then, its byte locks with them: the kernel closes both in one
        go."""
        while self.state() not in "ZX":
            self.connection.settimeout(10)
            try:
                if not self.connection.recv(65536):
                    self.connection.settimeout(None)
                    while self.state() not in "ZX":
                        os.sched_yield()
            except ConnectionResetError:
                pass

    def wait_until_stopped(self) -> None:
        while self.state() != "T":
            os.sched_yield()

    def state(self) -> str:
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2][0]
        except FileNotFoundError:
            return "X"

    def bury(self) -> int:
        """Hangs up, waits for its end and returns its wait status."""
        self.is_waited_for = True
        with suppress(OSError):
            self.file.close()
        self.connection.close()
        return self.zygote.request({"wait": self.zygotes_pid})


CAN_UNSHARE = (
    subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True, check=False).returncode == 0
)
"""Whether this user may make pid namespaces."""


def only_child(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


class Zygote:
    """With `own_pids` it and its actors live in a pid namespace of their own, as in another container."""

    def __init__(self, own_pids: bool = False) -> None:
        ours, theirs = socket.socketpair()
        prefix = ["unshare", "--pid", "--fork", "--kill-child"] if own_pids else []
        self.process = subprocess.Popen(
            [*prefix, sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self.socket = ours
        self.own_pids = own_pids
        self.actors: list[Actor] = []

    def request(self, message: dict[str, Any], fds: list[int] | None = None) -> int:
        socket.send_fds(self.socket, [json.dumps(message).encode()], fds or [])
        return int(json.loads(self.socket.recv(4096)))

    def spawn(self, function: str, *args: Any) -> Actor:
        """Forks a process that runs `actors.function(line connection, *args)`."""
        ours, theirs = socket.socketpair()
        pid = self.request({"function": function, "args": args}, [theirs.fileno()])
        theirs.close()
        actor = Actor(self, pid, ours)
        if self.own_pids:
            actor.pid = self.pid_here(pid)
        self.actors.append(actor)
        return actor

    def pid_here(self, inner: int) -> int:
        zygote = only_child(self.process.pid)
        for pid in Path(f"/proc/{zygote}/task/{zygote}/children").read_text().split():
            status = Path(f"/proc/{pid}/status").read_text()
            if status.partition("NSpid:")[2].split("\n", 1)[0].split()[-1] == str(inner):
                return int(pid)
        raise AssertionError(f"the zygote's child {inner} isn't there")

    @contextmanager
    def episode(self) -> Iterator[Zygote]:
        """Whoever was forked within it is gone after it."""
        before = len(self.actors)
        try:
            yield self
        finally:
            for actor in self.actors[before:]:
                if not actor.is_waited_for:
                    os.kill(actor.pid, signal.SIGKILL)
                    actor.bury()
            del self.actors[before:]

    def close(self) -> None:
        self.socket.close()
        self.process.wait()


class Lines:
    """The actor's end: commands in, answers out."""

    def __init__(self, fd: int) -> None:
        self.socket = socket.socket(fileno=fd)
        self.file = self.socket.makefile("rw", encoding="utf-8")

    def __iter__(self) -> Iterator[list[Any]]:
        for line in self.file:
            yield json.loads(line)

    def answer(self, value: Any, kind: str = "value") -> None:
        self.file.write(json.dumps([kind, value]) + "\n")
        self.file.flush()


def _main(fd: int) -> None:
    import actors
    import soak_actors

    requests = socket.socket(fileno=fd)
    while True:
        data, fds, _, _ = socket.recv_fds(requests, 1 << 20, 4)
        if not data:
            return
        message = json.loads(data)
        if "wait" in message:
            requests.send(str(os.waitpid(message["wait"], 0)[1]).encode())
            continue
        pid = os.fork()
        if pid == 0:
            requests.close()
            try:
                module = soak_actors if hasattr(soak_actors, message["function"]) else actors
                getattr(module, message["function"])(Lines(fds[0]), *message["args"])
            except BaseException:  # noqa: BLE001 - the top of a process
                traceback.print_exc()
            finally:
                os._exit(0)
        for inherited in fds:
            os.close(inherited)
        requests.send(str(pid).encode())


if __name__ == "__main__":
    _main(int(sys.argv[1]))
