"""What Redis says, as outcomes: no room, another kind of value, a silent server, a password."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from umbp.errors import ConfigError
from umbp.store.base import Outcome
from umbp.store.gate import StoreGate
from umbp.store.redis import RedisSettings, RedisStore
from umbp.testing.stores.rig import StoreRig
from umbp.testing.stores.servers import Server, start_redis

DONE, MISS, LATER, BROKEN = Outcome.DONE, Outcome.MISS, Outcome.LATER, Outcome.BROKEN
DAMAGED = Outcome.DAMAGED


def port_of(server: Server) -> int:
    return int(server.address.rpartition(":")[2])


@pytest.fixture
def small(needs_redis: None, tmp_path: Path) -> Iterator[Server]:
    """A server of 4 MiB that makes no room."""
    server = start_redis(tmp_path / "log", 0, "--maxmemory", "4mb", "--requirepass", "secret")
    yield server
    server.kill()


@pytest.fixture
def password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UMBP_REDIS_PASSWORD", "secret")


@pytest.fixture
def rig(small: Server, password: None) -> Iterator[StoreRig]:
    rig = StoreRig(RedisStore(RedisSettings(port=port_of(small), timeout_ms=300)), 8 << 20)
    yield rig
    rig.store.close()


def test_a_full_server_is_well_and_takes_nothing_now(rig: StoreRig) -> None:
    outcomes = [rig.put({f"k{number}": bytes(1 << 20)})[0] for number in range(6)]
    assert set(outcomes) == {DONE, LATER}
    assert rig.put({"k0": bytes(1 << 20)}) == [LATER]
    assert rig.fetch({"k0": bytes(1 << 20)}) == [DONE]
    assert rig.store.probe()


ODD = {
    "empty": lambda client, key: client.set(key, b""),
    "shorter": lambda client, key: client.set(key, b"x" * 999),
    "longer": lambda client, key: client.set(key, b"x" * 1001),
    "list": lambda client, key: client.rpush(key, "a", "b"),
    "hash": lambda client, key: client.hset(key, "a", "b"),
    "set": lambda client, key: client.sadd(key, "a"),
    "sorted set": lambda client, key: client.zadd(key, {"a": 1}),
    "stream": lambda client, key: client.xadd(key, {"a": "b"}),
}
"""What somebody else, or another program, may have left under a key."""


@pytest.mark.parametrize("odd", ODD)
def test_what_is_no_object_of_its_size_is_damaged_until_it_is_removed(
    rig: StoreRig, small: Server, odd: str
) -> None:
    redis = pytest.importorskip("redis")
    with redis.Redis(port=port_of(small), password="secret") as client:
        ODD[odd](client, "k")
    whole = {"k": b"a" * 1000}
    assert rig.put(whole) == rig.exists(["k"]) == [DONE]
    assert rig.get({"absent": 1000, "k": 1000, "absent too": 1000})[0] == [MISS, DAMAGED, MISS]
    assert rig.remove(["k"]) == [DONE]
    assert rig.fetch(whole) == [MISS]
    assert rig.put(whole) == rig.fetch(whole) == [DONE]


def test_a_silent_server_costs_a_bounded_time_and_is_well_again_at_once(rig: StoreRig, small: Server) -> None:
    rig.put({"a": b"value"})
    small.stop()
    assert rig.exists(["a"]) == [BROKEN]
    assert not rig.is_well()
    small.go_on()
    assert rig.store.probe()
    assert rig.fetch({"a": b"value"}) == [DONE]


def test_the_log_tells_why_a_server_cannot_be_used_any_more_and_that_it_can(
    small: Server, password: None, caplog: pytest.LogCaptureFixture
) -> None:
    redis = pytest.importorskip("redis")
    caplog.set_level(logging.WARNING, logger="vllm.umbp")
    returns = threading.Semaphore(0)
    gate = StoreGate("redis", lambda: RedisStore(RedisSettings(port=port_of(small))))
    gate.on_return(returns.release)
    with redis.Redis(port=port_of(small), password="secret") as admin:
        gate.open(30.0)
        assert returns.acquire(timeout=30.0)
        admin.config_set("requirepass", "another")
        admin.client_kill_filter(_type="normal", skipme=True)
        assert gate.call(lambda store: store.exists(["a"]), 30.0) == [BROKEN]
        until_s = time.monotonic() + 30
        while "the password in the environment's UMBP_REDIS_PASSWORD right?" not in caplog.text:
            assert time.monotonic() < until_s
        admin.config_set("requirepass", "secret")
    assert returns.acquire(timeout=30.0)
    assert "UMBP: the store 'redis' can be used again, after " in caplog.text
    assert "secret" not in caplog.text
    gate.close(10.0)


def test_an_answer_that_no_ping_would_give_is_told_of_once(
    rig: StoreRig, small: Server, caplog: pytest.LogCaptureFixture
) -> None:
    redis = pytest.importorskip("redis")
    with redis.Redis(port=port_of(small), password="secret") as admin:
        admin.replicaof("127.0.0.1", "1")
        for _ in range(2):
            assert rig.put({"a": b"value"}) == [BROKEN]
        admin.replicaof("NO", "ONE")
    (line,) = [each.getMessage() for each in caplog.records if "read only replica" in each.getMessage()]
    assert line.startswith("UMBP: the Redis at 127.0.0.1:")
    assert rig.is_well()


@pytest.mark.parametrize("given", ["", "wrong"])
def test_a_wrong_password_is_one_sentence_without_it_and_is_not_tried_again(
    small: Server, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("UMBP_REDIS_PASSWORD", given)
    with pytest.raises(ConfigError) as caught:
        RedisStore(RedisSettings(port=port_of(small))).open()
    gate = StoreGate("redis", lambda: RedisStore(RedisSettings(port=port_of(small))))
    with pytest.raises(ConfigError):
        gate.open(600.0)
    gate.close(10.0)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_url_names_the_server_too(small: Server, password: None) -> None:
    store = RedisStore(RedisSettings(url=f"redis://127.0.0.1:{port_of(small)}/2"))
    store.open()
    assert store.probe()
    assert store.describe()["memory at most"] == "4.00M"
    store.close()
