"""What to move: transfer plans, one by one or by column, and what is known of a request's blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, overload

from umbp.data.identity import BlockIdentityCodec


class KVRange(NamedTuple):
    """One contiguous piece of device memory and its place in the object."""

    layer_name: str
    group_id: int
    block_id: int
    base_address: int
    stride: int
    length: int
    object_offset: int


@dataclass(frozen=True, slots=True)
class BlockTransferPlan:
    """One object to move. Without `ranges` the worker that moves it finds them by block and group."""

    key: str
    block_id: int
    ranges: tuple[KVRange, ...] = ()
    request_id: str | None = None
    group_id: int | None = None
    block_hash: bytes | None = None
    parent_block_hash: bytes | None = None
    token_ids: tuple[int, ...] = ()
    block_size: int = 0
    medium: str = "CPU"


@dataclass(frozen=True, slots=True)
class BlockLoadBatch(Sequence[BlockTransferPlan]):
    """Objects to load for one request, by column; also a sequence of plans, each built when asked for."""

    keys: Sequence[str]
    block_ids: Sequence[int]
    group_ids: Sequence[int]
    request_id: str | None

    def __post_init__(self) -> None:
        _freeze_columns(self)

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, index: int) -> BlockTransferPlan: ...
    @overload
    def __getitem__(self, index: slice) -> list[BlockTransferPlan]: ...
    def __getitem__(self, index: int | slice) -> BlockTransferPlan | list[BlockTransferPlan]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return BlockTransferPlan(
            self.keys[index],
            self.block_ids[index],
            request_id=self.request_id,
            group_id=self.group_ids[index],
        )

    def __iter__(self) -> Iterator[BlockTransferPlan]:
        return (self[i] for i in range(len(self)))


@dataclass(frozen=True, slots=True)
class BlockStoreBatch(Sequence[BlockTransferPlan]):
    """Objects to store of one request, by column; also a sequence of plans, each built when asked for."""

    keys: Sequence[str]
    block_ids: Sequence[int]
    group_ids: Sequence[int]
    block_hashes: Sequence[bytes | None]
    parent_block_hashes: Sequence[bytes | None]
    token_ids: Sequence[tuple[int, ...]]
    block_sizes: Sequence[int]
    request_id: str | None

    def __post_init__(self) -> None:
        _freeze_columns(self)

    def localized(self, keys: Sequence[str]) -> BlockStoreBatch:
        """The same batch under another rank's keys; the other columns are shared, not copied."""
        return replace(self, keys=keys)

    def __len__(self) -> int:
        return len(self.keys)

    @overload
    def __getitem__(self, index: int) -> BlockTransferPlan: ...
    @overload
    def __getitem__(self, index: slice) -> list[BlockTransferPlan]: ...
    def __getitem__(self, index: int | slice) -> BlockTransferPlan | list[BlockTransferPlan]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return BlockTransferPlan(
            self.keys[index],
            self.block_ids[index],
            request_id=self.request_id,
            group_id=self.group_ids[index],
            block_hash=self.block_hashes[index],
            parent_block_hash=self.parent_block_hashes[index],
            token_ids=tuple(self.token_ids[index]),
            block_size=self.block_sizes[index],
        )

    def __iter__(self) -> Iterator[BlockTransferPlan]:
        return (self[i] for i in range(len(self)))


def _freeze_columns(batch: Any) -> None:
    """Columns become tuples of one length, so that whoever built a batch can't change it later."""
    lengths = {}
    for field in fields(batch):
        if field.name != "request_id":
            column = tuple(getattr(batch, field.name))
            object.__setattr__(batch, field.name, column)
            lengths[field.name] = len(column)
    if len(set(lengths.values())) > 1:
        raise ValueError(f"{type(batch).__name__} has columns of unequal length: {lengths}")


def localized_plans(
    plans: Sequence[BlockTransferPlan], codec: BlockIdentityCodec
) -> Sequence[BlockTransferPlan]:
    """A scheduler's plans under the worker's own keys, of the same kind; what was given stays as it was.

    Plans that carry ranges are addressed to a worker already and are left alone.
    """
    if isinstance(plans, BlockStoreBatch):
        return plans.localized(codec.localize(plans.keys))
    if isinstance(plans, BlockLoadBatch):
        return replace(plans, keys=codec.localize(plans.keys))
    keys = codec.localize(plan.key for plan in plans)
    return [plan if plan.ranges else replace(plan, key=key) for plan, key in zip(plans, keys, strict=True)]


def plans_in_groups(
    plans: Sequence[BlockTransferPlan], group_ids: frozenset[int]
) -> Sequence[BlockTransferPlan]:
    """Those of the plans whose cache group is one of these, of the same kind as what was given.

    A plan without a group is of all groups, and stays.
    """
    if isinstance(plans, BlockLoadBatch | BlockStoreBatch):
        if group_ids.issuperset(plans.group_ids):
            return plans
        rows = [row for row, group_id in enumerate(plans.group_ids) if group_id in group_ids]
        columns = [field.name for field in fields(plans) if field.name != "request_id"]
        chosen: Any = {name: [getattr(plans, name)[row] for row in rows] for name in columns}
        return replace(plans, **chosen)
    return [plan for plan in plans if plan.group_id is None or plan.group_id in group_ids]


@dataclass(slots=True)
class LoadSpec:
    """How far the engine and the pool know a prompt; hashes are per group from the request's first block."""

    local_tokens: int
    external_tokens: int
    block_hashes_by_group: tuple[tuple[bytes | None, ...], ...] = ()

    @property
    def num_tokens_to_load(self) -> int:
        return max(self.external_tokens - self.local_tokens, 0)


@dataclass(slots=True)
class RequestTracker:
    """What has been stored of one request, and its block table by group."""

    saved_tokens: int = 0
    block_ids: tuple[list[int], ...] = ()
    load_spec: LoadSpec | None = None

    def reset(self) -> None:
        self.saved_tokens = 0
        self.block_ids = ()
        self.load_spec = None

    def update_blocks(self, groups: Sequence[Sequence[int]]) -> None:
        """Take in a table or a piece of one: a grown table replaces, a known tail is ignored, else append."""
        if not self.block_ids:
            self.block_ids = tuple(list(group) for group in groups)
            return
        if len(groups) != len(self.block_ids):
            raise ValueError(f"the request has {len(self.block_ids)} cache groups, not {len(groups)}")
        for known, group in zip(self.block_ids, groups, strict=True):
            table = list(group)
            if table[: len(known)] == known:
                known[:] = table
            elif table and known[-len(table) :] != table:
                known.extend(table)

    def replace_blocks(self, groups: Sequence[Sequence[int]]) -> None:
        """After a preemption: the new table is all there is, and nothing of it has been stored."""
        self.block_ids = tuple(list(group) for group in groups)
        self.saved_tokens = 0

    def mark_saved(self, token_count: int, block_size: int) -> int:
        """Move the mark up to the last full block below `token_count`, never back; returns the mark."""
        if block_size < 1:
            raise ValueError(f"block size must be positive, not {block_size}")
        self.saved_tokens = max(self.saved_tokens, token_count // block_size * block_size)
        return self.saved_tokens
