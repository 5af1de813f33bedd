"""What runs inside an engine's workers for the tests: which blocks a request had, and what is in them.

vLLM sends these functions by name to every worker; each takes the worker first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

_RECORD = "_recorded_blocks"


def record_blocks(worker: Any) -> None:
    """From now on, remember each scheduled request's block ids by cache group, as the worker is told them."""
    runner = worker.model_runner
    if hasattr(runner, _RECORD):
        return
    recorded: dict[str, list[list[int]]] = {}
    setattr(runner, _RECORD, recorded)
    update_states = runner._update_states

    def recording(scheduler_output: Any) -> Any:
        for new in scheduler_output.scheduled_new_reqs:
            recorded[new.req_id] = [list(ids) for ids in new.block_ids]
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, new_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if new_ids is None:
                continue
            if req_id in cached.resumed_req_ids:
                recorded[req_id] = [list(ids) for ids in new_ids]
            else:
                for known, ids in zip(recorded[req_id], new_ids, strict=True):
                    known.extend(ids)
        return update_states(scheduler_output)

    runner._update_states = recording


def blocks_of(worker: Any, request_id: str) -> list[list[int]]:
    """The block ids of the request's last schedule, by cache group; vLLM appends a suffix to the id that it
    was given.
    """
    recorded: dict[str, list[list[int]]] = getattr(worker.model_runner, _RECORD)
    found = [ids for name, ids in recorded.items() if name == request_id or name.startswith(f"{request_id}-")]
    if len(found) != 1:
        raise LookupError(f"{len(found)} requests are named {request_id}")
    return found[0]


def kv_tensors(worker: Any) -> dict[str, list[Any]]:
    """Layer name -> its views of the KV memory, blocks first: one of an attention layer, several of a
    recurrent one.
    """
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(worker.vllm_config, AttentionLayerBase)
    views = {name: layer.kv_cache for name, layer in layers.items()}
    return {name: list(view) if isinstance(view, list | tuple) else [view] for name, view in views.items()}


def needed_blocks(spec: Any, tokens: int) -> list[int]:
    """Places in a request's table of the blocks without which a computation can't go on after its first
    `tokens`, which are whole blocks.
    """
    spec = next(iter(getattr(spec, "kv_cache_specs", {0: spec}).values()))
    end = tokens // spec.block_size
    window, chunk = getattr(spec, "sliding_window", 0), getattr(spec, "attention_chunk_size", 0)
    if type(spec).__name__ == "MambaSpec":
        return [end - 1] if end else []
    if type(spec).__name__ == "SlidingWindowSpec":
        return list(range(max(tokens - window + 1, 0) // spec.block_size, end))
    if type(spec).__name__ == "ChunkedLocalAttentionSpec":
        return list(range(tokens // chunk * chunk // spec.block_size, end))
    return list(range(end))


def _needed(worker: Any, request_id: str, tokens: int, group_id: int) -> list[int]:
    """Block ids."""
    ids = blocks_of(worker, request_id)[group_id]
    places = needed_blocks(
        worker.model_runner.kv_cache_config.kv_cache_groups[group_id].kv_cache_spec, tokens
    )
    found = [ids[place] for place in places]
    if 0 in found:
        raise LookupError(f"request {request_id} lacks a block of group {group_id} that it needs")
    return found


def read_blocks(worker: Any, request_id: str, tokens: int) -> dict[str, list[str]]:
    """Layer name -> a digest of the bytes of each block that is needed to go on after the request's first
    `tokens`.
    """
    tensors = kv_tensors(worker)
    digests: dict[str, list[str]] = {}
    for group_id, group in enumerate(worker.model_runner.kv_cache_config.kv_cache_groups):
        ids = _needed(worker, request_id, tokens, group_id)
        for name in group.layer_names:
            digests[name] = [_digest([view[block] for view in tensors[name]]) for block in ids]
    return digests


def _digest(parts: Sequence[Any]) -> str:
    import torch

    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def cache_groups(worker: Any) -> list[str]:
    """The kinds of the cache groups, by vLLM's names."""
    return [
        type(group.kv_cache_spec).__name__ for group in worker.model_runner.kv_cache_config.kv_cache_groups
    ]


def poison_blocks(worker: Any) -> None:
    """Overwrites all KV memory: what is read as right afterwards was put there afterwards. Only on an idle
    engine whose prefix cache is reset next.
    """
    for views in kv_tensors(worker).values():
        for view in views:
            _poison(view)


def poison_group(worker: Any, request_id: str, tokens: int, group_id: int) -> int:
    """Overwrites, in one cache group alone, what is needed to go on after the request's first `tokens`;
    returns in how many blocks. The engine takes them for its own, so reset its prefix cache afterwards.
    """
    tensors = kv_tensors(worker)
    ids = _needed(worker, request_id, tokens, group_id)
    for name in worker.model_runner.kv_cache_config.kv_cache_groups[group_id].layer_names:
        for view in tensors[name]:
            for block in ids:
                _poison(view[block])
    return len(ids)


def _poison(view: Any) -> None:
    view.fill_(161.0)  # harmless, and unlikely
