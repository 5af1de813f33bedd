"""Processes of engines that are forked from one which has imported vLLM."""

from __future__ import annotations

import atexit
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROGRAM = Path(__file__).with_name("template.py")


@dataclass(frozen=True, slots=True)
class Forked:
    """A process that somebody else reaps."""

    pid: int
    descriptor: int

    def wait(self) -> None:
        """Until it has ended; once."""
        select.select([self.descriptor], [], [])
        os.close(self.descriptor)


class Template:
    """The process that engines are forked from, started with their environment; it ends with this one."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, str(PROGRAM), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=environment,
            )
        atexit.register(self.close)

    def fork(self, environment: Mapping[str, str], descriptors: Sequence[int]) -> Forked:
        """A process in a session of its own that serves these commands, answers and log."""
        socket.send_fds(self._socket, [json.dumps(environment).encode()], descriptors)
        pid = int(self._socket.recv(100))
        return Forked(pid, os.pidfd_open(pid))

    def close(self) -> None:
        self._socket.close()
        self._process.wait()
