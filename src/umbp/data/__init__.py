"""The vocabulary: identity, layout, plans, jobs and the messages that carry them.

Engine-neutral: needs neither torch nor vLLM. Three messages have a base class of the engine's; they are
handed on from `umbp.connector.wire` when first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from umbp.data.identity import BlockIdentityCodec, EngineTopology, Rank, RankTopology, UMBPNamespace
from umbp.data.jobs import StoreEventResult, TransferJobState, TransferJobStatus
from umbp.data.layout import KVLayoutDescriptor, KVLayoutPlanner, KVRange, KVRegion, TensorLike
from umbp.data.losses import LossReason, reason_of
from umbp.data.plans import (
    BlockLoadBatch,
    BlockStoreBatch,
    BlockTransferPlan,
    LoadSpec,
    RequestTracker,
    localized_plans,
    plans_in_groups,
)

if TYPE_CHECKING:
    from umbp.connector.wire import UMBPConnectorMetadata, UMBPConnectorWorkerMetadata, UMBPHandshakeMetadata

__all__ = [
    "BlockIdentityCodec",
    "BlockLoadBatch",
    "BlockStoreBatch",
    "BlockTransferPlan",
    "EngineTopology",
    "KVLayoutDescriptor",
    "KVLayoutPlanner",
    "KVRange",
    "KVRegion",
    "LoadSpec",
    "LossReason",
    "Rank",
    "RankTopology",
    "RequestTracker",
    "StoreEventResult",
    "TensorLike",
    "TransferJobState",
    "TransferJobStatus",
    "UMBPConnectorMetadata",
    "UMBPConnectorWorkerMetadata",
    "UMBPHandshakeMetadata",
    "UMBPNamespace",
    "localized_plans",
    "plans_in_groups",
    "reason_of",
]

_WIRE = frozenset({"UMBPConnectorMetadata", "UMBPConnectorWorkerMetadata", "UMBPHandshakeMetadata"})


def __getattr__(name: str) -> Any:
    if name in _WIRE:
        from umbp.connector import wire

        return getattr(wire, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
