"""Mooncake Store, for measurements beside it: whether it is here, its master, a store in this process."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from umbp.errors import UMBPError
from umbp.testing.stores import servers

DISTRIBUTION = "mooncake-transfer-engine-non-cuda"
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
def master(log: Path) -> Iterator[str]:
    """Its master on the loopback while the context lasts; where it listens."""
    server = servers.start_master(log)
    try:
        yield server.address
    finally:
        server.kill()


@contextlib.contextmanager
def store(segment_bytes: int) -> Iterator[Any]:
    """A `MooncakeDistributedStore` of this process, over a segment of its own."""
    os.environ.setdefault("MC_TCP_BIND_ADDRESS", "127.0.0.1")
    os.environ.setdefault("GLOG_minloglevel", "2")  # its errors, not every step
    with tempfile.TemporaryDirectory(prefix="umbp-bench-") as folder, master(Path(folder) / "log") as where:
        made = importlib.import_module("mooncake.store").MooncakeDistributedStore()
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
