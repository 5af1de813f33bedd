"""A small engine's worth of handles and KV caches around a runtime, for contract and other tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import cast

import numpy as np
import numpy.typing as npt

from umbp.data import (
    BlockIdentityCodec,
    BlockLoadBatch,
    BlockStoreBatch,
    BlockTransferPlan,
    KVLayoutDescriptor,
    KVLayoutPlanner,
    KVRegion,
    RankTopology,
    UMBPNamespace,
)
from umbp.runtime.base import (
    IUMBPRuntime,
    SupportsAttach,
    SupportsHandshakeExtra,
    UMBPSchedulerHandle,
    UMBPWorkerHandle,
    capabilities_of,
)
from umbp.testing.tensors import FakeTensor

KINDS = ("plans", "ranged plans", "batch")
"""The forms in which plans come: a list, a list that carries ranges, a batch by column."""


@dataclass(frozen=True, slots=True)
class Shape:
    """KV caches of one group: `pieces` physical blocks make one block of a layer, `gap_bytes` lie between
    blocks.
    """

    layers: int = 3
    blocks: int = 16
    block_bytes: int = 512
    pieces: int = 1
    gap_bytes: int = 0

    @property
    def stride_bytes(self) -> int:
        return self.block_bytes + self.gap_bytes

    def regions(self) -> tuple[KVRegion, ...]:
        return tuple(
            KVRegion(f"layer.{n}", 0, self.stride_bytes, self.block_bytes, n * self.block_bytes, 16)
            for n in range(self.layers)
        )

    def memory(self, seed: int) -> dict[str, FakeTensor]:
        """Caches full of noise, gaps included, so that a byte out of place shows.

        A tensor shows the payload alone; its `array.base` is the memory with the gaps.
        """
        noise = np.random.default_rng(seed)
        rows, row_bytes = self.blocks * self.pieces, self.block_bytes // self.pieces
        caches = {}
        for region in self.regions():
            memory = noise.integers(0, 256, (rows, self.stride_bytes // self.pieces), dtype=np.uint8)
            caches[region.layer_name] = FakeTensor(memory[:, :row_bytes])
        return caches


class RankRig:
    """One worker: its handle, its caches and its keys."""

    def __init__(
        self,
        runtime: IUMBPRuntime,
        namespace: UMBPNamespace,
        topology: RankTopology,
        shape: Shape,
        kv_tp_replicas: int = 1,
    ) -> None:
        tp, pcp, dcp, pp = topology.local_namespace
        self.topology = topology
        self.shape = shape
        self.codec = BlockIdentityCodec(namespace, tp, pp, pcp, dcp)
        self.planner = KVLayoutPlanner(shape.regions())
        self.worker: UMBPWorkerHandle = runtime.create_worker_handle(
            namespace, topology, self.planner.describe(topology, kv_tp_replicas=kv_tp_replicas)
        )
        self.shard = tp // kv_tp_replicas
        self.use_memory(shape.memory(seed=self.shard))

    def use_memory(self, caches: dict[str, FakeTensor]) -> None:
        self.worker.register_buffers(caches)
        self.planner.register_kv_caches(caches)
        self.caches = caches

    def _rows(self, layer: str, block_id: int) -> npt.NDArray[np.uint8]:
        """One layer's block, gap included, as one row of bytes."""
        return cast("npt.NDArray[np.uint8]", self._memory(layer)[block_id])

    def _memory(self, layer: str) -> npt.NDArray[np.uint8]:
        memory = self.caches[layer].array.base
        assert memory is not None
        return memory.reshape(self.shape.blocks, self.shape.stride_bytes)

    def read(self, block_id: int) -> bytes:
        """The bytes of a block over all layers, gaps left out."""
        size = self.shape.block_bytes
        return b"".join(self._rows(layer, block_id)[:size].tobytes() for layer in self.caches)

    def fill(self, block_id: int, content: str) -> None:
        """Give a block the bytes that go with a text, gaps left alone."""
        size = self.shape.block_bytes
        for layer in self.caches:
            digest = sha256(f"{layer} {content}".encode()).digest()
            self._rows(layer, block_id)[:size] = np.frombuffer(digest * (size // 32 + 1), np.uint8)[:size]

    def scrub(self, block_ids: Iterable[int]) -> None:
        """Overwrite blocks, gaps left alone, so that what a load doesn't bring isn't there by chance."""
        for block_id in block_ids:
            for layer in self.caches:
                self._rows(layer, block_id)[: self.shape.block_bytes] = 0xA5

    def image(self, without_blocks: Sequence[int] = ()) -> dict[str, bytes]:
        """All cache memory but the payload of some blocks."""
        image = {}
        for layer in self.caches:
            blocks = self._memory(layer).copy()
            blocks[list(without_blocks), : self.shape.block_bytes] = 0
            image[layer] = blocks.tobytes()
        return image

    def keys(self, hashes: Sequence[bytes]) -> list[str]:
        return self.codec.keys(hashes)

    def load_plans(
        self, kind: str, hashes: Sequence[bytes], block_ids: Sequence[int]
    ) -> Sequence[BlockTransferPlan]:
        batch = BlockLoadBatch(self.keys(hashes), block_ids, [0] * len(hashes), "request")
        return self._of_kind(kind, batch)

    def store_plans(
        self, kind: str, hashes: Sequence[bytes], block_ids: Sequence[int]
    ) -> Sequence[BlockTransferPlan]:
        count = len(hashes)
        parents = [None, *hashes[:-1]] if count else []
        batch = BlockStoreBatch(
            self.keys(hashes), block_ids, [0] * count, hashes, parents, [()] * count, [16] * count, "request"
        )
        return self._of_kind(kind, batch)

    def _of_kind(self, kind: str, batch: BlockLoadBatch | BlockStoreBatch) -> Sequence[BlockTransferPlan]:
        if kind == "batch":
            return batch
        return [self.planner.materialize(plan) if kind == "ranged plans" else plan for plan in batch]


class Rig:
    """A scheduler and its `tp_size` workers on one runtime, attached where the runtime wants it. So many
    consecutive ranks as `kv_tp_replicas` says hold the same KV.
    """

    def __init__(
        self,
        runtime: IUMBPRuntime,
        namespace: str,
        tp_size: int = 1,
        shape: Shape | None = None,
        scheduler_runtime: IUMBPRuntime | None = None,
        kv_tp_replicas: int = 1,
    ) -> None:
        self.namespace = UMBPNamespace(namespace)
        self.shape = shape or Shape()
        self.capabilities = capabilities_of(runtime)
        self.topology = RankTopology(tp_size=tp_size)
        self.kv_tp_replicas = kv_tp_replicas
        self.ranks = [
            RankRig(
                runtime,
                self.namespace,
                RankTopology(tp_rank=rank, tp_size=tp_size),
                self.shape,
                kv_tp_replicas,
            )
            for rank in range(tp_size)
        ]
        self._scheduler_runtime = scheduler_runtime or runtime
        self._schedulers: list[UMBPSchedulerHandle] = []
        self.scheduler = self.new_scheduler()

    def new_scheduler(self, *, bind: bool = True) -> UMBPSchedulerHandle:
        """One more scheduler handle of this engine's namespace."""
        layout = KVLayoutDescriptor((), self.topology, kv_tp_replicas=self.kv_tp_replicas)
        scheduler = self._scheduler_runtime.create_scheduler_handle(self.namespace, self.topology, layout)
        self._schedulers.append(scheduler)
        if bind and self.capabilities.attach:
            self.bind(scheduler)
        return scheduler

    def bind(self, scheduler: UMBPSchedulerHandle) -> None:
        extras = {
            rank.topology.local_namespace: cast(SupportsHandshakeExtra, rank.worker).handshake_extra()
            for rank in self.ranks
        }
        cast(SupportsAttach, scheduler).bind_workers(extras)

    def keys(self, hashes: Sequence[bytes]) -> list[str]:
        """The keys of all ranks, block by block."""
        return [rank.codec.key(block_hash) for block_hash in hashes for rank in self.ranks]

    def alike(self, keys: Iterable[str]) -> set[str]:
        """These keys, and those of the same blocks on other ranks that hold the same."""
        if self.kv_tp_replicas == 1:
            return set(keys)
        of_shard: dict[int, list[RankRig]] = {}
        for rank in self.ranks:
            of_shard.setdefault(rank.shard, []).append(rank)
        return {
            other
            for key in keys
            for ranks in of_shard.values()
            if any(rank.codec.localize([key]) == [key] for rank in ranks)
            for rank in ranks
            for other in rank.codec.localize([key])
        }

    def close(self) -> None:
        for scheduler in self._schedulers:
            scheduler.close()
        for rank in self.ranks:
            rank.worker.close()


def hashes(count: int, salt: str = "") -> list[bytes]:
    """Block hashes that are the same in every run."""
    return [sha256(f"{salt} {number}".encode()).digest() for number in range(count)]
