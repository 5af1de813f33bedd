"""The three messages that have a base class of the engine's: scheduler to worker, back, and the handshake."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from umbp.data import (
    BlockLoadBatch,
    BlockStoreBatch,
    BlockTransferPlan,
    LossReason,
    Rank,
    RankTopology,
    StoreEventResult,
)
from umbp.runtime.base import HandshakeExtra


@dataclass
class UMBPConnectorMetadata(KVConnectorMetadata):
    """What the workers shall move in one step; plans are the scheduler's, in keys of its own rank."""

    async_load: bool = False
    store_plans: list[BlockTransferPlan] = field(default_factory=list)
    load_requests: dict[str, list[BlockTransferPlan] | BlockLoadBatch] = field(default_factory=dict)
    store_requests: dict[str, list[BlockTransferPlan] | BlockStoreBatch] = field(default_factory=dict)
    preempted_request_ids: set[str] = field(default_factory=set)
    store_event: int = -1
    load_events: dict[str, int] = field(default_factory=dict)
    """The event number of each load of `load_requests`, by request."""
    reloads: set[str] = field(default_factory=set)
    """Those of these requests that were admitted before, and are counted apart."""
    timed_step: int = -1
    """A number that the workers' reports of this step carry, where its duration is wanted."""
    has_forward: bool = True
    """Whether the step runs the model. A worker can't always tell: some begin their loads in no context."""

    def iter_store_plans(self) -> Iterator[BlockTransferPlan]:
        """Loose plans, then each request's."""
        for plans in self.store_plan_groups():
            yield from plans

    def store_plan_groups(self) -> list[Sequence[BlockTransferPlan]]:
        """The same group by group, batches whole; an empty loose list is left out."""
        loose: list[Sequence[BlockTransferPlan]] = [self.store_plans] if self.store_plans else []
        return [*loose, *self.store_requests.values()]


@dataclass
class UMBPConnectorWorkerMetadata(KVConnectorWorkerMetadata):
    """What workers report of finished stores and loads, by event number."""

    store_events: dict[int, StoreEventResult] = field(default_factory=dict)
    load_events: dict[int, StoreEventResult] = field(default_factory=dict)
    timed_step: int = -1
    hello: dict[Rank, UMBPHandshakeMetadata] = field(default_factory=dict)
    """In a worker's first step: its handshake, for a scheduler that vLLM has not given it to."""
    store_reasons: dict[int, LossReason] = field(default_factory=dict)
    load_reasons: dict[int, LossReason] = field(default_factory=dict)
    """Why an event's first objects failed, where some have."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> UMBPConnectorWorkerMetadata:
        """Take in another worker's report and return self; nothing is shared with `other` afterwards."""
        if not isinstance(other, UMBPConnectorWorkerMetadata):
            raise TypeError(f"can't aggregate {type(other).__name__} into {type(self).__name__}")
        for mine, theirs in ((self.store_events, other.store_events), (self.load_events, other.load_events)):
            for event, result in theirs.items():
                mine.setdefault(event, StoreEventResult()).merge(result)
        # Of several reasons the first that was told counts.
        self.store_reasons = other.store_reasons | self.store_reasons
        self.load_reasons = other.load_reasons | self.load_reasons
        self.timed_step = max(self.timed_step, other.timed_step)
        self.hello.update(other.hello)
        return self


@dataclass(frozen=True)
class UMBPHandshakeMetadata(KVConnectorHandshakeMetadata):
    """What a worker derived; the scheduler adopts it."""

    namespace: str


@dataclass(frozen=True)
class UMBPPoolHandshakeMetadata(UMBPHandshakeMetadata):
    """The same with what the worker's runtime made, to which the scheduler's must attach, and what of the
    model's KV the worker keeps. The scheduler itself sees the first pipeline stage's alone.
    """

    extra: HandshakeExtra = field(default_factory=dict)
    kv_tp_replicas: int = 1
    object_bytes: Mapping[int, int] | None = None
    """Bytes of a block's object on this rank, for each cache group that has layers there; a pipeline stage
    may have none of some. None where that isn't told: then the rank has all groups.
    """


def reports_by_rank(
    metadata: Mapping[tuple[int, int], object], topology: RankTopology
) -> dict[Rank, UMBPHandshakeMetadata]:
    """What vLLM hands on of the workers' reports, by rank; a rank that reported nothing is left out.

    vLLM's key is (pp, tp), with tp counted on through the prefill-context ranks where decode context is on as
    well. Where it is off those share a key, and all but one of them are lost: then there is no answer.
    """
    if topology.pcp_size > 1 and topology.dcp_size == 1:
        return {}
    reports = {}
    for rank in topology.all_namespaces():
        tp, pcp, _, pp = rank
        report = metadata.get((pp, tp + pcp * topology.tp_size))
        if isinstance(report, UMBPHandshakeMetadata):
            reports[rank] = report
    return reports
