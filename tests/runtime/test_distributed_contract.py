"""The distributed runtime keeps the contract, over a store in memory: well, refusing, broken and lying."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from umbp.options import Options, parse_options
from umbp.runtime.base import IUMBPRuntime
from umbp.runtime.distributed import DistributedRuntime
from umbp.runtime.wrap.faulty import FaultPlan, FaultyRuntime
from umbp.store.base import ClusterStore
from umbp.testing.contract import RuntimeContract
from umbp.testing.rig import Rig
from umbp.testing.stores.memory import MemoryCluster


def distributed(cluster: MemoryCluster, **options: object) -> DistributedRuntime:
    def connect(options: Options, *, serves_memory: bool) -> ClusterStore:
        return cluster.connect()

    extra: dict[str, object] = {"mode": "distributed", "store": "memory", "capacity_bytes": "16MiB"}
    return DistributedRuntime(parse_options(extra | options), connect)


@pytest.fixture
def cluster() -> Iterator[MemoryCluster]:
    made = MemoryCluster()
    yield made
    assert not made.misuses


class TestDistributedRuntime(RuntimeContract):
    @pytest.fixture
    def runtime(self, cluster: MemoryCluster) -> IUMBPRuntime:
        return distributed(cluster)


class TestDistributedRuntimeOfRanksThatHoldTheSame(RuntimeContract):
    kv_tp_replicas = 2

    @pytest.fixture
    def runtime(self, cluster: MemoryCluster) -> IUMBPRuntime:
        return distributed(cluster)


@pytest.mark.slow
class TestDistributedRuntimeOnASharedPool(RuntimeContract):
    @pytest.fixture
    def runtime(self, cluster: MemoryCluster) -> Iterator[IUMBPRuntime]:
        folder = Path(tempfile.mkdtemp(prefix="umbp-test-", dir="/dev/shm"))
        yield distributed(cluster, pool="p", pool_dir=str(folder))
        shutil.rmtree(folder)


@pytest.mark.slow
class TestDistributedRuntimeOfRanksThatHoldTheSameOnASharedPool(TestDistributedRuntimeOnASharedPool):
    kv_tp_replicas = 2


@pytest.mark.slow
class TestDistributedRuntimeThatWaitsForAnswers(RuntimeContract):
    @pytest.fixture
    def runtime(self, cluster: MemoryCluster) -> IUMBPRuntime:
        return distributed(cluster, lookup_async=False)


@pytest.mark.slow
class TestDistributedRuntimeWhoseStoreIsFull(RuntimeContract):
    @pytest.fixture
    def runtime(self, cluster: MemoryCluster) -> IUMBPRuntime:
        cluster.room_bytes = 0
        return distributed(cluster)


@pytest.mark.slow
class TestFaultyDistributedRuntime(RuntimeContract):
    may_fail = True

    @pytest.fixture
    def runtime(self, cluster: MemoryCluster) -> IUMBPRuntime:
        plan = FaultPlan(3, load_keys=0.2, load_jobs=0.1, store_keys=0.2, store_jobs=0.1, lookups=0.2)
        return FaultyRuntime(distributed(cluster), plan)


def test_the_log_names_the_store_and_the_engines_namespace(
    cluster: MemoryCluster, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "vllm.umbp"):
        rig = Rig(distributed(cluster), "named")
    rig.close()
    (line,) = [each for each in caplog.messages if "cluster store" in each]
    assert line.startswith("UMBP: cluster store memory: ")
    assert line.endswith(f"this engine's namespace is {rig.namespace.value}")
