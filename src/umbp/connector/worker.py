"""The worker's half of the connector: runs the jobs that the scheduler planned, and reports each exactly
once.

Runs in a worker's process, on the thread that runs the model. One step calls, in this order: `start_loads`
(before the forward for loads that feed it, after it for the others), `submit_stores`, `collect`,
`take_failed_blocks`, `take_stats`, `take_report`.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vllm.logger import init_logger

from umbp.connector.stats import UMBPStats
from umbp.connector.wire import (
    UMBPConnectorMetadata,
    UMBPConnectorWorkerMetadata,
    UMBPHandshakeMetadata,
    UMBPPoolHandshakeMetadata,
)
from umbp.data import (
    BlockIdentityCodec,
    BlockTransferPlan,
    KVLayoutPlanner,
    RankTopology,
    StoreEventResult,
    TransferJobState,
    UMBPNamespace,
    localized_plans,
    plans_in_groups,
    reason_of,
)
from umbp.errors import UMBPError
from umbp.options import Options
from umbp.runtime.base import IUMBPRuntime, capabilities_of

logger = init_logger("vllm.umbp")

GAUGE_INTERVAL_S = 1.0
"""How often a rank looks at its pool's size for the metrics."""

IDLE_NAP_S = 0.0005
"""How long a step that has nothing to compute waits for transfers that are under way."""

IDLE_WAIT_BYTES = 128 << 20
"""How much may be under way for such a step to wait for its end: some milliseconds of copies, as nothing that
arrives meanwhile can begin."""

_NO_NEWS = UMBPConnectorWorkerMetadata()

EVICTIONS = ("evicted_objects", "evicted_bytes", "evicted_tokens")
"""What a runtime's usage has as running totals; all else in it are gauges."""

COMPLAINT_INTERVAL_S = 60.0
"""How often a runtime's exceptions are shown; a backend that is gone may raise in every step."""


@dataclass(slots=True)
class _Running:
    """One job between its start and its report."""

    event: int
    request_id: str
    job: TransferJobState
    started_s: float
    is_again: bool = False
    """A load of a request that was admitted before."""
    is_overdue: bool = False


class WorkerSide:
    """One rank's loads and stores."""

    def __init__(
        self,
        runtime: IUMBPRuntime,
        options: Options,
        namespace: UMBPNamespace,
        topology: RankTopology,
        planner: KVLayoutPlanner,
        *,
        kv_tp_replicas: int = 1,
        counted_tokens: tuple[int, int] | None = None,
        fails_by_request: bool = False,
        clock: Callable[[], float] = time.monotonic,
        nap: Callable[[float], None] = time.sleep,
        idle_wait_bytes: int = IDLE_WAIT_BYTES,
    ) -> None:
        """`counted_tokens`: as a layout has it; `fails_by_request`: a load that has lost a block is of no
        use to the engine, which hears of the request instead of the block.
        """
        self._idle_wait_bytes = idle_wait_bytes
        self._can = capabilities_of(runtime)
        self._fails_by_request = fails_by_request
        self._namespace = namespace
        self._rank = topology.local_namespace
        self._rank_number = topology.all_namespaces().index(self._rank)
        self._codec = BlockIdentityCodec(namespace.value, *_codec_ranks(topology))
        self._planned_layers = {region.layer_name for region in planner.regions}
        self._object_bytes: Counter[int] = Counter()
        for region in planner.regions:
            self._object_bytes[region.group_id] += region.block_bytes
        self._group_ids = frozenset(self._object_bytes)
        self._kv_tp_replicas = kv_tp_replicas
        self._timeout_s = options.timeout_ms / 1000
        self._clock = clock
        self._nap = nap
        layout = planner.describe(topology, "rank_local", kv_tp_replicas)
        layout = self._layout = replace(layout, counted_tokens=counted_tokens)
        self._handle: Any = runtime.create_worker_handle(namespace, topology, layout)
        self._loads: list[_Running] = []
        self._stores: list[_Running] = []
        self._store_parts: dict[int, int] = {}
        self._report = UMBPConnectorWorkerMetadata()
        self._kv_caches: dict[str, Any] = {}
        self._handshake: UMBPHandshakeMetadata | None = None
        self._has_said_hello = False
        self._finished_loads: set[str] = set()
        self._failed_block_ids: set[int] = set()
        self._failed_requests: set[str] = set()
        self._is_idle_step = False
        self._waits_for_all = False
        self._copies_in_place = False
        self._stats = UMBPStats()
        self._totals = dict.fromkeys(EVICTIONS, 0.0)
        """What the runtime counts from its start on, as it was last told."""
        self._next_gauges_s = 0.0
        self._next_complaint_s = float("-inf")
        self._untold_losses = 0
        self._next_loss_line_s = float("-inf")

    # Start and end

    def register(self, kv_caches: Mapping[str, Any]) -> None:
        """Learn the KV caches; layers that share another layer's cache are in it already and are left out."""
        planned = {name: tensor for name, tensor in kv_caches.items() if name in self._planned_layers}
        self._handle.register_buffers(planned)
        self._kv_caches = planned
        # Not before there is memory: the class is imported where there is neither a pool nor a device.
        from umbp.runtime.moves import GroupRuns

        # A page may be padded, as of recurrent states; what moves is its content. (A runtime of another kind
        # may take layouts that have no runs: then it is the page.)
        with contextlib.suppress(ValueError):
            self._object_bytes = Counter(GroupRuns(self._layout, planned).bytes_by_group())
        devices = {str(getattr(tensor, "device", "cpu")) for tensor in planned.values()}
        self._copies_in_place = (self._can.local or self._can.local_stores) and devices <= {"cpu"}

    def handshake(self) -> UMBPHandshakeMetadata:
        if self._handshake is None:
            extra = dict(self._handle.handshake_extra()) if self._can.attach else {}
            self._handshake = UMBPPoolHandshakeMetadata(
                self._namespace.value, extra, self._kv_tp_replicas, dict(self._object_bytes)
            )
        return self._handshake

    def leave_memory(self) -> None:
        """The KV memory is about to be unmapped: end what is under way. It is reported with the next step."""
        for running in (*self._loads, *self._stores):
            self._wait(running.job)

    def return_to_memory(self) -> None:
        """The KV memory is mapped again, where it was."""
        self._handle.register_buffers(self._kv_caches)

    def close(self) -> None:
        """End all jobs and let the engine's memory go."""
        self._handle.close()
        self._loads = []
        self._stores = []

    # One step

    def start_loads(self, meta: UMBPConnectorMetadata) -> None:
        """Begin this step's loads; those that feed its forward are complete on return."""
        self._is_idle_step = not meta.has_forward
        self._report.timed_step = meta.timed_step
        if not self._has_said_hello:
            self._has_said_hello = True
            self._report.hello[self._rank] = self.handshake()
        begun = []
        for request_id, plans in meta.load_requests.items():
            job = self._begin(self._handle.load, self._own(plans))
            is_again = request_id in meta.reloads
            begun.append(_Running(meta.load_events[request_id], request_id, job, self._clock(), is_again))
        if meta.async_load:
            self._loads.extend(begun)
            return
        for load in begun:
            self._end_load(load, self._wait(load.job))

    def submit_stores(self, meta: UMBPConnectorMetadata) -> None:
        """Begin this step's stores, after its forward. Copies from host memory are waited for: then the
        source blocks are free again when the step ends. A device goes on computing meanwhile.
        """
        plans = [self._own(group) for group in meta.store_plan_groups()]
        if not plans:
            return
        jobs = [self._begin(self._handle.store, group) for group in plans]
        self._store_parts[meta.store_event] = len(jobs)
        for job in jobs:
            store = _Running(meta.store_event, "", job, self._clock())
            if self._copies_in_place:
                self._end_store(store, self._wait(job))
            else:
                self._stores.append(store)

    def collect(self) -> set[str]:
        """Requests whose asynchronous load has ended, well or not, since the last call; each exactly once."""
        self._waits_for_all = self._is_idle_step and self._can.local and self._has_short_transfers()
        self._end_what_has_ended()
        if self._is_idle_step and (self._loads or self._stores) and not self._finished_loads:
            # The engine steps on until these end: leave the processor to them for a moment.
            self._nap(IDLE_NAP_S)
            self._end_what_has_ended()
        finished, self._finished_loads = self._finished_loads, set()
        return finished

    def take_failed_blocks(self) -> set[int]:
        """Engine blocks that a load should have filled and did not, since the last call."""
        failed, self._failed_block_ids = self._failed_block_ids, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Those of the requests that `collect` has told whose load is lost, since the last call."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_report(self) -> UMBPConnectorWorkerMetadata | None:
        """What ended since the last call, by event."""
        report = self._report
        if report == _NO_NEWS:
            return None
        self._report = UMBPConnectorWorkerMetadata()
        return report

    def take_stats(self) -> UMBPStats | None:
        # A step without a forward follows each request's end: after it the engine may be silent for long.
        if self._can.usage and (self._is_idle_step or self._clock() >= self._next_gauges_s):
            self._next_gauges_s = self._clock() + GAUGE_INTERVAL_S
            usage = dict(self._handle.usage())
            for name, before in self._totals.items():
                total = self._totals[name] = usage.pop(name, 0.0)
                # A running total that shrinks would end the engine's metrics, and the engine with them.
                self._stats.add(name, max(0.0, total - before), self._can.tier)
            self._stats.set_gauges(self._rank_number, usage)
        if self._can.counts:
            self._stats.add_all(self._handle.take_counts())
        return self._stats.take()

    # Inside

    def _end_what_has_ended(self) -> None:
        self._loads = [load for load in self._loads if not self._try_end(load, self._end_async_load)]
        self._stores = [store for store in self._stores if not self._try_end(store, self._end_store)]

    def _has_short_transfers(self) -> bool:
        objects = sum(len(running.job.plans) for running in (*self._loads, *self._stores))
        return objects * max(self._object_bytes.values(), default=0) <= self._idle_wait_bytes

    def _try_end(self, running: _Running, end: Callable[[_Running, TransferJobState], None]) -> bool:
        """End a job that is final. In a step without a forward the engine has nothing better to do than to
        wait, if that doesn't last.
        """
        if self._waits_for_all:
            job: TransferJobState | None = self._wait(running.job)
        else:
            job = self._poll(running.job)
        if job is None:
            self._hurry(running)
            return False
        end(running, job)
        return True

    def _hurry(self, running: _Running) -> None:
        if running.is_overdue or self._clock() - running.started_s < self._timeout_s:
            return
        running.is_overdue = True
        logger.warning(
            "UMBP: a transfer of %d objects has run for more than %.1f s%s",
            len(running.job.plans),
            self._timeout_s,
            "; cancelling it" if self._can.cancel else "",
        )
        if self._can.cancel:
            try:
                self._handle.cancel(running.job)
            except Exception:
                if self._may_complain():
                    logger.exception("UMBP: the runtime failed to cancel a transfer")

    def _end_async_load(self, load: _Running, job: TransferJobState) -> None:
        self._end_load(load, job)
        self._finished_loads.add(load.request_id)

    def _end_load(self, load: _Running, job: TransferJobState) -> None:
        lost = [plan for plan in job.plans if plan.key not in job.completed_keys] if _has_loss(job) else []
        if lost and self._fails_by_request:
            self._failed_requests.add(load.request_id)
        else:
            self._failed_block_ids.update(plan.block_id for plan in lost)
        self._report.load_events[load.event] = self._result(1, lost)
        if lost:
            self._report.load_reasons[load.event] = reason_of(job)
            self._count_losses("failed_load_bytes", lost, job)
            self._tell_of_losses(len(lost), job.error)
        loaded = "reloaded_bytes" if load.is_again else "loaded_bytes"
        self._stats.add(loaded, job.completed_bytes, self._can.tier)
        self._count_seconds("load", load)

    def _end_store(self, store: _Running, job: TransferJobState) -> None:
        if job.completed_keys:
            try:
                self._handle.publish(job)
            except Exception as error:
                if self._may_complain():
                    logger.exception(
                        "UMBP: the runtime failed to publish %d objects", len(job.completed_keys)
                    )
                job.completed_keys.clear()
                job.fail(job.keys, str(error))
        lost = [plan for plan in job.plans if plan.key not in job.completed_keys] if _has_loss(job) else []
        self._stats.add("stored_bytes", job.completed_bytes, self._can.tier)
        self._count_seconds("store", store)
        self._store_parts[store.event] -= 1
        is_last = self._store_parts[store.event] == 0
        if is_last:
            del self._store_parts[store.event]
        result = self._report.store_events.setdefault(store.event, StoreEventResult())
        result.merge(self._result(1 if is_last else 0, lost))
        if lost:
            self._report.store_reasons.setdefault(store.event, reason_of(job))
            self._count_losses("dropped_store_bytes", lost, job)

    def _result(self, workers: int, lost: Sequence[BlockTransferPlan]) -> StoreEventResult:
        return StoreEventResult(workers, {(plan.group_id or 0, _hash_of(plan.key)) for plan in lost})

    def _count_losses(self, counter: str, lost: Sequence[BlockTransferPlan], job: TransferJobState) -> None:
        size = sum(self._object_bytes[plan.group_id or 0] for plan in lost)
        self._stats.add(counter, size, self._can.tier, reason_of(job))

    def _count_seconds(self, direction: str, running: _Running) -> None:
        seconds = self._clock() - running.started_s
        self._stats.add(f"{direction}_seconds", seconds)
        self._stats.observe(f"{direction}_job_seconds", seconds)

    def _tell_of_losses(self, blocks: int, reason: str | None) -> None:
        """One line a minute, with what came together since the last."""
        self._untold_losses += blocks
        now = self._clock()
        if now < self._next_loss_line_s:
            return
        logger.warning(
            "UMBP: %d blocks could not be loaded since this was last said; the last one: %s",
            self._untold_losses,
            reason or "no reason given",
        )
        self._untold_losses = 0
        self._next_loss_line_s = now + COMPLAINT_INTERVAL_S

    def _own(self, plans: Sequence[BlockTransferPlan]) -> Sequence[BlockTransferPlan]:
        """The scheduler's plans under this rank's keys, without groups that its pipeline stage has nothing
        of.
        """
        return localized_plans(plans_in_groups(plans, self._group_ids), self._codec)

    # The edge to the runtime: whatever it throws is a failed job

    def _begin(
        self,
        verb: Callable[[Sequence[BlockTransferPlan]], TransferJobState],
        plans: Sequence[BlockTransferPlan],
    ) -> TransferJobState:
        if not plans:
            job = TransferJobState(plans)
            job.complete()
            return job
        try:
            return verb(plans)
        except Exception as error:
            if self._may_complain():
                logger.exception("UMBP: the runtime could not begin a transfer of %d objects", len(plans))
            job = TransferJobState(plans)
            job.fail(job.keys, str(error))
            return job

    def _may_complain(self) -> bool:
        now = self._clock()
        if now < self._next_complaint_s:
            return False
        self._next_complaint_s = now + COMPLAINT_INTERVAL_S
        return True

    def _wait(self, job: TransferJobState) -> TransferJobState:
        ended = self._ask_for(self._handle.wait, job)
        assert ended is not None, "wait returns the job"
        return ended

    def _poll(self, job: TransferJobState) -> TransferJobState | None:
        return self._ask_for(self._handle.poll, job)

    def _ask_for(
        self, verb: Callable[[TransferJobState], TransferJobState | None], job: TransferJobState
    ) -> TransferJobState | None:
        """A job's end by `wait` or `poll`, which may not throw: whoever does not know whether a transfer has
        ended would let it write into blocks that have another owner by then. That must stop the engine.
        """
        if job.status.is_final:
            return job
        try:
            return verb(job)
        except Exception as error:
            raise UMBPError(
                f"the runtime can't tell whether a transfer of {len(job.keys)} blocks has ended ({error}); "
                "going on could put its bytes under another request, so the engine stops: "
                "mend or replace the runtime"
            ) from error


def _has_loss(job: TransferJobState) -> bool:
    return len(job.completed_keys) < len(job.keys)


def _hash_of(key: str) -> bytes:
    return bytes.fromhex(key.rpartition(":")[2])


def _codec_ranks(topology: RankTopology) -> tuple[int, int, int, int]:
    """The ranks in the order of `BlockIdentityCodec`'s fields."""
    tp, pcp, dcp, pp = topology.local_namespace
    return tp, pp, pcp, dcp
