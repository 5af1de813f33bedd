"""What runs inside an engine's workers for the tests: which blocks a request had, and what is in them.

vLLM sends these functions by name to every worker; each takes the worker first.
"""

from __future__ import annotations

import hashlib
from typing import Any

_RECORD = "_recorded_blocks"


def record_blocks(worker: Any) -> None:
    """From now on, remember each scheduled request's block ids, as the worker is told them."""
    runner = worker.model_runner
    if hasattr(runner, _RECORD):
        return
    recorded: dict[str, list[int]] = {}
    setattr(runner, _RECORD, recorded)
    update_states = runner._update_states

    def recording(scheduler_output: Any) -> Any:
        for new in scheduler_output.scheduled_new_reqs:
            recorded[new.req_id] = list(new.block_ids[0])
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, new_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if new_ids is None:
                continue
            if req_id in cached.resumed_req_ids:
                recorded[req_id] = list(new_ids[0])
            else:
                recorded[req_id].extend(new_ids[0])
        return update_states(scheduler_output)

    runner._update_states = recording


def blocks_of(worker: Any, request_id: str) -> list[int]:
    """The block ids of the request's last schedule; vLLM appends a suffix to the id that it was given."""
    recorded: dict[str, list[int]] = getattr(worker.model_runner, _RECORD)
    found = [ids for name, ids in recorded.items() if name == request_id or name.startswith(f"{request_id}-")]
    if len(found) != 1:
        raise LookupError(f"{len(found)} requests are named {request_id}")
    return found[0]


def kv_tensors(worker: Any) -> dict[str, Any]:
    """Layer name -> its KV view, blocks first."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    layers = get_layers_from_vllm_config(worker.vllm_config, AttentionLayerBase)
    return {name: layer.kv_cache for name, layer in layers.items()}


def read_blocks(worker: Any, request_id: str, count: int) -> dict[str, list[str]]:
    """Layer name -> a digest of the bytes of each of the request's first `count` blocks."""
    ids = blocks_of(worker, request_id)[:count]
    if len(ids) != count:
        raise LookupError(f"request {request_id} had {len(ids)} blocks, not {count}")
    return {name: [_digest(tensor[block]) for block in ids] for name, tensor in kv_tensors(worker).items()}


def _digest(block: Any) -> str:
    import torch

    return hashlib.sha256(block.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


def poison_blocks(worker: Any) -> None:
    """Overwrites all KV memory: what is read as right afterwards was put there afterwards. Only on an idle
    engine whose prefix cache is reset next.
    """
    import torch

    for tensor in kv_tensors(worker).values():
        tensor.view(torch.int16).fill_(0x4321)  # a harmless number in bfloat16, and an unlikely one
