"""Plans, turned into what one native call can move: keys, engine blocks and the runs that these blocks
consist of.

Pure: no pool, no thread. Batches are read by column; only plans that carry ranges of their own are looked at
one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from umbp.data import (
    BlockIdentityCodec,
    BlockLoadBatch,
    BlockStoreBatch,
    BlockTransferPlan,
    KVLayoutDescriptor,
    KVRegion,
    TensorLike,
)
from umbp.transfer import BlockRuns, derive_runs


@dataclass(frozen=True, slots=True)
class Move:
    """Objects of one layout: key i is the object of engine block i."""

    runs: BlockRuns
    keys: Sequence[str]
    block_ids: Sequence[int]
    names: Sequence[str]
    """The keys under which the pool has the objects: the worker's own, or those of the rank that stands for
    all that hold the same."""
    parent_names: Sequence[str | None] | None = None
    tokens: int = 0
    """What each of the objects counts for where evicted tokens are counted."""

    def parts(self, most_bytes: int) -> Iterator[Move]:
        """The same in moves of at most so many bytes, or of one object."""
        rows = max(most_bytes // self.runs.object_bytes, 1)
        if len(self.keys) <= rows:
            yield self
            return
        for first in range(0, len(self.keys), rows):
            part = slice(first, first + rows)
            yield Move(
                self.runs,
                self.keys[part],
                self.block_ids[part],
                self.names[part],
                None if self.parent_names is None else self.parent_names[part],
                self.tokens,
            )

    def only(self, rows: Sequence[int]) -> Move:
        """The same for these rows alone."""
        return Move(
            self.runs,
            [self.keys[row] for row in rows],
            [self.block_ids[row] for row in rows],
            [self.names[row] for row in rows],
            None if self.parent_names is None else [self.parent_names[row] for row in rows],
            self.tokens,
        )


class GroupRuns:
    """The runs of every cache group, and of all groups together, over one registration of KV caches."""

    def __init__(
        self,
        layout: KVLayoutDescriptor,
        kv_caches: Mapping[str, TensorLike],
        shared_codec: BlockIdentityCodec | None = None,
    ) -> None:
        """`ValueError` where a layer is missing or can't be expressed."""
        self._shared_codec = shared_codec
        self._tokens_of = layout.tokens_of
        missing = sorted(r.layer_name for r in layout.regions if r.layer_name not in kv_caches)
        if missing:
            raise ValueError(f"KV caches are missing for planned layers: {', '.join(missing)}")
        self._runs: dict[int | None, BlockRuns] = {}
        for group_id in sorted({region.group_id for region in layout.regions}):
            regions = [region for region in layout.regions if region.group_id == group_id]
            counts = {
                region.layer_name: _block_count(region, kv_caches[region.layer_name]) for region in regions
            }
            if len(set(counts.values())) != 1:
                raise ValueError(
                    f"the layers of cache group {group_id} have unequal numbers of blocks: {counts}"
                )
            caches: dict[str, Any] = {r.layer_name: kv_caches[r.layer_name] for r in regions}
            self._runs[group_id] = derive_runs(caches, next(iter(counts.values())))
        self._runs[None] = _together(list(self._runs.values()))

    @property
    def object_sizes(self) -> list[int]:
        """Bytes of an object of each group, in the groups' order."""
        return list(self.bytes_by_group().values())

    def bytes_by_group(self) -> dict[int, int]:
        """Bytes of an object of each group."""
        return {group: runs.object_bytes for group, runs in self._runs.items() if group is not None}

    @property
    def block_count(self) -> int:
        """Blocks of the engine's KV memory; block ids go up to here."""
        return min(runs.block_count for runs in self._runs.values())

    def moves(self, plans: Sequence[BlockTransferPlan]) -> Iterator[Move]:
        """The plans, group by group; `ValueError` for a group that isn't registered."""
        if isinstance(plans, BlockLoadBatch | BlockStoreBatch):
            yield from self._batch_moves(plans)
            return
        for plan in plans:
            runs = _ranged(plan) if plan.ranges else self._group(plan.group_id)
            block_id = 0 if plan.ranges else plan.block_id
            names = self.names([plan.key])
            parents = [_parent_key(names[0], plan.parent_block_hash)]
            yield Move(runs, [plan.key], [block_id], names, parents, self._tokens_of(plan.group_id))

    def _batch_moves(self, batch: BlockLoadBatch | BlockStoreBatch) -> Iterator[Move]:
        names = self.names(batch.keys)
        # Loads come in the blocks' order: where one isn't a chain, this is no more than an order.
        parents = _parent_names(names, batch) if isinstance(batch, BlockStoreBatch) else None
        groups = set(batch.group_ids)
        if len(groups) == 1:
            (group_id,) = groups
            parents = parents or [None, *names[:-1]]
            tokens = self._tokens_of(group_id)
            yield Move(self._group(group_id), batch.keys, batch.block_ids, names, parents, tokens)
            return
        for group_id in sorted(groups):
            rows = [row for row, group in enumerate(batch.group_ids) if group == group_id]
            own_names = [names[row] for row in rows]
            yield Move(
                self._group(group_id),
                [batch.keys[row] for row in rows],
                [batch.block_ids[row] for row in rows],
                own_names,
                [parents[row] for row in rows] if parents else [None, *own_names[:-1]],
                self._tokens_of(group_id),
            )

    def names(self, keys: Sequence[str]) -> Sequence[str]:
        """Under which the pool has these objects."""
        return keys if self._shared_codec is None else self._shared_codec.localize(keys)

    def _group(self, group_id: int | None) -> BlockRuns:
        if group_id not in self._runs:
            raise ValueError(f"no cache group {group_id} is registered")
        return self._runs[group_id]


def _block_count(region: KVRegion, tensor: TensorLike) -> int:
    """How many engine blocks a tensor holds. Its dimension 0 counts kernel blocks, of which one engine block
    has several where a row's content is only a part of the page; a row that is as far from the next as a page
    or further is a whole block, padded or not."""
    if tensor.ndim == 0:
        raise ValueError(f"layer {region.layer_name}: a KV cache without dimensions has no blocks")
    rows = int(tensor.shape[0])
    content_bytes = tensor.element_size()
    for size in tensor.shape[1:]:
        content_bytes *= int(size)
    if tensor.stride(0) * tensor.element_size() >= region.block_bytes or content_bytes >= region.block_bytes:
        return rows
    if (
        content_bytes == 0
        or region.block_bytes % content_bytes
        or rows % (region.block_bytes // content_bytes)
    ):
        raise ValueError(
            f"layer {region.layer_name}: rows of {content_bytes} bytes don't make blocks "
            f"of {region.block_bytes} bytes"
        )
    return rows // (region.block_bytes // content_bytes)


def _together(groups: Sequence[BlockRuns]) -> BlockRuns:
    """One block id in all groups, their objects one behind the other."""
    if len(groups) == 1:
        return groups[0]
    base: list[int] = []
    stride: list[int] = []
    length: list[int] = []
    offset: list[int] = []
    start = 0
    for runs in groups:
        base += runs.base_address.tolist()
        stride += runs.block_stride.tolist()
        length += runs.run_bytes.tolist()
        offset += [start + place for place in runs.object_offset.tolist()]
        start += runs.object_bytes
    return BlockRuns.from_columns(base, stride, length, offset, min(runs.block_count for runs in groups))


def _ranged(plan: BlockTransferPlan) -> BlockRuns:
    """A plan's own ranges as the runs of one single block."""
    if any(piece.length <= 0 or piece.object_offset < 0 for piece in plan.ranges):
        raise ValueError(f"plan {plan.key}: ranges need a positive length and an offset from 0 up")
    return BlockRuns.from_columns(
        [piece.base_address for piece in plan.ranges],
        [0] * len(plan.ranges),
        [piece.length for piece in plan.ranges],
        [piece.object_offset for piece in plan.ranges],
        1,
    )


def _parent_names(names: Sequence[str], batch: BlockStoreBatch) -> list[str | None]:
    """The parents' names. Where the batch is a chain, as mostly, that is the name of the row before."""
    parents: list[str | None] = []
    before: tuple[bytes | None, int, str] = (None, -1, "")
    columns = zip(names, batch.group_ids, batch.block_hashes, batch.parent_block_hashes, strict=True)
    for name, group, own_hash, parent_hash in columns:
        if parent_hash is not None and parent_hash == before[0] and group == before[1]:
            parents.append(before[2])
        else:
            parents.append(_parent_key(name, parent_hash))
        before = own_hash, group, name
    return parents


def _parent_key(key: str, parent_hash: bytes | None) -> str | None:
    """The parent's key: the same rank and group, another hash."""
    return None if parent_hash is None else key[: key.rfind(":") + 1] + parent_hash.hex()
