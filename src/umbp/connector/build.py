"""Builds each role's half from vLLM's configuration: the one place that reads it; all below sees our frozen
values.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import KVCacheConfig

from umbp.connector import compat, support
from umbp.connector.hits import HitRules
from umbp.connector.identity import worker_namespace
from umbp.connector.scheduler import SchedulerSide
from umbp.connector.scheduler.events import EventfulPool, KVEvents
from umbp.connector.scheduler.pool_view import PoolView
from umbp.connector.worker import WorkerSide
from umbp.data import EngineTopology, KVLayoutPlanner, KVRegion
from umbp.data.identity import layer_spec
from umbp.options import MODES, Options, parse_options
from umbp.runtime.base import IUMBPRuntime, capabilities_of
from umbp.runtime.factory import create_runtime
from umbp.runtime.wrap.faulty import FAULTS_VARIABLE, FaultPlan, FaultyRuntime

logger = init_logger("vllm.umbp")


def build_scheduler_side(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> SchedulerSide:
    """The scheduler's half; raises `ConfigError` of one sentence for what can't be served."""
    options = _checked_options(vllm_config, kv_cache_config)
    support.warn_of_risks(vllm_config, options)
    logger.info("UMBP: %s", options.describe())
    topology = EngineTopology.from_vllm_config(vllm_config)
    runtime = _runtime(options)
    transfer = _transfer(vllm_config)
    shape = compat.cache_shape(vllm_config, kv_cache_config)
    events = None
    if compat.tells_kv_events(vllm_config) and support.can_tell_events(capabilities_of(runtime)):
        pool: PoolView = (eventful := EventfulPool(runtime, topology))
        events = KVEvents(eventful, shape, compat.group_labels(kv_cache_config))
    else:
        pool = PoolView(runtime, topology)
    return SchedulerSide(
        pool,
        options,
        shape,
        HitRules(vllm_config, kv_cache_config),
        step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        ranks=topology.rank_count,
        reads=transfer.is_kv_consumer,
        writes=transfer.is_kv_producer,
        is_lazy=options.write_policy == "lazy" and support.can_write_lazily(vllm_config, kv_cache_config),
        events=events,
    )


def build_worker_side(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> WorkerSide:
    """One rank's half; raises `ConfigError` or `SegmentError` of one sentence for what can't be served."""
    options = _checked_options(vllm_config, kv_cache_config)
    topology = EngineTopology.from_vllm_config(vllm_config)
    runtime = _runtime(options)
    planner = object_planner(kv_cache_config)
    support.require_layers(topology, planner)
    shape = compat.cache_shape(vllm_config, kv_cache_config)
    counted = shape.counted_among({region.group_id for region in planner.regions})
    return WorkerSide(
        runtime,
        options,
        worker_namespace(vllm_config, kv_cache_config),
        topology,
        planner,
        kv_tp_replicas=kv_cache_config.kv_tp_replicas,
        counted_tokens=(counted.group_id, counted.block_tokens),
        fails_by_request=not shape.is_chain,
    )


def check_options(extra: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for options that can't be served, as far as they tell without an engine."""
    options = parse_options(extra)
    # A plug-in's own code waits for the engine's processes; that it exists can be told here.
    if options.mode not in MODES.plug_ins():
        create_runtime(options)


def object_planner(kv_cache_config: KVCacheConfig) -> KVLayoutPlanner:
    """The object's side of the layout: which layers of which group, in which order.

    How a block lies in memory is read from the registered tensors' strides instead, so that layouts whose
    blocks are several runs are served too; a region's stride is only an upper bound here.
    """
    group_of = {
        layer: (group_id, group)
        for group_id, group in enumerate(kv_cache_config.kv_cache_groups)
        if group.enable_kv_transfer
        for layer in group.layer_names
    }
    regions = []
    offset = 0
    for tensor in kv_cache_config.kv_cache_tensors:
        for layer in tensor.layers:
            if layer not in group_of:
                continue
            group_id, group = group_of[layer]
            spec = layer_spec(group.kv_cache_spec, layer)
            size = spec.page_size_bytes
            regions.append(
                KVRegion(layer, group_id, max(size, tensor.block_stride), size, offset, spec.block_size)
            )
            offset += size
    return KVLayoutPlanner(regions)


def _checked_options(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> Options:
    options = parse_options(_transfer(vllm_config).kv_connector_extra_config)
    support.require_supported(vllm_config, kv_cache_config)
    support.require_shareable_hashes(vllm_config, options)
    support.require_safe_loads(vllm_config, options)
    return options


def _runtime(options: Options, environment: Mapping[str, str] = os.environ) -> IUMBPRuntime:
    """The mode's runtime, with faults injected where the environment asks for them (tests only)."""
    runtime = create_runtime(options)
    faults = environment.get(FAULTS_VARIABLE)
    if not faults:
        return runtime
    logger.warning("UMBP: %s is set: transfers are made to fail on purpose (%s)", FAULTS_VARIABLE, faults)
    return FaultyRuntime(runtime, FaultPlan.parse(faults))


def _transfer(vllm_config: VllmConfig) -> KVTransferConfig:
    transfer = vllm_config.kv_transfer_config
    assert transfer is not None, "vLLM builds a connector only with a kv_transfer_config"
    return transfer
