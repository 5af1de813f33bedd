"""The systems that are compared: how each is asked of vLLM, what it needs beside the engine, why it is left
out.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from e2e import models
from e2e.harness import EngineSpec
from umbp.cli.bench import mooncake
from umbp.testing.stores import servers

ENGINE_BLOCKS = 200
MAX_MODEL_TOKENS = 4096
POOL_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class System:
    """One row of the comparison."""

    name: str
    spec: EngineSpec
    outlives: bool = False
    """Whether what one engine has stored is there for another one that comes after it."""


def spec(
    connector: tuple[tuple[str, object], ...] | None = None,
    transfer: tuple[tuple[str, object], ...] = (),
    environment: tuple[tuple[str, str], ...] = (),
) -> EngineSpec:
    return EngineSpec(
        model=models.PEERS,
        blocks=ENGINE_BLOCKS,
        max_model_tokens=MAX_MODEL_TOKENS,
        connector=connector,
        transfer=transfer,
        environment=environment,
    )


@contextlib.contextmanager
def vllm_alone(folder: Path) -> Iterator[System]:
    yield System("vLLM alone", spec())


@contextlib.contextmanager
def umbp_embedded(folder: Path) -> Iterator[System]:
    yield System("UMBP, embedded", spec(connector=(("capacity_bytes", POOL_BYTES),)))


@contextlib.contextmanager
def umbp_standalone(folder: Path) -> Iterator[System]:
    """A pool of the node, in the RAM file system; it stays while engines come and go."""
    with tempfile.TemporaryDirectory(prefix="umbp-bench-", dir="/dev/shm") as pool_dir:
        options = {
            "mode": "standalone",
            "pool": "node",
            "pool_dir": pool_dir,
            "capacity_bytes": 2 * POOL_BYTES,
        }
        yield System("UMBP, standalone", spec(connector=tuple(options.items())), outlives=True)


@contextlib.contextmanager
def umbp_distributed(folder: Path) -> Iterator[System]:
    """A pool of each engine's own, and behind it the cluster, over TCP."""
    with servers.mooncake_cluster(folder, 2 * POOL_BYTES) as master:
        options = {
            "mode": "distributed",
            "store": "mooncake",
            "store_options": {"master": master},
            "capacity_bytes": POOL_BYTES,
        }
        yield System("UMBP, distributed", spec(connector=tuple(options.items())), outlives=True)


@contextlib.contextmanager
def mooncake_cluster(folder: Path) -> Iterator[System]:
    """vLLM's MooncakeStoreConnector, its pool in another process, over TCP."""
    with servers.mooncake_cluster(folder, 2 * POOL_BYTES) as master:
        settings = {"mode": "standalone-store", "global_segment_size": 0}
        yield mooncake_system("Mooncake Store, in another process", folder, master, settings, outlives=True)


@contextlib.contextmanager
def mooncake_embedded(folder: Path) -> Iterator[System]:
    """vLLM's MooncakeStoreConnector, its pool in the worker's process, its master on the loopback."""
    with mooncake.master(folder / "mooncake-master.log") as master:
        settings = {"mode": "embedded", "global_segment_size": POOL_BYTES}
        yield mooncake_system(
            "Mooncake Store, in the worker's process", folder, master, settings, outlives=False
        )


def mooncake_system(
    name: str, folder: Path, master: str, settings: dict[str, object], *, outlives: bool
) -> System:
    config = folder / "mooncake.json"
    common = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master,
        "protocol": "tcp",
        "device_name": "",
        "local_buffer_size": 256 << 20,
    }
    config.write_text(json.dumps(common | settings))
    found = spec(
        transfer=(
            ("kv_connector", "MooncakeStoreConnector"),
            ("kv_role", "kv_both"),
            ("kv_load_failure_policy", "recompute"),
        ),
        environment=(
            ("MOONCAKE_CONFIG_PATH", str(config)),
            ("MC_TCP_BIND_ADDRESS", "127.0.0.1"),
            ("VLLM_HOST_IP", "127.0.0.1"),
        ),
    )
    return System(name, found, outlives)
