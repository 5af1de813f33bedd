"""Starts processes that end with this one, however it ends; SIGKILL included."""

from __future__ import annotations

import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from umbp.testing import launch


def start_tied(
    program: Sequence[str], told: signal.Signals = signal.SIGKILL, **how: Any
) -> subprocess.Popen[Any]:
    """`subprocess.Popen` of a program that gets this signal when this process ends. Its number is the
    program's own; what it has started itself is its own affair. Any thread.
    """
    launcher = [sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), str(int(told))]
    command = [*launcher, *program]
    if threading.current_thread() is threading.main_thread():
        return subprocess.Popen(command, **how)
    started: queue.SimpleQueue[subprocess.Popen[Any] | BaseException] = queue.SimpleQueue()
    threading.Thread(target=_start_and_stay, args=(command, how, started), daemon=True).start()
    answer = started.get()
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _start_and_stay(
    command: list[str],
    how: dict[str, Any],
    started: queue.SimpleQueue[subprocess.Popen[Any] | BaseException],
) -> None:
    """A thread that lives as long as the process it starts: the end of the thread that asks for it, while
    this process lives on, would be the end of it.
    """
    try:
        process = subprocess.Popen(command, **how)
    except BaseException as error:  # noqa: BLE001 - raised where it was asked for
        started.put(error)
        return
    descriptor = os.pidfd_open(process.pid)
    started.put(process)
    select.select([descriptor], [], [])
    os.close(descriptor)
