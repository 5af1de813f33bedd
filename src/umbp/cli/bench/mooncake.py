"""Mooncake Store, for measurements beside it: whether it is here, its master, a store in this process."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import mmap
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from umbp.errors import UMBPError

DISTRIBUTION = "mooncake-transfer-engine-non-cuda"
MASTER_TIMEOUT_S = 20.0
LOCAL_BUFFER_BYTES = 64 << 20


class MooncakeError(UMBPError):
    """Mooncake can't be measured; the message says why."""


def why_not() -> str | None:
    """None when Mooncake can run here, else a sentence."""
    if importlib.util.find_spec("mooncake") is None:
        return f"Mooncake is left out: pip install {DISTRIBUTION}"
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        return f"Mooncake is left out, its libraries don't load (libibverbs1 libnuma1 libcurl4): {error}"
    return None


@contextlib.contextmanager
def master(log: Path) -> Iterator[int]:
    """Its master on the loopback while the context lasts; the port."""
    port, metrics_port = free_ports(2)
    program = Path(importlib.import_module("mooncake").__path__[0]) / "mooncake_master"
    command = [
        str(program),
        "--rpc_address=127.0.0.1",
        f"--rpc_port={port}",
        "--metrics_host=127.0.0.1",
        f"--metrics_port={metrics_port}",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        _wait_for_port(port, process, log)
        yield port
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def store(segment_bytes: int) -> Iterator[Any]:
    """A `MooncakeDistributedStore` of this process, over a segment of its own."""
    os.environ.setdefault("MC_TCP_BIND_ADDRESS", "127.0.0.1")
    os.environ.setdefault("GLOG_minloglevel", "2")  # its errors, not every step
    with tempfile.TemporaryDirectory(prefix="umbp-bench-") as folder, master(Path(folder) / "log") as port:
        made = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        where = f"127.0.0.1:{port}"
        arguments = ("127.0.0.1", "P2PHANDSHAKE", segment_bytes, LOCAL_BUFFER_BYTES, "tcp", "", where)
        if made.setup(*arguments) != 0:
            raise MooncakeError("Mooncake's store could not be set up; its log is on standard error")
        try:
            yield made
        finally:
            made.close()


@contextlib.contextmanager
def buffer(made: Any, size: int) -> Iterator[int]:
    """The address of memory that the store may move bytes from and to."""
    content = np.frombuffer(mmap.mmap(-1, size), np.uint8)
    content[:] = 1
    address = int(content.ctypes.data)
    require([made.register_buffer(address, size)])
    try:
        yield address
    finally:
        made.unregister_buffer(address)


def require(codes: Sequence[int], wanted: int = 0) -> None:
    """Every code of a batch call is the wanted one."""
    if wrong := sorted(set(codes) - {wanted}):
        raise MooncakeError(f"Mooncake answered {wrong}, not {wanted}")


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]


def _wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + MASTER_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return
        time.sleep(0.05)
    raise MooncakeError(f"mooncake_master did not come up: {log.read_text(errors='replace')[-500:]}")
