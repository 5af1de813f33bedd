"""The example of one engine that prefills and one that decodes, as its README starts it on two nodes: two
vLLM servers, each with a pool of its own, Mooncake Store between them, and the proxy before them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from e2e import models
from e2e.harness import BLOCK_TOKENS, START_TIMEOUT_S, EnginePool, EngineSpec, random_prompt
from umbp.testing.groups import kill_group
from umbp.testing.stores.servers import MooncakeCluster, free_ports, why_no_mooncake
from umbp.testing.tied import start_tied

# Two engines with their servers and a store's: beside other tests they get too little of two processors.
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.alone]

PROXY = Path(__file__).resolve().parents[2] / "examples" / "prefill_decode" / "proxy.py"
MODEL = "tiny"
PROMPT = 300
RESTORABLE = (PROMPT - 1) // BLOCK_TOKENS * BLOCK_TOKENS
NODE_BYTES = 64 << 20
LOOKUP_TIMEOUT_S = 3.0
SLACK_S = 3.0
"""For whatever else a request takes on a busy machine."""
AWAITED = ("awaited_requests", "awaited_in_vain_requests")


class Server:
    """A process group that listens on a port of the loopback. It is told to end when this process is gone."""

    def __init__(self, command: list[str], port: int, log: Path, environment: dict[str, str]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        with log.open("wb") as file:
            self._process = start_tied(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                signal.SIGTERM,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                process_group=0,
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
        kill_group(self._process.pid)
        self._process.wait()

    def count(self, name: str, tier: str = "") -> int:
        """A counter's amount: of this tier, or of all labels together."""
        lines = self.get("/metrics").splitlines()
        found = [line for line in lines if line.startswith(f"vllm:umbp_{name}_total")]
        if tier:
            found = [line for line in found if f'tier="{tier}"' in line]
        return int(sum(float(line.rpartition(" ")[2]) for line in found))


class Pair:
    """Both engines, what is between them, and the proxy."""

    def __init__(self, folder: Path, store: MooncakeCluster) -> None:
        self.store = store
        self._folder = folder
        self._environment = EngineSpec().process_environment(folder)
        self._model = models.make_model(models.TINY, folder)
        cores = sorted(os.sched_getaffinity(0))
        self.prefill = self._engine("kv_producer", cores[0])
        self.decode = self._engine("kv_consumer", cores[-1])
        (port,) = free_ports(1)
        command = [sys.executable, str(PROXY), "--prefill", self.prefill.url, "--decode", self.decode.url]
        self.proxy = Server(command, port, folder / "proxy.log", self._environment)

    def _engine(self, role: str, core: int) -> Server:
        transfer = {
            "kv_connector": "UMBPStoreConnector",
            "kv_connector_module_path": "umbp.connector",
            "kv_role": role,
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "mode": "distributed",
                "store": "mooncake",
                "store_options": {"master": self.store.address},
                "capacity_bytes": 16 << 20,
                "min_load_tokens": 0,
                "lookup_timeout_ms": int(1000 * LOOKUP_TIMEOUT_S),
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
        return Server(command, free_ports(1)[0], self._folder / f"{role}.log", environment)

    def wait(self) -> None:
        for engine in (self.prefill, self.decode):
            engine.wait_for("/health")
        self.proxy.wait_for("/v1/models")

    def kill(self) -> None:
        for server in (self.proxy, self.decode, self.prefill):
            server.kill()

    @contextlib.contextmanager
    def nodes_stopped(self) -> Iterator[None]:
        """What is sent meanwhile isn't there, and comes when they go on."""
        for node in self.store.nodes:
            node.stop()
        try:
            yield
        finally:
            for node in self.store.nodes:
                node.go_on()


@pytest.fixture(scope="module")
def pair(engines: EnginePool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    if why := why_no_mooncake():
        pytest.skip(why)
    engines.close()  # room for two
    folder = tmp_path_factory.mktemp("pair")
    store = MooncakeCluster(folder, NODE_BYTES)
    started = Pair(folder, store)
    try:
        started.wait()
        yield started
    finally:
        started.kill()
        store.end()


def asked(seed: int, **more: object) -> dict[str, object]:
    prompt = list(random_prompt(PROMPT, seed=seed).tokens)
    body: dict[str, object] = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    return body | {"return_token_ids": True, "ignore_eos": True} | more


def tokens_of(answer: str) -> list[int]:
    told: dict[str, Any] = json.loads(answer)
    return list(told["choices"][0]["token_ids"])


def handed_over(answer: str) -> object:
    return json.loads(answer)["kv_transfer_params"]


def test_what_one_engine_has_prefilled_the_other_decodes_as_one_alone_would(pair: Pair) -> None:
    answer = pair.proxy.post("/v1/completions", asked(1))
    assert pair.decode.count("loaded_tokens", "mooncake") == RESTORABLE
    assert pair.decode.count("loaded_tokens") == RESTORABLE
    assert pair.decode.count("fetched_objects") == RESTORABLE / BLOCK_TOKENS
    assert pair.decode.count("sent_objects") == 0
    assert pair.prefill.count("loaded_tokens") == 0
    assert pair.prefill.count("store_lookups") == 0
    assert tokens_of(answer) == tokens_of(pair.prefill.post("/v1/completions", asked(1)))


def test_a_streamed_answer_is_passed_on(pair: Pair) -> None:
    before = pair.decode.count("loaded_tokens", "mooncake")
    events = pair.proxy.post("/v1/completions", asked(2, stream=True)).split("\n\n")
    assert "data: [DONE]" in events
    pieces = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
    tokens = [token for piece in pieces for token in piece["choices"][0].get("token_ids") or ()]
    assert tokens == tokens_of(pair.prefill.post("/v1/completions", asked(2)))
    assert pair.decode.count("loaded_tokens", "mooncake") - before == RESTORABLE


def test_who_comes_early_waits_until_it_is_in_the_store(pair: Pair) -> None:
    before = {name: pair.decode.count(name) for name in ("loaded_tokens", "store_lookups", *AWAITED)}
    with ThreadPoolExecutor() as threads:
        with pair.nodes_stopped():
            expected = pair.prefill.post("/v1/completions", asked(3))
            early = asked(3, kv_transfer_params=handed_over(expected))
            answer = threads.submit(pair.decode.post, "/v1/completions", early)
            deadline_s = time.monotonic() + LOOKUP_TIMEOUT_S
            while pair.decode.count("store_lookups") < before["store_lookups"] + 2:
                assert time.monotonic() < deadline_s
            assert not answer.done()
        assert tokens_of(answer.result()) == tokens_of(expected)
    gained = {name: pair.decode.count(name) - before[name] for name in ("loaded_tokens", *AWAITED)}
    assert gained == {"loaded_tokens": RESTORABLE, "awaited_requests": 1, "awaited_in_vain_requests": 0}


def test_what_does_not_come_is_waited_for_so_long_and_then_computed(pair: Pair) -> None:
    before = {name: pair.decode.count(name) for name in ("loaded_tokens", *AWAITED)}
    with pair.nodes_stopped():
        expected = pair.prefill.post("/v1/completions", asked(4))
        begun_s = time.monotonic()
        early = asked(4, kv_transfer_params=handed_over(expected))
        answer = pair.decode.post("/v1/completions", early)
        took_s = time.monotonic() - begun_s
    assert LOOKUP_TIMEOUT_S <= took_s < LOOKUP_TIMEOUT_S + SLACK_S
    assert tokens_of(answer) == tokens_of(expected)
    gained = {name: pair.decode.count(name) - before[name] for name in ("loaded_tokens", *AWAITED)}
    assert gained == {"loaded_tokens": 0, "awaited_requests": 1, "awaited_in_vain_requests": 1}


def test_an_engines_refusal_is_the_clients(pair: Pair) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        pair.proxy.post("/v1/completions", asked(5, max_tokens=-1))
    assert refused.value.code == 400
    refused.value.close()


def test_without_the_prefill_engine_the_other_computes(pair: Pair) -> None:
    expected = tokens_of(pair.prefill.post("/v1/completions", asked(6)))
    # Objects are sent in order: when this one's have come, so have those before.
    before = pair.decode.count("loaded_tokens")
    pair.proxy.post("/v1/completions", asked(7))
    assert pair.decode.count("loaded_tokens") - before == RESTORABLE
    pair.prefill.kill()
    before = pair.decode.count("loaded_tokens")
    assert tokens_of(pair.proxy.post("/v1/completions", asked(8)))
    assert pair.decode.count("loaded_tokens") == before
    assert tokens_of(pair.proxy.post("/v1/completions", asked(6))) == expected
    assert pair.decode.count("loaded_tokens") - before == RESTORABLE, "what it stored outlives it"
