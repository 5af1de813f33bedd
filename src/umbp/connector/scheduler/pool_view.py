"""The pool as the scheduler sees it: a runtime's handle with whatever it can do, behind a few questions.

Scheduler thread only. This is the edge where a runtime's faults stop: whatever goes wrong is a miss, said
once a minute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from vllm.logger import init_logger

from umbp.data import BlockIdentityCodec, KVLayoutDescriptor, Rank, RankTopology, UMBPNamespace
from umbp.errors import ConfigError
from umbp.runtime.base import HandshakeExtra, IUMBPRuntime, capabilities_of

logger = init_logger("vllm.umbp")

T = TypeVar("T")


class PoolView:
    """Misses everything until `open`; never raises after it."""

    def __init__(self, runtime: IUMBPRuntime, topology: RankTopology, kv_tp_replicas: int = 1) -> None:
        self._runtime = runtime
        self._kv_tp_replicas = kv_tp_replicas
        self._can = capabilities_of(runtime)
        self._topology = topology
        self._handle: Any = None
        self._codec: BlockIdentityCodec | None = None
        self._last_complaint_s = float("-inf")

    @property
    def is_open(self) -> bool:
        return self._handle is not None

    @property
    def codec(self) -> BlockIdentityCodec:
        """Keys of rank 0 in the engine's namespace; workers rewrite them to their own rank."""
        if self._codec is None:
            raise RuntimeError("the pool is not open yet")
        return self._codec

    def open(self, namespaces: Mapping[Rank, str], extras: Mapping[Rank, HandshakeExtra]) -> None:
        """Adopt what the workers report; `ConfigError` where they disagree. Again after a sleep: binds
        anew.
        """
        ranks = self._topology.rank_count
        if len(namespaces) < ranks:
            raise ConfigError(
                f"{len(namespaces)} of {ranks} workers reported what they keep; "
                "every worker of the engine must run this connector"
            )
        distinct = sorted(set(namespaces.values()))
        if len(distinct) != 1:
            raise ConfigError(
                f"the engine's workers derived {len(distinct)} namespaces ({', '.join(distinct)}): their KV "
                "formats differ, as on hosts with different CPUs or GPUs; run all ranks on equal hardware, "
                "or set key_namespace"
            )
        namespace = UMBPNamespace(distinct[0])
        if self._handle is None:
            self._codec = BlockIdentityCodec(namespace.value)
            layout = KVLayoutDescriptor((), self._topology, kv_tp_replicas=self._kv_tp_replicas)
            self._handle = self._runtime.create_scheduler_handle(namespace, self._topology, layout)
        if self._can.attach:
            self._handle.bind_workers(extras)

    def present(self, group_id: int, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of a cache group every rank has at this moment."""
        if self._can.lookup_raw:
            return self._ask(lambda handle: int(handle.lookup_raw(group_id, hashes)), 0)
        keys = self._rank_keys(group_id, hashes)
        found: list[bool] = self._ask(lambda handle: list(handle.lookup(keys)), [])
        return self._whole_blocks(next((i for i, hit in enumerate(found) if not hit), len(found)))

    def stored(self, group_id: int, hashes: Sequence[bytes]) -> list[bool]:
        """Which blocks of a cache group every rank has at this moment; they need not be one prefix."""
        nothing = [False] * len(hashes)
        if self._can.presence:
            return self._ask(lambda handle: list(handle.present_raw(group_id, hashes)), nothing)
        ranks = self._topology.rank_count
        keys = self._rank_keys(group_id, hashes)
        found: list[bool] = self._ask(lambda handle: list(handle.lookup(keys)), [False] * len(keys))
        return [all(found[first : first + ranks]) for first in range(0, len(found), ranks)]

    def hold(self, owner: str, group_id: int, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of a cache group every rank has; kept there until `unhold(owner)` where the
        runtime can. What one owner holds adds up.
        """
        if not self._can.hold:
            return self.present(group_id, hashes)
        if self._can.lookup_raw:
            return self._ask(lambda handle: int(handle.hold_raw(owner, group_id, hashes)), 0)
        keys = self._rank_keys(group_id, hashes)
        return self._whole_blocks(self._ask(lambda handle: int(handle.hold(owner, keys)), 0))

    def unhold(self, owner: str) -> None:
        """Give back what `owner` holds; an owner without holds is fine."""
        if self._can.hold:
            self._ask(lambda handle: handle.unhold(owner), None)

    def note(
        self, request_id: str, phase: str, hashes: Sequence[bytes], output_tokens: int, finish: str
    ) -> None:
        """Tell the eviction policy of a request, where the runtime listens."""
        if self._can.note:
            self._ask(lambda handle: handle.note(request_id, phase, hashes, output_tokens, finish), None)

    def clear(self) -> bool:
        """Remove the namespace's objects; True where nothing is left, also if nothing was ever opened."""
        if self._handle is None:
            return True
        return self._ask(lambda handle: bool(handle.clear()), False)

    def close(self) -> None:
        self._ask(lambda handle: handle.close(), None)
        self._handle = None

    def _rank_keys(self, group_id: int, hashes: Sequence[bytes]) -> list[str]:
        return [
            key
            for block_hash in hashes
            for key in self.codec.keys_for_topology(block_hash, self._topology, (group_id,))
        ]

    def _whole_blocks(self, keys: int) -> int:
        return keys // self._topology.rank_count

    def _ask(self, question: Callable[[Any], T], otherwise: T) -> T:
        if self._handle is None:
            return otherwise
        try:
            return question(self._handle)
        except Exception:
            # The edge to code that may not be ours: a fault there must cost a recomputation, never the
            # engine.
            now = time.monotonic()
            if now - self._last_complaint_s > 60:
                self._last_complaint_s = now
                logger.exception(
                    "UMBP: the runtime failed a question of the scheduler; answering with a miss"
                )
            return otherwise
