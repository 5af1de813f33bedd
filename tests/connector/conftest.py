"""Engines without a model, over each runtime that keeps objects in this process."""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

pytest.importorskip("vllm", reason="vLLM isn't installed: run `make setup`")

import scripted_runtime
from scripted import ScriptedEngine, Shape
from scripted_runtime import WatchedRuntime

from umbp.options import parse_options
from umbp.runtime.base import IUMBPRuntime
from umbp.testing.reference import ReferenceRuntime
from umbp.testing.stores.memory import MemoryCluster

if TYPE_CHECKING:
    from nodes import Node

MakeEngine = Callable[..., ScriptedEngine]
MakePool = Callable[..., WatchedRuntime]


ABOUT_STORES = {"test_deaths.py", "test_ends.py", "test_far_walk.py", "test_lossy.py"}
"""What these are about is the same whichever vLLM it is."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and item.path.name not in ABOUT_STORES:
            item.add_marker(pytest.mark.vllm033)


@pytest.fixture(scope="session", autouse=True)
def _plug_in(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Install the plug-in of mode "scripted" as a distribution of its own, as a user's would be."""
    folder = tmp_path_factory.mktemp("plug-in")
    info = folder / "scripted_runtime-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scripted-runtime\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[umbp.runtimes]\n{scripted_runtime.MODE} = scripted_runtime:make\n"
    )
    sys.path.append(str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scripted")


@pytest.fixture
def options_of() -> Iterator[Callable[[IUMBPRuntime], dict[str, object]]]:
    """The connector's options that make it use the given runtime."""
    names = itertools.count()

    def put(runtime: IUMBPRuntime) -> dict[str, object]:
        name = str(next(names))
        scripted_runtime.TABLE[name] = runtime
        return {"mode": scripted_runtime.MODE, "plugin_options": {"runtime": name}}

    yield put
    scripted_runtime.TABLE.clear()


@pytest.fixture
def shared_pool() -> Iterator[Callable[..., WatchedRuntime]]:
    """Runtimes on pools in files. Calls with one name give engines that share the pool."""
    standalone = pytest.importorskip("umbp.runtime.standalone", reason="the native core isn't built")
    folder = Path(tempfile.mkdtemp(prefix="umbp-test-", dir="/dev/shm"))

    def make(objects: int, name: str) -> WatchedRuntime:
        path = standalone.pool_path(folder, name)
        if not os.path.exists(path):
            standalone.Pool.create(path, objects * 4096, slab_bytes=4096, min_object_bytes=512).close()
        extra = {"mode": "standalone", "pool": name, "pool_dir": str(folder), "num_workers": 1}
        return WatchedRuntime(standalone.StandaloneRuntime(parse_options(extra)))

    yield make
    shutil.rmtree(folder)


@pytest.fixture(params=["reference", "embedded", "standalone"])
def make_pool(request: pytest.FixtureRequest, shared_pool: Callable[..., WatchedRuntime]) -> MakePool:
    """Runtimes of one kind, each with room for so many objects: of each rank, or of all where they share."""
    names = itertools.count()

    def make(objects: int = 1000) -> WatchedRuntime:
        if request.param == "reference":
            return WatchedRuntime(ReferenceRuntime(objects))
        if request.param == "standalone":
            return shared_pool(objects, f"p{next(names)}")
        embedded = pytest.importorskip("umbp.runtime.embedded", reason="the native core isn't built")
        options = parse_options({"capacity_bytes": objects * 4096, "num_workers": 1})
        return WatchedRuntime(embedded.EmbeddedRuntime(options))

    return make


@pytest.fixture
def make_engine(root: Path, options_of: Any) -> Iterator[MakeEngine]:
    """Engines over a given runtime, closed at the end."""
    engines = []

    def make(runtime: IUMBPRuntime, extra: Any = None, **shape: Any) -> ScriptedEngine:
        engine = ScriptedEngine(root, Shape(extra=options_of(runtime) | (extra or {}), **shape))
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def cluster() -> Iterator[MemoryCluster]:
    made = MemoryCluster()
    yield made
    made.go_on()
    assert not made.misuses


@pytest.fixture
def start(
    cluster: MemoryCluster, root: Path, options_of: Callable[[IUMBPRuntime], dict[str, object]]
) -> Iterator[Callable[..., tuple[ScriptedEngine, Node]]]:
    """Engines with a pool each, or one that they share, before the cluster's store; and their runtimes."""
    nodes = pytest.importorskip("nodes", reason="the native core isn't built")
    engines: list[ScriptedEngine] = []

    def make(options: dict[str, object] | None = None, **shape: Any) -> tuple[ScriptedEngine, Node]:
        # A store that answers is never given up because a busy machine has no processor for it.
        options = {"lookup_timeout_ms": 30_000} | (options or {})
        node = nodes.Node(cluster, **options)
        extra = options_of(node) | {"min_load_tokens": 0, "lookup_timeout_ms": options["lookup_timeout_ms"]}
        engines.append(ScriptedEngine(root, Shape(extra=extra, **shape)))
        return engines[-1], node

    yield make
    cluster.go_on()
    for engine in engines:
        engine.close()
