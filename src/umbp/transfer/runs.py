"""Where the bytes of a KV block lie: contiguous runs, derived from the registered tensors' strides alone.

Nothing is guessed from a layout's name. Dimension 0 of a tensor counts kernel blocks (one engine block is one
or several of them); the others are sorted by stride, what is contiguous is merged, and every index of what
remains is a run of its own. Padding between runs is never touched.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Protocol

import numpy as np
import numpy.typing as npt

from umbp import _native
from umbp.errors import ConfigError

_OVERLAP_CHECK_BLOCKS = 2048


class KVTensor(Protocol):
    """The part of a tensor that is read: torch's, or anything with the same four."""

    @property
    def shape(self) -> Sequence[int]: ...
    def data_ptr(self) -> int: ...
    def stride(self) -> Sequence[int]: ...
    def element_size(self) -> int: ...


@dataclass(frozen=True, slots=True)
class BlockRuns:
    """The runs of one cache group, by column: run i of block b is `run_bytes[i]` bytes at
    `base_address[i] + b * block_stride[i]`, and belongs at `object_offset[i]` of the block's object."""

    base_address: npt.NDArray[np.uint64]
    block_stride: npt.NDArray[np.int64]
    run_bytes: npt.NDArray[np.uint64]
    object_offset: npt.NDArray[np.uint64]
    block_count: int
    object_bytes: int
    native: _native.Runs = field(repr=False, compare=False)

    @classmethod
    def from_columns(
        cls,
        base_address: npt.ArrayLike,
        block_stride: npt.ArrayLike,
        run_bytes: npt.ArrayLike,
        object_offset: npt.ArrayLike,
        block_count: int,
    ) -> "BlockRuns":
        """Runs by hand; the object is as long as its furthest run."""
        base, length, offset = (
            np.array(c, dtype=np.uint64) for c in (base_address, run_bytes, object_offset)
        )
        stride = np.array(block_stride, dtype=np.int64)
        object_bytes = int((offset + length).max(initial=0))
        native = _native.Runs(base, stride, length, offset, block_count, object_bytes)
        for column in (base, stride, length, offset):
            column.flags.writeable = False
        return cls(base, stride, length, offset, block_count, object_bytes, native)

    @property
    def runs_per_block(self) -> int:
        return len(self.base_address)

    def extents(self) -> npt.NDArray[np.uint64]:
        """Rows (first byte, one past the last) that run i covers over all blocks."""
        last = self.base_address + (self.block_stride * (self.block_count - 1)).astype(np.uint64)
        return np.stack([self.base_address, last + self.run_bytes], axis=1)


def merged_columns(
    runs: BlockRuns,
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64], npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Base address, block stride, bytes and object offset of the fewest runs that move the same bytes: runs
    that follow each other in engine memory and in the object, in every block, are one."""
    base, stride, length, offset = (
        runs.base_address,
        runs.block_stride,
        runs.run_bytes,
        runs.object_offset,
    )
    follows = (
        (base[:-1] + length[:-1] == base[1:])
        & (offset[:-1] + length[:-1] == offset[1:])
        & ((stride[:-1] == stride[1:]) | (runs.block_count == 1))
    )
    first = np.flatnonzero(np.concatenate([[True], ~follows]))
    return base[first], stride[first], np.add.reduceat(length, first), offset[first]


def derive_runs(kv_caches: Mapping[str, KVTensor], block_count: int) -> BlockRuns:
    """The runs of the layers of one group, in the mapping's order; ConfigError names the layer that can't
    be expressed."""
    if not kv_caches:
        raise ConfigError("a cache group needs at least one layer")
    if block_count <= 0:
        raise ConfigError(f"a cache group needs a positive number of blocks, not {block_count}")
    base: list[int] = []
    stride: list[int] = []
    length: list[int] = []
    owner: list[str] = []
    for name, tensor in kv_caches.items():
        offsets, run_bytes, block_stride = _runs_of_layer(name, tensor, block_count)
        base += [tensor.data_ptr() + offset for offset in offsets]
        stride += [block_stride] * len(offsets)
        length += [run_bytes] * len(offsets)
        owner += [name] * len(offsets)
    object_offset = np.cumsum([0, *length[:-1]])
    runs = BlockRuns.from_columns(base, stride, length, object_offset, block_count)
    _refuse_overlap(runs, owner)
    return runs


def _runs_of_layer(name: str, tensor: KVTensor, block_count: int) -> tuple[list[int], int, int]:
    """Offsets of a block's runs from the tensor's start, in address order; their length; the block stride;
    all bytes."""
    shape, element_bytes = tuple(tensor.shape), tensor.element_size()
    strides = tuple(step * element_bytes for step in tensor.stride())
    if len(shape) < 2 or 0 in shape:
        raise ConfigError(f"layer {name}: a KV cache of shape {shape} has no blocks with content")
    if shape[0] % block_count:
        raise ConfigError(f"layer {name}: {shape[0]} kernel blocks don't divide into {block_count} blocks")
    kernel_blocks = shape[0] // block_count
    block_stride = kernel_blocks * strides[0]
    inside = [(step, size) for step, size in zip(strides[1:], shape[1:], strict=True) if size > 1]
    if kernel_blocks > 1:
        inside.append((strides[0], kernel_blocks))
    inside.sort()

    span = element_bytes
    everything = sorted([*inside, (block_stride, block_count)]) if block_count > 1 else inside
    for step, size in everything:
        if step < span:
            raise ConfigError(
                f"layer {name}: strides {strides} of shape {shape} overlap; its blocks can't be copied"
            )
        span += step * (size - 1)

    run_bytes = element_bytes
    while inside and inside[0][0] == run_bytes:
        run_bytes *= inside.pop(0)[1]
    outer = [[index * step for index in range(size)] for step, size in reversed(inside)]
    return [sum(indices) for indices in product(*outer)], run_bytes, block_stride


def _refuse_overlap(runs: BlockRuns, owner: Sequence[str]) -> None:
    """Layers of one group must not share bytes: restoring one would overwrite the other."""
    blocks = np.unique(
        np.concatenate(
            [
                np.arange(min(runs.block_count, _OVERLAP_CHECK_BLOCKS)),
                np.arange(max(0, runs.block_count - _OVERLAP_CHECK_BLOCKS), runs.block_count),
            ]
        )
    )
    start = (runs.base_address.astype(np.int64)[:, None] + runs.block_stride[:, None] * blocks).ravel()
    end = start + np.repeat(runs.run_bytes.astype(np.int64), len(blocks))
    order = np.argsort(start, kind="stable")
    clash = np.flatnonzero(end[order[:-1]] > start[order[1:]])
    if len(clash):
        first, second = (owner[int(order[clash[0] + i]) // len(blocks)] for i in (0, 1))
        raise ConfigError(
            f"layer {first}: its cache shares bytes with layer {second}'s; the group can't be copied"
        )
