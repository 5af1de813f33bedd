"""vLLM's configuration for a scripted engine, resolved and planned as the engine core does it."""

from __future__ import annotations

import copy
import importlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from umbp.testing.engine.shape import (
    BLOCK,
    HEAD_SIZE,
    HEADS,
    STATE_WORDS,
    Layer,
    Shape,
    model_layers,
    stage_layers,
)

try:
    kv_cache_planning: Any = importlib.import_module("vllm.v1.core.kv_cache_planning")
except ModuleNotFoundError:  # vLLM 0.32
    kv_cache_planning = None


@cache
def model_folder(root: Path, layer_count: int = 2) -> Path:
    """A model's configuration, which is all of it that is ever read."""
    folder = root / f"model-{layer_count}"
    folder.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": layer_count,
        "vocab_size": 1000,
        "max_position_embeddings": 4096,
        "torch_dtype": "bfloat16",
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def make_config(root: Path, shape: Shape, **changes: Any) -> VllmConfig:
    """A configuration as the engine core resolves it; `changes` go to vLLM's engine arguments."""
    layers = model_layers(shape)
    arguments: dict[str, Any] = {
        "model": str(model_folder(root, sum(not layer.is_draft for layer in layers))),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "block_size": min(layer.like.block_tokens for layer in layers),
        "num_gpu_blocks_override": shape.blocks,
        "max_model_len": shape.max_model_len,
        "max_num_batched_tokens": shape.max_batched_tokens,
        "max_num_seqs": shape.max_seqs,
        "enable_prefix_caching": shape.prefix_caching,
        "prefix_match_unit": shape.match_tokens,
        "tensor_parallel_size": shape.ranks,
        "pipeline_parallel_size": shape.stages,
        "distributed_executor_backend": "mp" if shape.world > 1 else "uni",
        "scheduling_policy": shape.order,
        "kv_events_config": {"enable_kv_cache_events": shape.tells_events, "publisher": "null"},
    }
    if shape.has_connector:
        arguments["kv_transfer_config"] = transfer_config(shape)
    if shape.drafts:
        arguments["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": shape.drafts,
            "prompt_lookup_max": 2,
        }
    config = EngineArgs(**(arguments | changes)).create_engine_config()
    config.cache_config.kv_cache_layout = shape.layout
    # vLLM has no asynchronous scheduling on CPUs; its scheduler does.
    config.scheduler_config.async_scheduling = shape.depth > 1 and shape.stages == 1
    # No CPU backend can compute in these ways; the scheduler can plan for them.
    config.parallel_config.decode_context_parallel_size = shape.dcp
    config.parallel_config.prefill_context_parallel_size = shape.pcp
    if shape.dp_rank is not None:
        # As each of the engine cores' processes does it for its own.
        config.parallel_config.data_parallel_index = shape.dp_rank
        if config.kv_transfer_config is not None:
            config.kv_transfer_config.engine_id = f"{config.kv_transfer_config.engine_id}_dp{shape.dp_rank}"
    if shape.has_state:
        config.cache_config.mamba_cache_mode = "align" if shape.prefix_caching else "none"
    if config.speculative_config is not None:
        # A drafter with a layer of its own would want a model's folder; the scheduler wants its name only.
        config.speculative_config.method = shape.drafter
    for layer in layers:
        config.compilation_config.static_forward_context[layer.name] = AttentionLayer()
    return config


def transfer_config(shape: Shape) -> dict[str, Any]:
    """How the connector is configured, by itself or between others."""
    own = {
        "kv_connector": "UMBPStoreConnector",
        "kv_connector_module_path": "umbp.connector",
        "kv_role": shape.role,
        "kv_load_failure_policy": shape.policy,
        "kv_connector_extra_config": {"min_load_tokens": 0} | dict(shape.extra),
    }
    if not shape.before and not shape.after:
        return own
    everyone = [*map(dict, shape.before), own, *map(dict, shape.after)]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": shape.role,
        "kv_load_failure_policy": shape.policy,
        "kv_connector_extra_config": {"connectors": everyone},
    }


class AttentionLayer:
    """Stands where vLLM keeps a model's attention layer, for the one question that is asked of it."""

    def get_attn_backend(self) -> type[CPUAttentionBackend]:
        return CPUAttentionBackend


def full_attention() -> FullAttentionSpec:
    return FullAttentionSpec(block_size=BLOCK, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.bfloat16)


def layer_spec(layer: Layer, shape: Shape) -> KVCacheSpec:
    """What the model would say of the layer's cache on one rank."""
    like = layer.like
    if like.kind == "mamba":
        return MambaSpec(
            block_size=like.block_tokens,
            shapes=((STATE_WORDS,),),
            dtypes=(torch.int16,),
            mamba_cache_mode="align" if shape.prefix_caching else "none",
            num_speculative_blocks=shape.drafts,
        )
    if like.kind == "mla":
        return MLAAttentionSpec(
            block_size=like.block_tokens,
            num_kv_heads=1,
            head_size=2 * like.head_size,
            dtype=torch.bfloat16,
            max_tp_shards=1,
        )
    common: dict[str, Any] = {
        "block_size": like.block_tokens,
        "num_kv_heads": shape.rank_heads,
        "head_size": like.head_size,
        "dtype": torch.bfloat16,
    }
    if shape.kv_heads is not None:
        common["max_tp_shards"] = shape.kv_heads
    if like.kind == "sliding":
        return SlidingWindowSpec(**common, sliding_window=like.window_tokens)
    if like.kind == "chunked":
        return ChunkedLocalAttentionSpec(**common, attention_chunk_size=like.window_tokens)
    return FullAttentionSpec(**common)


def cache_configs(config: VllmConfig, shape: Shape | None = None) -> list[KVCacheConfig]:
    """Each rank's cache configuration, the scheduler's last; made and completed as the engine core does.

    Ranks are counted as vLLM does: all of the first stage of the pipeline, then those of the next.
    """
    parallel = config.parallel_config
    ranks, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    shape = shape or Shape(ranks=ranks, stages=stages)
    ranks *= shape.pcp
    specs: list[dict[str, KVCacheSpec]] = [
        {layer.name: layer_spec(layer, shape) for layer in stage_layers(shape, stage)}
        for stage in range(stages)
        for _ in range(ranks)
    ]
    memory = [1 << 30] * len(specs)
    if kv_cache_planning is None:
        configs = kv_cache_utils.get_kv_cache_configs(config, specs, memory)
    else:
        groups = kv_cache_planning.get_global_kv_cache_groups(config, specs)
        configs = kv_cache_planning.get_kv_cache_configs(config, specs, memory, groups)
    for one in configs:
        one.kv_cache_layout = config.cache_config.kv_cache_layout
    everyone = [*configs, generate_scheduler_kv_cache_config(configs)]
    config.cache_config.num_gpu_blocks = everyone[-1].num_blocks
    _, hash_block_size = resolve_kv_cache_block_sizes(everyone[-1], config)
    for one in everyone:
        one.hash_block_size = hash_block_size
    return everyone


def worker_config(config: VllmConfig, rank: int) -> VllmConfig:
    """The configuration as the worker of that rank sees it."""
    mine = copy.copy(config)
    mine.parallel_config = copy.copy(config.parallel_config)
    mine.parallel_config.rank = rank
    return mine
