"""The systems that are compared: how each is asked of vLLM, what it needs beside the engine, why it is left
out.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from e2e import models
from e2e.harness import EngineSpec

ENGINE_BLOCKS = 200
MAX_MODEL_TOKENS = 4096
POOL_BYTES = 1 << 30
MASTER_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class System:
    """One row of the comparison."""

    name: str
    spec: EngineSpec


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
        options = {"mode": "standalone", "pool": "node", "pool_dir": pool_dir, "capacity_bytes": 2 * POOL_BYTES}
        yield System("UMBP, standalone", spec(connector=tuple(options.items())))


def why_no_mooncake() -> str | None:
    """None when Mooncake can run here, else a sentence."""
    if importlib.util.find_spec("mooncake") is None:
        return "Mooncake is left out: pip install mooncake-transfer-engine-non-cuda"
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        return f"Mooncake is left out, its libraries don't load (libibverbs1 libnuma1 libcurl4): {error}"
    return None


@contextlib.contextmanager
def mooncake_embedded(folder: Path) -> Iterator[System]:
    """vLLM's MooncakeStoreConnector, its pool in the worker's process, its master on the loopback."""
    port, metrics_port = _free_ports(2)
    config = folder / "mooncake.json"
    settings = {
        "mode": "embedded",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"127.0.0.1:{port}",
        "protocol": "tcp",
        "device_name": "",
        "global_segment_size": POOL_BYTES,
        "local_buffer_size": 256 << 20,
    }
    config.write_text(json.dumps(settings))
    with _mooncake_master(folder / "mooncake-master.log", port, metrics_port):
        yield System(
            "Mooncake Store, in the worker's process",
            spec(
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
            ),
        )


@contextlib.contextmanager
def _mooncake_master(log: Path, port: int, metrics_port: int) -> Iterator[None]:
    found = importlib.util.find_spec("mooncake")
    assert found is not None
    assert found.submodule_search_locations
    master = Path(next(iter(found.submodule_search_locations))) / "mooncake_master"
    command = [
        str(master),
        "--rpc_address=127.0.0.1",
        f"--rpc_port={port}",
        "--metrics_host=127.0.0.1",
        f"--metrics_port={metrics_port}",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    try:
        _wait_for_port(port, process, log)
        yield
    finally:
        process.kill()
        process.wait()


def _wait_for_port(port: int, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + MASTER_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0):
            return
        time.sleep(0.05)
    raise RuntimeError(f"mooncake_master did not come up: {log.read_text(errors='replace')[-500:]}")


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [int(each.getsockname()[1]) for each in sockets]
