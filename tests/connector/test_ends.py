"""Engines that are killed while they send and fetch: the others go on, and nothing stays held."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import far_child
import pytest
from far_engines import NODE_BYTES, PATIENCE_S, TimedEngine, far_shape
from scripted import BLOCK, tokens

from umbp.pool import Pool
from umbp.pool.sharing import pool_path
from umbp.testing.stores.servers import MooncakeCluster, why_no_mooncake

pytestmark = pytest.mark.slow


class Child:
    """An engine in a process of its own."""

    def __init__(self, cluster: MooncakeCluster, root: Path, what: str, **options: object) -> None:
        program = str(Path(far_child.__file__))
        arguments = [cluster.address, str(root), what, json.dumps(options)]
        self.process = subprocess.Popen(
            [sys.executable, program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hear(self, word: str) -> str:
        """Wait until it says something that begins with the word; the rest."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(word):
                return line.removeprefix(word).strip()
        raise AssertionError(f"the process ended with {self.process.wait()} before it said {word!r}")

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        for each in (self.process.stdin, self.process.stdout):
            if each is not None:
                each.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MooncakeCluster]:
    if why := why_no_mooncake():
        pytest.skip(why)
    made = MooncakeCluster(tmp_path_factory.mktemp("cluster"), NODE_BYTES)
    yield made
    made.end()


@pytest.fixture
def pool_dir() -> Iterator[str]:
    made = tempfile.mkdtemp(prefix="umbp-test-", dir="/dev/shm")
    yield made
    shutil.rmtree(made)


@pytest.mark.parametrize("deed", ["send", "fetch"])
def test_an_engine_killed_while_it_sends_or_fetches_leaves_nothing_held(
    cluster: MooncakeCluster, root: Path, pool_dir: str, deed: str
) -> None:
    """Scenario: two engines share a near pool. The nodes are stopped, so that one is in the middle of it for
    certain when it is killed; the other stores and restores the same prompts afterwards.
    """
    shared = {"pool": "near", "pool_dir": pool_dir, "timeout_ms": 3000}
    stores = TimedEngine(root, far_shape(cluster.address))
    stores.serve(far_child.KEPT)
    stores.flush()
    other = TimedEngine(root, far_shape(cluster.address, shared))
    other.serve(tokens(BLOCK + 1, 500))
    child = Child(cluster, root, deed, **shared)
    try:
        child.hear("reads")
        for node in cluster.nodes:
            node.stop()
        child.go_on()
        child.hear(f"{deed}s" if deed == "send" else "fetches")
        with Pool.attach(pool_path(pool_dir, "near")) as pool:
            child.kill()
            for node in cluster.nodes:
                node.go_on()
            for prompt in (far_child.KEPT, far_child.NEW):
                until_s = time.monotonic() + PATIENCE_S
                while other.restores(prompt) != 10 * BLOCK:
                    other.forget_prefixes()
                    assert time.monotonic() < until_s
            other.flush()
            # What the dead held is given back in passing.
            until_s = time.monotonic() + PATIENCE_S
            while pool.stats()["pinned"]:
                other.serve(far_child.KEPT)
                assert time.monotonic() < until_s
            other.check_even()
            pool.audit()
    finally:
        child.kill()
        for engine in (stores, other):
            engine.close()
