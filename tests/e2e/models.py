"""Tiny models whose outputs depend on all of the KV: random weights of normal size, peaky attention, a fixed
seed.

Weights as small as vLLM's dummy ones make every output depend on the last token alone, which would hide wrong
KV.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Shape:
    """A llama model's shape; the KV of one token has `2 * layers * kv_heads * head_dim` numbers. With a
    `latent` it is a DeepSeek-V2 model with dense layers, whose KV is one vector of `latent + ROPE` a layer.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    head_dim: int = 64
    vocabulary: int = 1024
    max_tokens: int = 8192
    latent: int = 0

    @property
    def kv_bytes_per_token(self) -> int:
        numbers = self.latent + ROPE if self.latent else 2 * self.kv_heads * self.head_dim
        return 2 * self.layers * numbers


# Grouped queries, two KV heads: runs with tensor parallel 1 and 2. 2 KiB of KV a token.
TINY = Shape("tiny", layers=4, hidden=256, heads=4, kv_heads=2, intermediate=512)
# 16 KiB of KV a token: the model for comparisons with other systems.
PEERS = Shape("peers", layers=8, hidden=512, heads=8, kv_heads=8, intermediate=1408)

# Latent attention: every rank of a tensor-parallel engine has the same KV.
LATENT = Shape("latent", layers=3, hidden=256, heads=4, kv_heads=4, intermediate=512, latent=512)
ROPE = 64

# Queries and keys are larger than scale-preserving, so that attention picks a few tokens, far ones included.
QUERY_KEY_GAIN = 3.0
# Wide logits: the first choice is mostly far ahead of the second.
LOGIT_GAIN = 3.0


def make_model(shape: Shape, root: Path, *, seed: int = 0) -> Path:
    """The folder of the model below `root`, made if it isn't there; two processes may ask at once."""
    folder = root / f"{shape.name}-{seed}"
    if not folder.is_dir():
        making = Path(tempfile.mkdtemp(prefix=".making-", dir=root))
        _write(shape, making, seed)
        try:
            os.rename(making, folder)
        except OSError:  # another process was first
            shutil.rmtree(making)
    return folder


def _write(shape: Shape, folder: Path, seed: int) -> None:
    from safetensors.torch import save_file

    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.max_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": False,
        "vocab_size": shape.vocabulary,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    if shape.latent:
        config |= {
            "architectures": ["DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v2",
            "kv_lora_rank": shape.latent,
            "q_lora_rank": None,
            "qk_nope_head_dim": shape.head_dim,
            "qk_rope_head_dim": ROPE,
            "v_head_dim": shape.head_dim,
            "first_k_dense_replace": shape.layers,
            "n_routed_experts": 2,
            "n_shared_experts": 1,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 64,
            "moe_layer_freq": 1,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "topk_method": "greedy",
            "scoring_func": "softmax",
        }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(_weights(shape, seed), folder / "model.safetensors", metadata={"format": "pt"})


def _weights(shape: Shape, seed: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Any:
        values = torch.randn(rows, columns, generator=generator) * (gain / math.sqrt(columns))
        return values.to(torch.bfloat16)

    norm = torch.ones(shape.hidden, dtype=torch.bfloat16)
    weights: dict[str, Any] = {
        "model.embed_tokens.weight": matrix(shape.vocabulary, shape.hidden, math.sqrt(shape.hidden)),
        "model.norm.weight": norm.clone(),
        "lm_head.weight": matrix(shape.vocabulary, shape.hidden, LOGIT_GAIN),
    }
    for number in range(shape.layers):
        layer = f"model.layers.{number}"
        weights |= {
            f"{layer}.input_layernorm.weight": norm.clone(),
            f"{layer}.post_attention_layernorm.weight": norm.clone(),
            f"{layer}.mlp.gate_proj.weight": matrix(shape.intermediate, shape.hidden),
            f"{layer}.mlp.up_proj.weight": matrix(shape.intermediate, shape.hidden),
            f"{layer}.mlp.down_proj.weight": matrix(shape.hidden, shape.intermediate),
        }
        weights |= {
            f"{layer}.self_attn.{name}.weight": value
            for name, value in _attention(shape, matrix, norm).items()
        }
    return weights


def _attention(shape: Shape, matrix: Callable[..., Any], norm: Any) -> dict[str, Any]:
    queries, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if shape.latent:
        return {
            "q_proj": matrix(queries + shape.heads * ROPE, shape.hidden, QUERY_KEY_GAIN),
            "kv_a_proj_with_mqa": matrix(shape.latent + ROPE, shape.hidden, QUERY_KEY_GAIN),
            "kv_a_layernorm": norm.new_ones(shape.latent),
            "kv_b_proj": matrix(2 * queries, shape.latent),
            "o_proj": matrix(shape.hidden, queries),
        }
    return {
        "q_proj": matrix(queries, shape.hidden, QUERY_KEY_GAIN),
        "k_proj": matrix(kv, shape.hidden, QUERY_KEY_GAIN),
        "v_proj": matrix(kv, shape.hidden),
        "o_proj": matrix(shape.hidden, queries),
    }
