"""The example of one engine that prefills and one that decodes, as its README starts it: two vLLM servers, a
pool that both share, and the proxy before them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e import models
from e2e.harness import BLOCK_TOKENS, START_TIMEOUT_S, EnginePool, EngineSpec, random_prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROXY = Path(__file__).resolve().parents[2] / "examples" / "prefill_decode" / "proxy.py"
MODEL = "tiny"
PROMPT = 300
RESTORABLE = (PROMPT - 1) // BLOCK_TOKENS * BLOCK_TOKENS


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Server:
    """A process group that listens on a port of the loopback."""

    def __init__(self, command: list[str], port: int, log: Path, environment: dict[str, str]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def wait_for(self, path: str) -> None:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.get(path)
                return
            except urllib.error.HTTPError as not_yet:
                not_yet.close()
            except OSError:
                pass  # nobody listens yet
            assert self._process.poll() is None, self._log.read_text()[-6000:]
            assert time.monotonic() < deadline_s, self._log.read_text()[-6000:]
            time.sleep(0.2)  # it tells nobody when it is up

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return str(answer.read().decode())

    def post(self, path: str, body: object) -> str:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return str(answer.read().decode())

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def restored_tokens(self) -> int:
        lines = self.get("/metrics").splitlines()
        found = [line for line in lines if line.startswith("vllm:umbp_loaded_tokens_total")]
        return int(sum(float(line.rpartition(" ")[2]) for line in found))


class Cluster:
    """Both engines and the proxy."""

    def __init__(self, folder: Path, pool_dir: Path) -> None:
        self._folder = folder
        self._environment = EngineSpec().process_environment(folder)
        self._model = models.make_model(models.TINY, folder)
        cores = sorted(os.sched_getaffinity(0))
        self.prefill = self._engine("kv_producer", pool_dir, cores[0])
        self.decode = self._engine("kv_consumer", pool_dir, cores[-1])
        port = free_port()
        command = [sys.executable, str(PROXY), "--prefill", self.prefill.url, "--decode", self.decode.url]
        self.proxy = Server(command, port, folder / "proxy.log", self._environment)

    def _engine(self, role: str, pool_dir: Path, core: int) -> Server:
        transfer = {
            "kv_connector": "UMBPStoreConnector",
            "kv_connector_module_path": "umbp.connector",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "mode": "standalone",
                "pool": "node",
                "pool_dir": str(pool_dir),
                "capacity_bytes": 64 << 20,
                "min_load_tokens": 0,
                "lookup_timeout_ms": 10_000,
            },
        }
        arguments: dict[str, object] = {
            "model": self._model,
            "served-model-name": MODEL,
            "dtype": "bfloat16",
            "max-model-len": 1024,
            "block-size": BLOCK_TOKENS,
            "num-gpu-blocks-override": 64,
            "max-num-seqs": 8,
            "kv-transfer-config": json.dumps(transfer),
        }
        flags = [text for name, value in arguments.items() for text in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags]
        command += ["--skip-tokenizer-init", "--enforce-eager"]
        environment = self._environment | {"VLLM_CPU_OMP_THREADS_BIND": str(core)}
        return Server(command, free_port(), self._folder / f"{role}.log", environment)

    def wait(self) -> None:
        for engine in (self.prefill, self.decode):
            engine.wait_for("/health")
        self.proxy.wait_for("/v1/models")

    def kill(self) -> None:
        for server in (self.proxy, self.decode, self.prefill):
            server.kill()


@pytest.fixture(scope="module")
def cluster(engines: EnginePool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    engines.close()  # room for two
    pool_dir = Path(tempfile.mkdtemp(prefix="umbp-test-", dir="/dev/shm"))
    started = Cluster(tmp_path_factory.mktemp("cluster"), pool_dir)
    try:
        started.wait()
        yield started
    finally:
        started.kill()
        shutil.rmtree(pool_dir)


def asked(seed: int, **more: object) -> dict[str, object]:
    prompt = list(random_prompt(PROMPT, seed=seed).tokens)
    body: dict[str, object] = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    return body | {"return_token_ids": True, "ignore_eos": True} | more


def tokens_of(answer: str) -> list[int]:
    told: dict[str, Any] = json.loads(answer)
    return list(told["choices"][0]["token_ids"])


def test_what_one_engine_has_prefilled_the_other_decodes_as_one_alone_would(cluster: Cluster) -> None:
    answer = cluster.proxy.post("/v1/completions", asked(1))
    assert cluster.decode.restored_tokens() == RESTORABLE
    assert cluster.prefill.restored_tokens() == 0
    assert tokens_of(answer) == tokens_of(cluster.prefill.post("/v1/completions", asked(1)))


def test_a_streamed_answer_is_passed_on(cluster: Cluster) -> None:
    before = cluster.decode.restored_tokens()
    events = cluster.proxy.post("/v1/completions", asked(2, stream=True)).split("\n\n")
    assert "data: [DONE]" in events
    pieces = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    tokens = [token for piece in pieces for token in piece["choices"][0].get("token_ids") or ()]
    assert tokens == tokens_of(cluster.prefill.post("/v1/completions", asked(2)))
    assert cluster.decode.restored_tokens() - before == RESTORABLE


def test_an_engines_refusal_is_the_clients(cluster: Cluster) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        cluster.proxy.post("/v1/completions", asked(3, max_tokens=-1))
    assert refused.value.code == 400
    refused.value.close()


def test_without_the_prefill_engine_the_other_computes(cluster: Cluster) -> None:
    expected = tokens_of(cluster.prefill.post("/v1/completions", asked(4)))
    cluster.prefill.kill()
    before = cluster.decode.restored_tokens()
    assert tokens_of(cluster.proxy.post("/v1/completions", asked(5)))
    assert cluster.decode.restored_tokens() == before
    assert tokens_of(cluster.proxy.post("/v1/completions", asked(4))) == expected
    assert cluster.decode.restored_tokens() - before == RESTORABLE, "what it stored outlives it"
