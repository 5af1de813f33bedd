"""A store's own client, used as well as it can be: what `umbp bench store` measures itself against."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from umbp.cli.bench.mooncake import LOCAL_BUFFER_BYTES, MooncakeError, require
from umbp.errors import ConfigError, InvariantError
from umbp.kinds import shown
from umbp.store.base import StoreError
from umbp.store.mooncake_client import own_address, set_environment
from umbp.store.redis import RedisSettings
from umbp.testing.stores import servers

TIMEOUT_MS = 60_000
REACH_S = 5.0
"""A busy machine is no dead one."""

MOST_RANGES = 1024
"""In one call of Mooncake's client over TCP; of 2,048 some fail."""

PIPELINE_BYTES = 64 << 20
"""In one pipeline of the client for Redis, which holds the values once more meanwhile."""


class BareClient(Protocol):
    """Batches of any size; anything but success raises."""

    most_ranges: int
    """In one call of `put_ranges` and `get_ranges`; 0: it has none."""

    def put(self, keys: Sequence[str], addresses: Sequence[int], size: int) -> None:
        """One contiguous range an object."""
        ...

    def get(self, keys: Sequence[str], addresses: Sequence[int], size: int) -> None: ...

    def put_ranges(self, keys: Sequence[str], addresses: Sequence[Sequence[int]], size: int) -> None:
        """Several ranges an object, each of `size` bytes."""
        ...

    def get_ranges(self, keys: Sequence[str], addresses: Sequence[Sequence[int]], size: int) -> None: ...

    def count(self, keys: Sequence[str]) -> int:
        """How many of these it has, by one question."""
        ...

    def remove(self, keys: Sequence[str]) -> None: ...


class BareMooncake:
    """`MooncakeDistributedStore`, in calls as large as are safe."""

    most_ranges = MOST_RANGES

    def __init__(self, master: str, address: int, size: int) -> None:
        set_environment(TIMEOUT_MS)
        self._client: Any = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        host = own_address(master)
        arguments = (host, "P2PHANDSHAKE", 0, LOCAL_BUFFER_BYTES, "tcp", "", master)
        if self._client.setup(*arguments) != 0:
            raise MooncakeError("Mooncake's client could not be set up; its log is on standard error")
        require([self._client.register_buffer(address, size)])

    def put(self, keys: Sequence[str], addresses: Sequence[int], size: int) -> None:
        for part in _parts(len(keys), MOST_RANGES):
            require(self._client.batch_put_from(keys[part], addresses[part], [size] * len(keys[part])))

    def get(self, keys: Sequence[str], addresses: Sequence[int], size: int) -> None:
        for part in _parts(len(keys), MOST_RANGES):
            require(self._client.batch_get_into(keys[part], addresses[part], [size] * len(keys[part])), size)

    def put_ranges(self, keys: Sequence[str], addresses: Sequence[Sequence[int]], size: int) -> None:
        ranges = len(addresses[0])
        for part in _parts(len(keys), MOST_RANGES // ranges):
            sizes = [[size] * ranges] * len(keys[part])
            require(self._client.batch_put_from_multi_buffers(keys[part], addresses[part], sizes))

    def get_ranges(self, keys: Sequence[str], addresses: Sequence[Sequence[int]], size: int) -> None:
        ranges = len(addresses[0])
        for part in _parts(len(keys), MOST_RANGES // ranges):
            sizes = [[size] * ranges] * len(keys[part])
            codes = self._client.batch_get_into_multi_buffers(keys[part], addresses[part], sizes)
            require(codes, size * ranges)

    def count(self, keys: Sequence[str]) -> int:
        return sum(code == 1 for code in self._client.batch_is_exist(keys))

    def remove(self, keys: Sequence[str]) -> None:
        require(self._client.batch_remove(keys, True))

    def close(self) -> None:
        self._client.close()


class BareRedis:
    """The client `redis`, in pipelines."""

    most_ranges = 0

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        redis = importlib.import_module("redis")
        self._client: Any = redis.Redis(
            host=host,
            port=int(port),
            password=os.environ.get(RedisSettings().password_variable),
            socket_timeout=TIMEOUT_MS / 1000,
        )

    def put(self, keys: Sequence[str], addresses: Sequence[int], size: int) -> None:
        for part in _parts(len(keys), max(PIPELINE_BYTES // size, 1)):
            pipe = self._client.pipeline(transaction=False)
            for key, address in zip(keys[part], addresses[part], strict=True):
                pipe.set(key, memoryview((ctypes.c_char * size).from_address(address)).cast("B"))
            if not all(pipe.execute()):
                raise InvariantError("Redis refused an object")

    def get(self, keys: Sequence[str], addresses: Sequence[int], size: int) -> None:
        """Into the ranges as well: it brings bytes of its own."""
        for part in _parts(len(keys), max(PIPELINE_BYTES // size, 1)):
            for value, address in zip(self._client.mget(keys[part]), addresses[part], strict=True):
                if value is None or len(value) != size:
                    raise InvariantError("Redis did not find a stored object")
                ctypes.memmove(address, value, size)

    def put_ranges(self, keys: Sequence[str], addresses: Sequence[Sequence[int]], size: int) -> None:
        raise NotImplementedError

    def get_ranges(self, keys: Sequence[str], addresses: Sequence[Sequence[int]], size: int) -> None:
        raise NotImplementedError

    def count(self, keys: Sequence[str]) -> int:
        return int(self._client.exists(*keys))

    def remove(self, keys: Sequence[str]) -> None:
        self._client.unlink(*keys)

    def close(self) -> None:
        self._client.close()


@contextlib.contextmanager
def bare_client(store: str, where: str, address: int, size: int) -> Iterator[BareClient]:
    """A client of the store at HOST:PORT that moves bytes from and to this memory."""
    client: BareMooncake | BareRedis
    client = BareRedis(where) if store == "redis" else BareMooncake(where, address, size)
    try:
        yield client
    finally:
        client.close()


def why_not(store: str) -> str | None:
    """None when this store can run here, else a sentence."""
    return servers.why_no_redis() if store == "redis" else servers.why_no_mooncake()


@contextlib.contextmanager
def cluster(store: str, room_bytes: int) -> Iterator[str]:
    """A store of its own with so much room, on the loopback, while the context lasts; where it listens."""
    with tempfile.TemporaryDirectory(prefix="umbp-bench-") as name, contextlib.ExitStack() as ending:
        if store == "redis":
            server = servers.start_redis(Path(name) / "log")
            ending.callback(server.kill)
            yield server.address
        else:
            yield ending.enter_context(servers.mooncake_cluster(Path(name), room_bytes))


def require_store(where: str) -> None:
    """`ConfigError` or `StoreError` at once where nobody listens at HOST:PORT: engines wait for a store that
    may come, who measures one doesn't.
    """
    host, colon, port = where.rpartition(":")
    if not (host and colon and port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ConfigError(f"--master must be host:port, not {shown(where)}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_S).close()
    except (OSError, UnicodeError) as error:
        raise StoreError(
            f"nobody answers at {where} ({error}); start the store there, or mend --master"
        ) from error


def quieten() -> None:
    """Mooncake's clients of this process tell their errors, not every step; for those yet to be made."""
    os.environ.setdefault("GLOG_minloglevel", "2")


def store_options(store: str, where: str) -> dict[str, object]:
    """The option `store_options` for the store at HOST:PORT."""
    if store == "redis":
        host, _, port = where.rpartition(":")
        return {"host": host, "port": int(port), "timeout_ms": TIMEOUT_MS}
    return {"master": where, "timeout_ms": TIMEOUT_MS}


def _parts(count: int, most: int) -> Iterator[slice]:
    for first in range(0, count, most):
        yield slice(first, first + most)
