"""Real servers that the tests of this folder share, and sentences for those that aren't to be had here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from umbp.testing.stores import servers

MOONCAKE_BYTES = 384 << 20


@pytest.fixture
def closed_port() -> int:
    """Where nobody listens."""
    return servers.free_ports(1)[0]


@pytest.fixture(scope="session")
def needs_mooncake() -> None:
    if why := servers.why_no_mooncake():
        pytest.skip(why)


@pytest.fixture(scope="session")
def needs_redis() -> None:
    if why := servers.why_no_redis():
        pytest.skip(why)


@pytest.fixture(scope="session")
def mooncake_master(needs_mooncake: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a master listens, with one node behind it."""
    with servers.mooncake_cluster(tmp_path_factory.mktemp("mooncake"), MOONCAKE_BYTES) as master:
        yield master


@pytest.fixture(scope="session")
def redis_port(needs_redis: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    server = servers.start_redis(tmp_path_factory.mktemp("redis") / "log")
    yield int(server.address.rpartition(":")[2])
    server.kill()
