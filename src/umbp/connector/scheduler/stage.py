"""One pipeline stage of the pool, as the scheduler sees it: a runtime's handle with whatever it can do.

Scheduler thread only. An engine without a pipeline is one stage. What the runtime raises is passed on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from umbp.connector.wire import UMBPHandshakeMetadata, UMBPPoolHandshakeMetadata
from umbp.data import BlockIdentityCodec, EngineTopology, KVLayoutDescriptor, Rank, UMBPNamespace
from umbp.errors import ConfigError
from umbp.runtime.base import Capabilities, IUMBPRuntime, LookupState, Wanted

Reports = Mapping[Rank, UMBPHandshakeMetadata]
"""What each rank's worker told."""


class Stage:
    """The ranks of one stage as one: a block is there if every one of them has it."""

    def __init__(
        self,
        runtime: IUMBPRuntime,
        can: Capabilities,
        topology: EngineTopology,
        namespace: UMBPNamespace,
        report: UMBPHandshakeMetadata,
    ) -> None:
        """`report` is any of the stage's workers'; they keep the same layers."""
        self._can = can
        self._topology = topology
        self.codec = BlockIdentityCodec(namespace.value)
        """Spells the keys of any rank in this stage's namespace; its own rank is the engine's first."""
        self._group_ids: frozenset[int] | None = None
        self._block_bytes: Counter[int] = Counter()
        replicas = 1
        if isinstance(report, UMBPPoolHandshakeMetadata):
            replicas = report.kv_tp_replicas
            self._group_ids = None if report.object_bytes is None else frozenset(report.object_bytes)
        layout = KVLayoutDescriptor((), topology, kv_tp_replicas=replicas)
        self.handle: Any = runtime.create_scheduler_handle(namespace, topology, layout)

    def bind(self, reports: Reports) -> None:
        """Attach to what the stage's workers made, where the runtime needs that."""
        told = {rank: reports[rank] for rank in self._topology.all_namespaces()}
        self._block_bytes.clear()
        for report in told.values():
            if isinstance(report, UMBPPoolHandshakeMetadata):
                self._block_bytes.update(report.object_bytes or {})
        if self._can.attach:
            self.handle.bind_workers(
                {
                    rank: report.extra if isinstance(report, UMBPPoolHandshakeMetadata) else {}
                    for rank, report in told.items()
                }
            )

    def keeps(self, group_id: int) -> bool:
        """Whether the stage has layers of this cache group."""
        return self._group_ids is None or group_id in self._group_ids

    def block_bytes(self, group_id: int) -> int:
        """Bytes of one block's objects on all ranks of the stage, as far as they were told."""
        return self._block_bytes[group_id]

    def prepare(self, owner: str, wanted: Sequence[Wanted], patience_s: float) -> bool:
        """Whether what can be told of these is known; the stage has no blocks of some groups."""
        own = [one for one in wanted if one.block_hashes and self.keeps(one.group_id)]
        return not own or bool(self.handle.prepare(owner, own, patience_s))

    def present(self, group_id: int, hashes: Sequence[bytes]) -> int:
        """How many leading blocks of a cache group every rank has at this moment."""
        if self._can.lookup_raw:
            return int(self.handle.lookup_raw(group_id, hashes))
        found = list(self.handle.lookup(self._rank_keys(group_id, hashes)))
        return self._whole_blocks(next((i for i, hit in enumerate(found) if not hit), len(found)))

    def states(self, group_id: int, name: bytes) -> list[LookupState]:
        """What is known of one block on each rank; wants the capability."""
        return list(self.handle.lookup_states(self._rank_keys(group_id, [name])))

    def stored(self, group_id: int, hashes: Sequence[bytes]) -> list[bool]:
        """Which blocks of a cache group every rank has at this moment; they need not be one prefix."""
        if self._can.presence:
            return list(self.handle.present_raw(group_id, hashes))
        ranks = self._topology.rank_count
        found = list(self.handle.lookup(self._rank_keys(group_id, hashes)))
        return [all(found[first : first + ranks]) for first in range(0, len(found), ranks)]

    def hold(self, owner: str, group_id: int, hashes: Sequence[bytes]) -> int:
        """How many leading blocks every rank has and now keeps until `unhold`; wants the capability."""
        if self._can.lookup_raw:
            return int(self.handle.hold_raw(owner, group_id, hashes))
        return self._whole_blocks(int(self.handle.hold(owner, self._rank_keys(group_id, hashes))))

    def unhold(self, owner: str) -> None:
        self.handle.unhold(owner)

    def _rank_keys(self, group_id: int, hashes: Sequence[bytes]) -> list[str]:
        return [
            key
            for block_hash in hashes
            for key in self.codec.keys_for_topology(block_hash, self._topology, (group_id,))
        ]

    def _whole_blocks(self, keys: int) -> int:
        return keys // self._topology.rank_count


def namespace_of(topology: EngineTopology, reports: Reports) -> UMBPNamespace:
    """The namespace that all workers of a stage report; `ConfigError` where they differ."""
    distinct = sorted({reports[rank].namespace for rank in topology.all_namespaces()})
    if len(distinct) == 1:
        return UMBPNamespace(distinct[0])
    who = "the engine's workers" if topology.stage is None else f"workers of pipeline stage {topology.stage}"
    raise ConfigError(
        f"{who} derived {len(distinct)} namespaces ({', '.join(distinct)}): their KV "
        "formats differ, as on hosts with different CPUs or GPUs; run all ranks on equal hardware, "
        "or set key_namespace"
    )
