"""Every store keeps the contract: both adapters on real servers, the store in memory, and one that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from umbp.store.base import ClusterStore
from umbp.store.mooncake import MooncakeStore
from umbp.store.mooncake_settings import MooncakeSettings
from umbp.store.redis import RedisSettings, RedisStore
from umbp.testing.stores.contract import StoreContract, StoreDeathContract
from umbp.testing.stores.faulty import Faults, FaultyStore
from umbp.testing.stores.memory import MemoryCluster
from umbp.testing.stores.servers import MortalMooncake, MortalRedis

FAULTS = Faults(misses=0.1, halves=0.5, laters=0.1, lost_puts=0.1, breaks=0.05, lies=0.1)


class TestMooncake(StoreContract):
    @pytest.fixture(scope="class")
    @classmethod
    def make_store(cls, mooncake_master: str) -> Callable[[], ClusterStore]:
        return lambda: MooncakeStore(MooncakeSettings(master=mooncake_master))

    @pytest.fixture
    def make_unreachable(self, needs_mooncake: None, closed_port: int) -> Callable[[], ClusterStore]:
        return lambda: MooncakeStore(MooncakeSettings(master=f"127.0.0.1:{closed_port}"))


class TestRedis(StoreContract):
    @pytest.fixture(scope="class")
    @classmethod
    def make_store(cls, redis_port: int) -> Callable[[], ClusterStore]:
        return lambda: RedisStore(RedisSettings(port=redis_port))

    @pytest.fixture
    def make_unreachable(self, needs_redis: None, closed_port: int) -> Callable[[], ClusterStore]:
        return lambda: RedisStore(RedisSettings(port=closed_port))


class TestMemory(StoreContract):
    @pytest.fixture(scope="class")
    @classmethod
    def make_store(cls) -> Callable[[], ClusterStore]:
        return MemoryCluster().connect

    @pytest.fixture
    def make_unreachable(self) -> Callable[[], ClusterStore]:
        cluster = MemoryCluster()
        cluster.is_down = True
        return cluster.connect


class TestFaulty(StoreContract):
    may_fail = True

    @pytest.fixture(scope="class")
    @classmethod
    def make_store(cls) -> Callable[[], ClusterStore]:
        cluster, seeds = MemoryCluster(), count()
        return lambda: FaultyStore(cluster.connect(), FAULTS, seed=next(seeds))


@pytest.mark.slow
class TestMooncakeDies(StoreDeathContract):
    @pytest.fixture
    def mortal(self, needs_mooncake: None, tmp_path: Path) -> Iterator[MortalMooncake]:
        mortal = MortalMooncake(tmp_path)
        yield mortal
        mortal.end()


class TestRedisDies(StoreDeathContract):
    @pytest.fixture
    def mortal(self, needs_redis: None, tmp_path: Path) -> Iterator[MortalRedis]:
        mortal = MortalRedis(tmp_path)
        yield mortal
        mortal.end()
