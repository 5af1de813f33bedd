"""Who a block is: the pool's namespace, the place of a rank in its engine, and the key text of a block."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeAlias

from umbp.errors import ConfigError

Rank: TypeAlias = tuple[int, int, int, int]
"""The place of one worker as keys spell it: (tp, pcp, dcp, pp)."""

LAYOUT_VERSION = 2


@dataclass(frozen=True, slots=True)
class UMBPNamespace:
    """Separates pools whose bytes must never meet."""

    value: str

    def __str__(self) -> str:
        return self.value

    @classmethod
    def configured(cls, vllm_config: Any) -> UMBPNamespace | None:
        """The user's `key_namespace`; None where it is absent or "auto"; else unusable: `ConfigError`."""
        transfer = getattr(vllm_config, "kv_transfer_config", None)
        extra = getattr(transfer, "kv_connector_extra_config", None) or {}
        value = extra.get("key_namespace", "auto")
        if value == "auto":
            return None
        if not isinstance(value, str) or not value:
            raise ConfigError(f'key_namespace must be "auto" or a non-empty string, not {value!r}')
        return cls(value)

    @classmethod
    def from_vllm_config(cls, vllm_config: Any, kv_cache_config: Any) -> UMBPNamespace:
        """The configured namespace, else a digest of model, layout and parallel shape.

        Only a worker's `kv_cache_config` has the specs of its own layers, so only a worker may derive one.
        """
        return cls.configured(vllm_config) or cls(_digest(_identity(vllm_config, kv_cache_config)))


def _digest(identity: dict[str, Any]) -> str:
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _identity(vllm_config: Any, kv_cache_config: Any) -> dict[str, Any]:
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    identity = {
        "model": getattr(model, "model", ""),
        "revision": getattr(model, "revision", None),
        "block_size": vllm_config.cache_config.block_size,
        "cache_layout": getattr(kv_cache_config, "kv_cache_layout", None),
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "pcp": getattr(parallel, "prefill_context_parallel_size", 1),
        "dcp": getattr(parallel, "decode_context_parallel_size", 1),
        "layout_version": LAYOUT_VERSION,
        "model_config": {
            "dtype": str(getattr(model, "dtype", None)),
            "quantization": getattr(model, "quantization", None),
            "hf_config": _hf_config(getattr(model, "hf_config", None)),
        },
        "groups": [_group(group) for group in kv_cache_config.kv_cache_groups],
    }
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is not None:
        draft = getattr(speculative, "draft_model_config", None)
        identity["speculative"] = {
            "method": getattr(speculative, "method", None),
            "model": getattr(draft, "model", None),
            "revision": getattr(draft, "revision", None),
        }
    return identity


def _hf_config(config: Any) -> dict[str, Any]:
    """The model's own configuration without what names a download or a library version."""
    if config is None or not hasattr(config, "to_dict"):
        return {}
    return {k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}


def _group(group: Any) -> dict[str, Any]:
    spec = group.kv_cache_spec
    return {
        "layers": list(group.layer_names),
        "block_size": spec.block_size,
        "layer_specs": {name: _fingerprint(layer_spec(spec, name)) for name in group.layer_names},
    }


def layer_spec(spec: Any, layer_name: str) -> Any:
    """A layer's own spec: a "uniform type" group keeps one per layer, any other shares the group's."""
    per_layer = getattr(spec, "kv_cache_specs", None)
    return spec if per_layer is None else per_layer[layer_name]


def _fingerprint(spec: Any) -> dict[str, str]:
    fields = {field.name: str(getattr(spec, field.name)) for field in dataclasses.fields(spec)}
    return {"kind": type(spec).__name__, **fields}


@dataclass(frozen=True, slots=True)
class RankTopology:
    """The parallel shape of an engine and the place of one rank in it."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    pcp_rank: int = 0
    pcp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1

    def __post_init__(self) -> None:
        for dim in ("tp", "pp", "pcp", "dcp"):
            rank, size = getattr(self, f"{dim}_rank"), getattr(self, f"{dim}_size")
            if size < 1:
                raise ValueError(f"{dim}_size must be positive, not {size}")
            if not 0 <= rank < size:
                raise ValueError(f"{dim}_rank must lie in [0, {size}), not {rank}")

    @classmethod
    def from_vllm_config(cls, vllm_config: Any) -> Self:
        """Workers are numbered [pp, pcp, tp], tp innermost; dcp splits the tp workers and adds none."""
        parallel = vllm_config.parallel_config
        tp = getattr(parallel, "tensor_parallel_size", 1)
        pp = getattr(parallel, "pipeline_parallel_size", 1)
        pcp = getattr(parallel, "prefill_context_parallel_size", 1)
        dcp = getattr(parallel, "decode_context_parallel_size", 1)
        if min(tp, pp, pcp, dcp) < 1:
            raise ValueError(f"parallel sizes must be positive: tp {tp}, pp {pp}, pcp {pcp}, dcp {dcp}")
        rank, tp_rank = divmod(getattr(parallel, "rank", 0), tp)
        rank, pcp_rank = divmod(rank, pcp)
        # Engines that number all data-parallel copies in one row wrap around here.
        return cls(tp_rank, tp, rank % pp, pp, pcp_rank, pcp, tp_rank % dcp, dcp)

    @property
    def local_namespace(self) -> Rank:
        return self.tp_rank, self.pcp_rank, self.dcp_rank, self.pp_rank

    @property
    def rank_count(self) -> int:
        return self.pp_size * self.pcp_size * self.tp_size

    def all_namespaces(self) -> tuple[Rank, ...]:
        """Every rank of the engine: pp outermost, then pcp, tp innermost."""
        if self.tp_size % self.dcp_size and self.dcp_size > 1:
            raise ValueError(f"dcp_size {self.dcp_size} must divide tp_size {self.tp_size}")
        return tuple(
            (tp, pcp, tp % self.dcp_size, pp)
            for pp in range(self.pp_size)
            for pcp in range(self.pcp_size)
            for tp in range(self.tp_size)
        )


@dataclass(frozen=True, slots=True)
class EngineTopology(RankTopology):
    """The shape of an engine that is running, or of one of its pipeline stages: then only the stage's ranks
    are there, and keep their places in the engine.

    Decode context may span the pcp axis, without dividing tp. The dcp entry of a rank's place then names no
    group of the engine's; the other three tell ranks apart.
    """

    stage: int | None = None

    @property
    def rank_count(self) -> int:
        return self.pcp_size * self.tp_size * (self.pp_size if self.stage is None else 1)

    def all_namespaces(self) -> tuple[Rank, ...]:
        return tuple(
            (tp, pcp, tp % self.dcp_size, pp)
            for pp in (range(self.pp_size) if self.stage is None else (self.stage,))
            for pcp in range(self.pcp_size)
            for tp in range(self.tp_size)
        )

    def stages(self) -> tuple[EngineTopology, ...]:
        """The pipeline's stages, first to last; the whole engine where it has one only."""
        if self.pp_size == 1:
            return (self,)
        return tuple(dataclasses.replace(self, stage=stage) for stage in range(self.pp_size))


@dataclass(frozen=True, slots=True)
class BlockIdentityCodec:
    """Block hash to key text, for one namespace; knows its own rank and can spell any other's."""

    namespace: UMBPNamespace | str
    tp_rank: int = 0
    pp_rank: int = 0
    pcp_rank: int = 0
    dcp_rank: int = 0

    @property
    def rank(self) -> Rank:
        return self.tp_rank, self.pcp_rank, self.dcp_rank, self.pp_rank

    def key_prefix(self, group_id: int = 0, rank: Rank | None = None) -> str:
        """All of a key but the hash; one prefix serves a whole column of blocks."""
        if group_id < 0:
            raise ValueError(f"group id must not be negative: {group_id}")
        return f"{self._rank_prefix(rank or self.rank)}g{group_id}:"

    def _rank_prefix(self, rank: Rank) -> str:
        tp, pcp, dcp, pp = rank
        return f"{self.namespace_prefix}tp{tp}:pcp{pcp}:dcp{dcp}:pp{pp}:"

    @property
    def namespace_prefix(self) -> str:
        """How all keys of the namespace begin, and no other's."""
        return f"umbp:vllm:v1:{self.namespace}:"

    def key(self, block_hash: bytes, group_id: int = 0) -> str:
        return self.key_for_namespace(block_hash, group_id, self.rank)

    def keys(self, block_hashes: Iterable[bytes], group_id: int = 0, rank: Rank | None = None) -> list[str]:
        """The keys of a column of blocks, of this rank or of the one named."""
        prefix = self.key_prefix(group_id, rank)
        return [prefix + _hex(block_hash) for block_hash in block_hashes]

    def key_for_namespace(self, block_hash: bytes, group_id: int, rank: Rank) -> str:
        return self.key_prefix(group_id, rank) + _hex(block_hash)

    def keys_for_topology(
        self, block_hash: bytes, topology: RankTopology, group_ids: Sequence[int]
    ) -> list[str]:
        """The keys of one block on every rank (outer) and in every group (inner), in this namespace."""
        return [
            self.key_for_namespace(block_hash, group_id, rank)
            for rank in topology.all_namespaces()
            for group_id in group_ids
        ]

    def localize(self, keys: Iterable[str]) -> list[str]:
        """Another rank's keys respelt for this rank and namespace; group and hash stay."""
        own = self._rank_prefix(self.rank)
        heads: dict[str, str] = {}
        localized = []
        for key in keys:
            head, _, digest = key.rpartition(":")
            mine = heads.get(head)
            if mine is None:
                mine = heads[head] = f"{own}{head.rpartition(':')[2]}:"
            localized.append(mine + digest)
        return localized


def _hex(block_hash: Any) -> str:
    if not isinstance(block_hash, bytes) or not block_hash:
        raise ValueError(f"a block hash must be non-empty bytes, not {block_hash!r}")
    return block_hash.hex()
