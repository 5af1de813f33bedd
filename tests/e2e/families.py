"""The families of the tiny models: for each its configuration, and random weights of normal size with peaky
attention.

Recurrent layers forget slowly and choose what they take up, so that far tokens show in their states.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

# Queries and keys are larger than scale-preserving, so that attention picks a few tokens, far ones included.
QUERY_KEY_GAIN = 3.0
# Wide logits: the first choice is mostly far ahead of the second.
LOGIT_GAIN = 3.0
# Positional part of a latent attention's keys.
ROPE = 64
# A recurrent state loses a part in 500 with each token.
LOG_DECAY = math.log(0.002)


class Shape(Protocol):
    """What the families read of a model's shape."""

    @property
    def layers(self) -> int: ...

    @property
    def hidden(self) -> int: ...

    @property
    def heads(self) -> int: ...

    @property
    def kv_heads(self) -> int: ...

    @property
    def intermediate(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def vocabulary(self) -> int: ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def latent(self) -> int: ...

    @property
    def local(self) -> int: ...


Weights = dict[str, Any]


class Draw:
    """Matrices from one seed, in the order of the calls."""

    def __init__(self, seed: int) -> None:
        import torch

        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int, gain: float = 1.0) -> Any:
        """Scale-preserving at gain 1."""
        import torch

        values = torch.randn(rows, columns, generator=self._generator) * (gain / math.sqrt(columns))
        return values.to(torch.bfloat16)

    @staticmethod
    def same(length: int, value: float, *, is_single: bool = False) -> Any:
        import torch

        return torch.full((length,), value, dtype=torch.float32 if is_single else torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Family:
    """`config` goes over the configuration that all families have in common, `weights` is all of them."""

    config: Callable[[Shape], dict[str, Any]]
    weights: Callable[[Shape, Draw], Weights]


def common_config(shape: Shape) -> dict[str, Any]:
    return {
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


def _ends(
    shape: Shape, draw: Draw, *, norm: float = 1.0, embedding: float = 1.0, logits: float = LOGIT_GAIN
) -> Weights:
    """Embeddings, the last norm and the logits."""
    gain = embedding * math.sqrt(shape.hidden)
    return {
        "model.embed_tokens.weight": draw.matrix(shape.vocabulary, shape.hidden, gain),
        "model.norm.weight": draw.same(shape.hidden, norm),
        "lm_head.weight": draw.matrix(shape.vocabulary, shape.hidden, logits),
    }


def _mlp(shape: Shape, draw: Draw, name: str = "mlp", *, intermediate: int = 0) -> Weights:
    width = intermediate or shape.intermediate
    return {
        f"{name}.gate_proj.weight": draw.matrix(width, shape.hidden),
        f"{name}.up_proj.weight": draw.matrix(width, shape.hidden),
        f"{name}.down_proj.weight": draw.matrix(shape.hidden, width),
    }


def _attention(shape: Shape, draw: Draw, *, gain: float = QUERY_KEY_GAIN, query_parts: int = 1) -> Weights:
    queries, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "self_attn.q_proj.weight": draw.matrix(query_parts * queries, shape.hidden, gain),
        "self_attn.k_proj.weight": draw.matrix(kv, shape.hidden, gain),
        "self_attn.v_proj.weight": draw.matrix(kv, shape.hidden),
        "self_attn.o_proj.weight": draw.matrix(shape.hidden, queries),
    }


def _norms(shape: Shape, draw: Draw, *names: str, value: float = 1.0) -> Weights:
    return {f"{name}.weight": draw.same(shape.hidden, value) for name in names}


TWO_NORMS = ("input_layernorm", "post_attention_layernorm")


def _numbered(number: int, *parts: Weights, root: str = "model.layers") -> Weights:
    return {f"{root}.{number}.{name}": value for part in parts for name, value in part.items()}


# Full attention.


def _llama_weights(shape: Shape, draw: Draw) -> Weights:
    weights = _ends(shape, draw)
    for number in range(shape.layers):
        weights |= _numbered(
            number, _norms(shape, draw, *TWO_NORMS), _mlp(shape, draw), _attention(shape, draw)
        )
    return weights


LLAMA = Family(
    config=lambda shape: {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    weights=_llama_weights,
)


# The head of EAGLE speculation on a llama: one layer more, on the target's last hidden states.


def _eagle_weights(shape: Shape, draw: Draw) -> Weights:
    weights: Weights = {"fc.weight": draw.matrix(shape.hidden, 2 * shape.hidden)}
    for number in range(shape.layers):
        layer = _norms(shape, draw, TWO_NORMS[1]) | _mlp(shape, draw) | _attention(shape, draw)
        weights |= _numbered(number, layer, root="layers")
    return weights


EAGLE = Family(config=LLAMA.config, weights=_eagle_weights)


# Latent attention (DeepSeek-V2 with dense layers): the KV is one vector of `latent + ROPE` a layer.


def _latent_config(shape: Shape) -> dict[str, Any]:
    return {
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


def _latent_weights(shape: Shape, draw: Draw) -> Weights:
    weights = _ends(shape, draw)
    for number in range(shape.layers):
        weights |= _numbered(
            number, _norms(shape, draw, *TWO_NORMS), _mlp(shape, draw), _latent_attention(shape, draw)
        )
    return weights


def _latent_attention(shape: Shape, draw: Draw) -> Weights:
    queries = shape.heads * shape.head_dim
    parts = {
        "q_proj": draw.matrix(queries + shape.heads * ROPE, shape.hidden, QUERY_KEY_GAIN),
        "kv_a_proj_with_mqa": draw.matrix(shape.latent + ROPE, shape.hidden, QUERY_KEY_GAIN),
        "kv_a_layernorm": draw.same(shape.latent, 1.0),
        "kv_b_proj": draw.matrix(2 * queries, shape.latent),
        "o_proj": draw.matrix(shape.hidden, queries),
    }
    return {f"self_attn.{name}.weight": value for name, value in parts.items()}


LATENT = Family(config=_latent_config, weights=_latent_weights)


# Sliding windows of `local` tokens beside full attention (Gemma 3): two windowed layers, then a full one.
# Gemma's norms multiply by one more than their weight.


def _sliding_config(shape: Shape) -> dict[str, Any]:
    types = ["full_attention" if number % 3 == 2 else "sliding_attention" for number in range(shape.layers)]
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": shape.head_dim,
        "sliding_window": shape.local,
        "layer_types": types,
        "rope_local_base_freq": 10000.0,
    }


def _sliding_weights(shape: Shape, draw: Draw) -> Weights:
    norms = (*TWO_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
    # The model itself multiplies embeddings by the root of its width.
    weights = _ends(shape, draw, norm=0.0, embedding=1 / math.sqrt(shape.hidden))
    for number in range(shape.layers):
        weights |= _numbered(
            number,
            _norms(shape, draw, *norms, value=0.0),
            _mlp(shape, draw),
            _attention(shape, draw, gain=1.0),
            _query_key_norms(shape, draw),
        )
    return weights


def _query_key_norms(shape: Shape, draw: Draw, gain: float = QUERY_KEY_GAIN) -> Weights:
    return {f"self_attn.{name}.weight": draw.same(shape.head_dim, gain - 1) for name in ("q_norm", "k_norm")}


SLIDING = Family(config=_sliding_config, weights=_sliding_weights)


# Attention within chunks of `local` tokens beside full attention (Llama 4, dense layers), turn by turn.


def _chunked_config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "intermediate_size_mlp": shape.intermediate,
        "num_local_experts": 1,
        "interleave_moe_layer_step": 0,
        "moe_layers": [],
        "use_qk_norm": False,
        "no_rope_layers": [1 - number % 2 for number in range(shape.layers)],
        "attention_chunk_size": shape.local,
    }


def _chunked_weights(shape: Shape, draw: Draw) -> Weights:
    weights = _ends(shape, draw)
    for number in range(shape.layers):
        weights |= _numbered(
            number,
            _norms(shape, draw, *TWO_NORMS),
            _mlp(shape, draw, "feed_forward"),
            _attention(shape, draw),
        )
    return weights


CHUNKED = Family(config=_chunked_config, weights=_chunked_weights)


# Gated delta rule beside full attention (Qwen3-Next): three recurrent layers, then a full one. vLLM insists
# on experts in some layer of each pipeline stage: every other layer has two. `local` is the width of a
# recurrent head.

DELTA_KEY_HEADS = 2
DELTA_VALUE_HEADS = 4
# Peakier, its answers would turn on the last bits, which differ from batch to batch.
DELTA_GAIN = 1.0
CONVOLUTION = 4
EXPERTS = 2
EXPERT_WIDTH = 64


def _delta_config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "layer_types": [_delta_layer(number) for number in range(shape.layers)],
        "linear_conv_kernel_dim": CONVOLUTION,
        "linear_key_head_dim": shape.local,
        "linear_value_head_dim": shape.local,
        "linear_num_key_heads": DELTA_KEY_HEADS,
        "linear_num_value_heads": DELTA_VALUE_HEADS,
        "mlp_only_layers": list(range(0, shape.layers, 2)),
        "num_experts": EXPERTS,
        # All of them: a choice between two that are alike would turn on the last bit.
        "num_experts_per_tok": EXPERTS,
        "moe_intermediate_size": EXPERT_WIDTH,
        "shared_expert_intermediate_size": EXPERT_WIDTH,
    }


def _delta_layer(number: int) -> str:
    return "full_attention" if number % 4 == 3 else "linear_attention"


def _delta_weights(shape: Shape, draw: Draw) -> Weights:
    weights = _ends(shape, draw, norm=0.0)
    for number in range(shape.layers):
        is_full = _delta_layer(number) == "full_attention"
        weights |= _numbered(
            number,
            _norms(shape, draw, *TWO_NORMS, value=0.0),
            _experts(shape, draw) if number % 2 else _mlp(shape, draw),
            # Queries come with a gate of their size.
            _attention(shape, draw, gain=1.0, query_parts=2) if is_full else _delta_rule(shape, draw),
            _query_key_norms(shape, draw, DELTA_GAIN) if is_full else {},
        )
    return weights


def _delta_rule(shape: Shape, draw: Draw) -> Weights:
    keys, values = DELTA_KEY_HEADS * shape.local, DELTA_VALUE_HEADS * shape.local
    parts = {
        "in_proj_qkvz.weight": draw.matrix(2 * keys + 2 * values, shape.hidden),
        "in_proj_ba.weight": draw.matrix(2 * DELTA_VALUE_HEADS, shape.hidden, DELTA_GAIN),
        "conv1d.weight": draw.matrix(2 * keys + values, CONVOLUTION).unsqueeze(1),
        "dt_bias": draw.same(DELTA_VALUE_HEADS, 0.0),
        "A_log": draw.same(DELTA_VALUE_HEADS, LOG_DECAY, is_single=True),
        "norm.weight": draw.same(shape.local, 1.0),
        "out_proj.weight": draw.matrix(shape.hidden, values),
    }
    return {f"linear_attn.{name}": value for name, value in parts.items()}


def _experts(shape: Shape, draw: Draw) -> Weights:
    weights = {
        "mlp.gate.weight": draw.matrix(EXPERTS, shape.hidden),
        "mlp.shared_expert_gate.weight": draw.matrix(1, shape.hidden),
    }
    for name in ("shared_expert", *(f"experts.{number}" for number in range(EXPERTS))):
        weights |= _mlp(shape, draw, f"mlp.{name}", intermediate=EXPERT_WIDTH)
    return weights


DELTA = Family(config=_delta_config, weights=_delta_weights)


# Recurrent layers alone (Mamba 2). `local` is the state's size; there are `heads` heads of twice the width.


def _mamba_config(shape: Shape) -> dict[str, Any]:
    return {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "num_heads": shape.heads,
        "head_dim": 2 * shape.hidden // shape.heads,
        "expand": 2,
        "n_groups": 2,
        "state_size": shape.local,
        "conv_kernel": CONVOLUTION,
        "chunk_size": 32,
        "use_bias": False,
        "use_conv_bias": False,
        "layer_norm_epsilon": 1e-5,
    }


def _mamba_weights(shape: Shape, draw: Draw) -> Weights:
    names = {"model.embed_tokens": "backbone.embeddings", "model.norm": "backbone.norm_f"}
    weights = {}
    # One token is a small part of a state: the logits must be wider to show it.
    for name, value in _ends(shape, draw, logits=3 * LOGIT_GAIN).items():
        stem = name.removesuffix(".weight")
        weights[f"{names.get(stem, stem)}.weight"] = value
    inner, groups = 2 * shape.hidden, 2 * shape.local
    for number in range(shape.layers):
        mixer = {
            "in_proj.weight": draw.matrix(2 * inner + 2 * groups + shape.heads, shape.hidden),
            "conv1d.weight": draw.matrix(inner + 2 * groups, CONVOLUTION).unsqueeze(1),
            "dt_bias": draw.same(shape.heads, 0.0),
            "A_log": draw.same(shape.heads, LOG_DECAY, is_single=True),
            "D": draw.same(shape.heads, 0.0),
            "norm.weight": draw.same(inner, 1.0),
            "out_proj.weight": draw.matrix(shape.hidden, inner),
        }
        named = {f"mixer.{name}": value for name, value in mixer.items()}
        weights |= _numbered(
            number, {"norm.weight": draw.same(shape.hidden, 1.0)}, named, root="backbone.layers"
        )
    return weights


MAMBA = Family(config=_mamba_config, weights=_mamba_weights)
