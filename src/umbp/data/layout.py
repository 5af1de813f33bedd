"""Where a block lies: an object's layout, and the pieces of device memory that make it up.

The planner serves layouts whose blocks are one contiguous run a layer. It lives in the worker, in the
thread that owns the connector.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from umbp.data.identity import RankTopology, layer_spec
from umbp.data.plans import BlockTransferPlan, KVRange

__all__ = ["KVLayoutDescriptor", "KVLayoutPlanner", "KVRange", "KVRegion", "TensorLike"]


class TensorLike(Protocol):
    """What this package reads of a tensor; `torch.Tensor` has it all. Strides count elements."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def ndim(self) -> int: ...
    def data_ptr(self) -> int: ...
    def element_size(self) -> int: ...
    def stride(self, dim: int, /) -> int: ...


@dataclass(frozen=True, slots=True)
class KVRegion:
    """One layer's share of an object. All sizes in bytes but `block_size`, which counts tokens."""

    layer_name: str
    group_id: int
    block_stride: int
    block_bytes: int
    object_offset: int
    block_size: int = 1

    def __post_init__(self) -> None:
        for field in ("block_stride", "block_bytes", "block_size"):
            value = getattr(self, field)
            if value < 1:
                raise ValueError(f"layer {self.layer_name}: {field} must be positive, not {value}")
        if self.block_bytes > self.block_stride:
            raise ValueError(
                f"layer {self.layer_name}: block_bytes {self.block_bytes} exceed "
                f"block_stride {self.block_stride}"
            )


@dataclass(frozen=True, slots=True)
class KVLayoutDescriptor:
    """What a runtime is told of one rank's objects; a scheduler's carries no regions."""

    regions: tuple[KVRegion, ...]
    topology: RankTopology
    layout_format: str = "rank_local"
    kv_tp_replicas: int = 1
    """So many consecutive tensor-parallel ranks hold identical KV; a pool that they share keeps it once."""
    counted_tokens: tuple[int, int] | None = None
    """A cache group, and the tokens that one of its objects counts for where evicted tokens are counted. So
    that each token is counted once, objects of other groups count for none, nor do those of ranks that don't
    hold what the engine's first rank holds.
    """

    def __post_init__(self) -> None:
        object.__setattr__(self, "regions", tuple(self.regions))
        if self.kv_tp_replicas < 1 or self.topology.tp_size % self.kv_tp_replicas:
            raise ValueError(
                f"kv_tp_replicas must divide tp_size {self.topology.tp_size}, not be {self.kv_tp_replicas}"
            )
        if self.counted_tokens is not None and self.counted_tokens[1] < 1:
            raise ValueError(f"counted_tokens must be positive, not {self.counted_tokens[1]}")
        if not self.layout_format:
            raise ValueError("layout_format must not be empty")
        names = [region.layer_name for region in self.regions]
        if len(set(names)) != len(names):
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ValueError(f"layers named twice: {', '.join(twice)}")

    @property
    def object_size(self) -> int:
        return sum(region.block_bytes for region in self.regions)

    def tokens_of(self, group_id: int | None) -> int:
        """What an object of a cache group, or of all groups together, counts for."""
        if self.counted_tokens is None or group_id not in (None, self.counted_tokens[0]):
            return 0
        return self.counted_tokens[1]

    def counted_if(self, is_counted: bool) -> KVLayoutDescriptor:
        """The same, for a rank whose objects are counted in tokens or not."""
        return self if is_counted else replace(self, counted_tokens=None)


class KVLayoutPlanner:
    """Object layout, and the scatter/gather list of a block once addresses are known."""

    def __init__(self, regions: Iterable[KVRegion]) -> None:
        self.regions = tuple(regions)
        self._base_addresses: dict[str, int] | None = None
        self._physical_strides: dict[str, int] = {}

    @classmethod
    def from_kv_cache_config(cls, config: Any) -> KVLayoutPlanner:
        """Tensors in order, each one's layers in order; groups closed to transfer are left out."""
        owners = {
            name: (group_id, layer_spec(group.kv_cache_spec, name))
            for group_id, group in enumerate(config.kv_cache_groups)
            if getattr(group, "enable_kv_transfer", True)
            for name in group.layer_names
        }
        regions = []
        offset = 0
        for tensor in config.kv_cache_tensors:
            for name in tensor.layers:
                if name not in owners:
                    continue
                group_id, spec = owners[name]
                regions.append(
                    KVRegion(
                        name, group_id, tensor.block_stride, spec.page_size_bytes, offset, spec.block_size
                    )
                )
                offset += spec.page_size_bytes
        return cls(regions)

    @property
    def object_size(self) -> int:
        return sum(region.block_bytes for region in self.regions)

    def describe(
        self, topology: RankTopology, layout_format: str = "rank_local", kv_tp_replicas: int = 1
    ) -> KVLayoutDescriptor:
        return KVLayoutDescriptor(self.regions, topology, layout_format, kv_tp_replicas)

    def register_kv_caches(self, kv_caches: Mapping[str, TensorLike]) -> None:
        """Learn addresses and physical strides of every planned layer; other layers are ignored.

        `ValueError` if a layer is missing or can't be cut as planned; an older registration then holds.
        """
        missing = sorted({region.layer_name for region in self.regions} - kv_caches.keys())
        if missing:
            raise ValueError(f"KV caches missing for layers: {', '.join(missing)}")
        strides = {
            region.layer_name: _physical_stride(region, kv_caches[region.layer_name])
            for region in self.regions
        }
        self._base_addresses = {name: kv_caches[name].data_ptr() for name in strides}
        self._physical_strides = strides

    def plan_for_block(
        self,
        key: str,
        block_id: int,
        base_addresses: Mapping[str, int],
        *,
        group_id: int | None = None,
        request_id: str | None = None,
    ) -> BlockTransferPlan:
        """The plan of one block at given addresses; `group_id` chooses ranges and isn't kept in the plan."""
        ranges = tuple(self._ranges(block_id, base_addresses, group_id))
        return BlockTransferPlan(key, block_id, ranges, request_id)

    def plan_registered_block(
        self, key: str, block_id: int, *, group_id: int | None = None, request_id: str | None = None
    ) -> BlockTransferPlan:
        """The plan of one block at the registered addresses."""
        return self.plan_for_block(
            key, block_id, self._registered(), group_id=group_id, request_id=request_id
        )

    def materialize(self, plan: BlockTransferPlan) -> BlockTransferPlan:
        """The same plan with the ranges of its block and group."""
        return replace(plan, ranges=tuple(self._ranges(plan.block_id, self._registered(), plan.group_id)))

    def _registered(self) -> dict[str, int]:
        if self._base_addresses is None:
            raise RuntimeError("no KV caches are registered yet")
        return self._base_addresses

    def _ranges(
        self, block_id: int, base_addresses: Mapping[str, int], group_id: int | None
    ) -> Iterator[KVRange]:
        if block_id < 0:
            raise ValueError(f"block id must not be negative: {block_id}")
        if group_id is None:
            located = [(region, region.object_offset) for region in self.regions]
        else:
            located = list(_packed(region for region in self.regions if region.group_id == group_id))
            if not located:
                raise ValueError(f"unknown cache group {group_id}")
        for region, object_offset in located:
            base = base_addresses.get(region.layer_name)
            if base is None:
                raise ValueError(f"no base address for layer {region.layer_name}")
            stride = self._physical_strides.get(region.layer_name, region.block_stride)
            # A block longer than the physical stride spans that many physical blocks, side by side:
            #   block b -> physical blocks [b * pieces, (b + 1) * pieces)
            pieces = max(region.block_bytes // stride, 1)
            length = region.block_bytes // pieces
            for piece in range(pieces):
                yield KVRange(
                    region.layer_name,
                    region.group_id,
                    block_id,
                    base + (block_id * pieces + piece) * stride,
                    stride,
                    length,
                    object_offset + piece * length,
                )


def _packed(regions: Iterable[KVRegion]) -> Iterator[tuple[KVRegion, int]]:
    offset = 0
    for region in regions:
        yield region, offset
        offset += region.block_bytes


def _dimensions(tensor: Any) -> int:
    """How many dimensions a tensor has; a stand-in may know only one of the ways to ask, or none."""
    if hasattr(tensor, "ndim"):
        return int(tensor.ndim)
    if hasattr(tensor, "dim"):
        return int(tensor.dim())
    return len(tensor.shape) if hasattr(tensor, "shape") else 1


def _physical_stride(region: KVRegion, tensor: TensorLike) -> int:
    if _dimensions(tensor) == 0:
        raise ValueError(f"layer {region.layer_name}: a KV cache must have at least one dimension")
    stride = tensor.stride(0) * tensor.element_size()
    planned = region.block_stride
    if stride < 1 or stride > planned or planned % stride:
        raise ValueError(
            f"layer {region.layer_name}: physical stride {stride} must divide "
            f"the planned block stride {planned}"
        )
    if region.block_bytes > stride and region.block_bytes % stride:
        raise ValueError(
            f"layer {region.layer_name}: physical stride {stride} must divide "
            f"the {region.block_bytes} bytes of a block (planned block stride {planned})"
        )
    return stride
