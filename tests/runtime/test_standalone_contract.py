"""The standalone runtime keeps the contract, with every worker and scheduler on one file."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from umbp.options import parse_options
from umbp.pool import Pool
from umbp.pool.sharing import pool_path
from umbp.runtime.base import IUMBPRuntime
from umbp.runtime.standalone import StandaloneRuntime
from umbp.runtime.wrap.faulty import FaultPlan, FaultyRuntime
from umbp.testing.contract import RuntimeContract

SLOT_BYTES = 8192
"""What an object of 4 KiB takes with its seal and trailer, in whole pages."""


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="umbp-test-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


def standalone(folder: Path, **options: object) -> StandaloneRuntime:
    extra: dict[str, object] = {"mode": "standalone", "pool": "p", "pool_dir": str(folder)}
    return StandaloneRuntime(parse_options(extra | {"capacity_bytes": "16MiB"} | options))


class TestStandaloneRuntime(RuntimeContract):
    @pytest.fixture
    def runtime(self, folder: Path) -> IUMBPRuntime:
        return standalone(folder)

    @pytest.fixture
    def scheduler_runtime(self, folder: Path) -> IUMBPRuntime:
        """The scheduler's process makes a runtime of its own."""
        return standalone(folder)


@pytest.mark.slow
class TestStandaloneRuntimeOfRanksThatHoldTheSame(TestStandaloneRuntime):
    kv_tp_replicas = 2


class TestSmallStandaloneRuntime(RuntimeContract):
    capacity_objects = 12

    @pytest.fixture
    def runtime(self, folder: Path) -> IUMBPRuntime:
        path = Path(pool_path(folder, "p"))
        Pool.create(path, 12 * SLOT_BYTES, slab_bytes=SLOT_BYTES, min_object_bytes=4096).close()
        return standalone(folder)


class TestVerifyingStandaloneRuntime(RuntimeContract):
    @pytest.fixture
    def runtime(self, folder: Path) -> IUMBPRuntime:
        return standalone(folder, verify="always")


class TestFaultyStandaloneRuntime(RuntimeContract):
    may_fail = True

    @pytest.fixture
    def runtime(self, folder: Path) -> IUMBPRuntime:
        plan = FaultPlan(3, load_keys=0.2, load_jobs=0.1, store_keys=0.2, store_jobs=0.1, lookups=0.2)
        return FaultyRuntime(standalone(folder), plan)
