"""The class that vLLM loads: its hooks and nothing else. Each role's object is built once and does the
work.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from umbp.connector.build import build_scheduler_side, build_worker_side, check_options
from umbp.connector.scheduler import SchedulerSide
from umbp.connector.stats import UMBPPromMetrics, UMBPStats
from umbp.connector.wire import UMBPConnectorMetadata, reports_by_rank
from umbp.connector.worker import WorkerSide
from umbp.data import EngineTopology

if TYPE_CHECKING:
    import torch
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class UMBPStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """Restores prefixes from a pool that outlives the engine's own cache."""

    _cache_hit_source = CacheHitSource.HOST

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = build_scheduler_side(vllm_config, kv_cache_config)
        else:
            self._worker = build_worker_side(vllm_config, kv_cache_config)

    @property
    def scheduler_side(self) -> SchedulerSide:
        """The scheduler's half; only in the scheduler's process."""
        assert self._scheduler is not None, "a scheduler hook was called on a worker's connector"
        return self._scheduler

    @property
    def worker_side(self) -> WorkerSide:
        """The worker's half; only in a worker's process."""
        assert self._worker is not None, "a worker hook was called on a scheduler's connector"
        return self._worker

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what is not stored is recomputed."""
        return False

    # Scheduler

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        topology = EngineTopology.from_vllm_config(self._vllm_config)
        self.scheduler_side.bind_workers(reports_by_rank(metadata, topology))

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        self.scheduler_side.bind_cache(kv_cache_manager)
        super().bind_kv_cache_manager(kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self.scheduler_side.bind_block_pool(gpu_block_pool)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.scheduler_side.match(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self.scheduler_side.admit(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.scheduler_side.plan_step(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduler_side.settle(connector_output)

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self.scheduler_side.take_events()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        # Blocks that are still being stored have pins of their own, so the request's can go at once.
        return False, self.scheduler_side.finish(request)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def register_finished_partial_tail(
        self,
        request: Request,
        block_ids: tuple[list[int], ...],
        partial_tail_offloads: list[tuple[int, int, int]],
    ) -> bool:
        # They get pins of their own as well.
        self.scheduler_side.leave_states(request, partial_tail_offloads)
        return False

    def has_pending_push_work(self) -> bool:
        return self.scheduler_side.has_pending_stores()

    def has_pending_block_frees(self) -> bool:
        return self.scheduler_side.delays_allocations()

    def reset_cache(self) -> bool | None:
        return self.scheduler_side.reset()

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker_side.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.worker_side.handshake()

    def unregister_kv_caches(self) -> None:
        self.worker_side.leave_memory()

    def restore_kv_caches(self) -> None:
        self.worker_side.return_to_memory()

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self.worker_side.start_loads(self._metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: loads that feed a forward are complete before it starts."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """Nothing to do: blocks are stored after the forward."""

    def wait_for_save(self) -> None:
        self.worker_side.submit_stores(self._metadata())

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self.worker_side.collect()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        finished = self.worker_side.collect()
        return KVConnectorTransferResults(
            finished_recving=finished, failed_recving=self.worker_side.take_failed_requests()
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker_side.take_failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker_side.take_report()

    def _metadata(self) -> UMBPConnectorMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, UMBPConnectorMetadata)
        return metadata

    # Both

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return (self._worker or self.scheduler_side).take_stats()

    def shutdown(self) -> None:
        (self._worker or self.scheduler_side).close()

    # What vLLM's front end asks of the class

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """False: nothing of ours runs between layers. vLLM asks while it resolves its configuration for a
        GPU, long before it loads the model: the moment to refuse bad options.
        """
        check_options(extra_config)
        return False

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return UMBPStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return UMBPPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
