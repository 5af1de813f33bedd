"""What a subscriber hears of a real engine's pool is what is in it, on every rank."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from e2e.harness import BLOCK_TOKENS, EnginePool, EngineProcess, EngineSpec, random_prompt
from umbp.data import BlockIdentityCodec, Rank
from umbp.pool import Pool
from umbp.pool.sharing import pool_path

pytestmark = [pytest.mark.engine, pytest.mark.slow]

RANKS: tuple[Rank, ...] = ((0, 0, 0, 0), (1, 0, 0, 0))
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder of the RAM file system, for the pool and the sockets."""
    made = Path(tempfile.mkdtemp(prefix="umbp-test-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def engine(folder: Path, engines: EnginePool) -> EngineProcess:
    connector = (
        ("mode", "standalone"),
        ("pool", "p"),
        ("pool_dir", str(folder)),
        ("capacity_bytes", 64 << 20),
    )
    events = (
        ("enable_kv_cache_events", True),
        ("publisher", "zmq"),
        ("endpoint", f"ipc://{folder}/events"),
        ("replay_endpoint", f"ipc://{folder}/replay"),
    )
    environment = (("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0"),)
    spec = EngineSpec(connector=connector, tensor_parallel=2, events=events, environment=environment)
    return engines.get(spec)


class Subscriber:
    """Asks for all batches since the engine's start, so none can be missed."""

    def __init__(self, folder: Path) -> None:
        import zmq

        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.RCVTIMEO, int(PATIENCE_S * 1000))
        self._socket.connect(f"ipc://{folder}/replay")

    def heard(self) -> dict[bytes, list[int]]:
        """The tokens of each block that the events say is in the pool."""
        there: dict[bytes, list[int]] = {}
        for event in self._events():
            if event.get("medium") != "CPU":
                continue
            if event["type"] == "BlockRemoved":
                for block_hash in event["block_hashes"]:
                    del there[block_hash]
                continue
            tokens, size = event["token_ids"], event["block_size"]
            assert len(tokens) == size * len(event["block_hashes"])
            for number, block_hash in enumerate(event["block_hashes"]):
                assert block_hash not in there
                there[block_hash] = tokens[number * size : (number + 1) * size]
        return there

    def _events(self) -> Iterator[dict[str, Any]]:
        import msgspec

        self._socket.send_multipart((b"", (0).to_bytes(8, "big")))
        while True:
            _, _, sequence, payload = self._socket.recv_multipart()
            if int.from_bytes(sequence, "big", signed=True) < 0:
                return
            yield from msgspec.msgpack.decode(payload)[1]

    def close(self) -> None:
        self._socket.close(0)


def until(holds: Callable[[], bool]) -> None:
    """The engine's last step may still be on its way when it has answered."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s, "it doesn't come about"


def test_a_subscriber_hears_what_is_stored_lost_on_one_rank_and_cleared(
    engine: EngineProcess, folder: Path
) -> None:
    with closing(Subscriber(folder)) as subscriber, Pool.attach(pool_path(folder, "p")) as pool:
        (namespace,) = pool.namespaces()
        codec = BlockIdentityCodec(namespace.name)

        def told(blocks: int) -> bool:
            """So many blocks are told, and both ranks have each."""
            heard = list(subscriber.heard())
            return len(heard) == blocks and all(
                pool.lookup(codec.keys(heard, rank=rank)).all() for rank in RANKS
            )

        prompts = [random_prompt(10 * BLOCK_TOKENS + 5, seed=7000 + i) for i in range(3)]
        for prompt in prompts:
            engine.generate(prompt)
        until(lambda: told(30))
        assert pool.stats()["objects"] == 60
        expected = {
            prompt.tokens[start : start + BLOCK_TOKENS]
            for prompt in prompts
            for start in range(0, 10 * BLOCK_TOKENS, BLOCK_TOKENS)
        }
        heard = subscriber.heard()
        assert {tuple(tokens) for tokens in heard.values()} == expected
        lost = list(heard)[8:13]
        pool.remove(codec.keys(lost, rank=RANKS[1]))
        engine.generate(random_prompt(BLOCK_TOKENS // 2, seed=7100))
        until(lambda: told(25))
        assert set(subscriber.heard()) == set(heard) - set(lost)
        engine.poison()
        for prompt in prompts:
            engine.generate(prompt)
        until(lambda: set(subscriber.heard()) == set(heard))
        assert engine.reset_prefix_cache(with_connector=True)
        engine.generate(random_prompt(3 * BLOCK_TOKENS, seed=7200))
        until(lambda: told(3))
        assert pool.stats()["objects"] == 6
