"""Runs of every layout against numpy: what is derived from strides alone gathers exactly a block's
content."""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from umbp.errors import ConfigError
from umbp.transfer import BlockRuns, derive_runs

Array = npt.NDArray[np.uint16]
L, B, H, N, C = 3, 5, 2, 4, 8


@dataclass
class View:
    """A numpy array seen through the four methods of a tensor."""

    array: npt.NDArray[np.generic]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def element_size(self) -> int:
        return self.array.itemsize


def layers_of(backing: Array, order: str) -> list[Array]:
    """Per-layer views [B, H, N, C] into one buffer whose dimensions lie in `order` (a permutation of LBHN,
    then C)."""
    axes = [order.index(d) for d in "LBHN"]
    return list(backing.transpose([*axes, 4]))


def backing_for(order: str) -> Array:
    size = {"L": L, "B": B, "H": H, "N": N}
    shape = [size[d] for d in order] + [C]
    return np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)


def gather(runs: BlockRuns, block: int) -> bytes:
    out = bytearray(runs.object_bytes)
    columns = zip(runs.base_address, runs.block_stride, runs.run_bytes, runs.object_offset, strict=True)
    for base, stride, length, offset in columns:
        piece = ctypes.string_at(int(base) + block * int(stride), int(length))
        out[int(offset) : int(offset) + int(length)] = piece
    return bytes(out)


def derive(layers: list[Array], blocks: int = B) -> BlockRuns:
    return derive_runs({f"layer.{i}": View(a) for i, a in enumerate(layers)}, blocks)


def in_memory_order(block: Array) -> Array:
    """A block's elements in the order of their addresses: what a layer's share of the object must be."""
    order = np.argsort([-s for s in block.strides], kind="stable")
    return block.transpose(order)


@pytest.mark.parametrize("order", ["".join(p) for p in itertools.permutations("LBHN")])
def test_every_layout_gathers_exactly_the_block(order: str) -> None:
    layers = layers_of(backing_for(order), order)
    runs = derive(layers)
    for block in range(B):
        expected = b"".join(in_memory_order(layer[block]).tobytes() for layer in layers)
        assert gather(runs, block) == expected


@pytest.mark.parametrize(
    ("order", "runs_per_layer"),
    [("LBHN", 1), ("LBNH", 1), ("BLHN", 1), ("BLNH", 1), ("LHBN", H), ("BHLN", H)],
)
def test_a_block_has_as_many_runs_as_its_layout_makes(order: str, runs_per_layer: int) -> None:
    runs = derive(layers_of(backing_for(order), order))
    assert runs.runs_per_block == L * runs_per_layer
    assert runs.object_bytes == L * H * N * C * 2
    assert runs.run_bytes.tolist() == [H * N * C * 2 // runs_per_layer] * (L * runs_per_layer)


def test_padding_is_left_out() -> None:
    padded = np.zeros((B, 100), np.uint16)
    layer = padded[:, : H * N * C].reshape(B, H, N, C)
    assert np.shares_memory(layer, padded)
    runs = derive([layer])
    assert runs.object_bytes == H * N * C * 2
    assert runs.block_stride.tolist() == [200]


def test_a_block_of_several_kernel_blocks_is_one_run_where_they_touch() -> None:
    layer = np.arange(6 * H * N * C, dtype=np.uint16).reshape(6, H, N, C)
    runs = derive([layer], blocks=3)
    assert runs.runs_per_block == 1
    for block in range(3):
        assert gather(runs, block) == layer[2 * block : 2 * block + 2].tobytes()


def test_a_block_of_several_padded_kernel_blocks_is_one_run_each() -> None:
    padded = np.arange(6 * 100, dtype=np.uint16).reshape(6, 100)
    layer = padded[:, :64].reshape(6, H, N, C)
    runs = derive([layer], blocks=3)
    assert runs.runs_per_block == 2
    for block in range(3):
        assert gather(runs, block) == layer[2 * block : 2 * block + 2].tobytes()


def test_layers_stand_one_after_the_other_in_the_object() -> None:
    a, b = np.zeros((B, 3, 4), np.uint8), np.zeros((B, 7, 4), np.uint8)
    runs = derive([a, b])  # type: ignore[list-item]
    assert runs.object_offset.tolist() == [0, 12]
    assert runs.object_bytes == 40


def test_extents_cover_all_blocks() -> None:
    layers = layers_of(backing_for("LHBN"), "LHBN")
    runs = derive(layers)
    low, high = int(runs.extents()[:, 0].min()), int(runs.extents()[:, 1].max())
    assert low == View(layers[0]).data_ptr()
    assert high == low + L * B * H * N * C * 2


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: np.lib.stride_tricks.as_strided(np.zeros(64, np.uint8), (B, 8), (4, 1)), "layer.0: strides"),
        (lambda: np.broadcast_to(np.zeros((B, 1, 8), np.uint8), (B, 3, 8)), "layer.0: strides"),
        (lambda: np.zeros((B, 8), np.uint8)[:, ::-1], "layer.0: strides"),
        (lambda: np.zeros(B, np.uint8), "layer.0: a KV cache of shape"),
        (lambda: np.zeros((B, 0), np.uint8), "layer.0: a KV cache of shape"),
        (lambda: np.zeros((B + 1, 8), np.uint8), "layer.0: 6 kernel blocks don't divide into 5"),
    ],
)
def test_what_cannot_be_expressed_is_refused_by_the_layers_name(make: object, match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        derive([make()])  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_layers_that_share_bytes_are_refused() -> None:
    buffer = np.zeros(B * 64 + 32, np.uint8)
    one, two = buffer[: B * 64].reshape(B, 64), buffer[32:].reshape(B, 64)
    with pytest.raises(ConfigError, match=r"layer\.0: its cache shares bytes with layer layer\.1's"):
        derive([one, two])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="shares bytes"):
        derive([one, one])  # type: ignore[list-item]


def test_a_group_without_layers_or_blocks_is_refused() -> None:
    with pytest.raises(ConfigError):
        derive_runs({}, 4)
    with pytest.raises(ConfigError):
        derive([np.zeros((4, 4), np.uint16)], blocks=0)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=2, max_size=4),
    blocks=st.integers(1, 4),
    split=st.integers(1, 3),
    pads=st.lists(st.integers(0, 3), min_size=5, max_size=5),
    data=st.data(),
)
def test_any_strided_layout_gathers_exactly_the_block(
    sizes: list[int], blocks: int, split: int, pads: list[int], data: st.DataObject
) -> None:
    """Dimensions in any order in memory, each padded by any amount."""
    shape = [blocks * split, *sizes]
    order = data.draw(st.permutations(range(len(shape))))
    padded = [shape[d] + pads[d] for d in order]
    backing = np.arange(np.prod(padded), dtype=np.uint16).reshape(padded)
    view = backing[tuple(slice(0, shape[d]) for d in order)].transpose(np.argsort(order))
    assert view.shape == tuple(shape)
    runs = derive([view], blocks)
    assert runs.object_bytes == 2 * split * int(np.prod(sizes))
    for block in range(blocks):
        content = view[block * split : (block + 1) * split]
        got = np.frombuffer(gather(runs, block), np.uint16)
        assert got.tolist() == sorted(content.ravel().tolist())  # values grow with addresses


def test_runs_by_hand_must_fit_each_other() -> None:
    assert BlockRuns.from_columns([64], [8], [8], [0], 4).object_bytes == 8
    with pytest.raises(ConfigError):
        BlockRuns.from_columns([64, 65], [8], [8, 8], [0, 8], 4)
    with pytest.raises(ConfigError):
        BlockRuns.from_columns([0], [8], [8], [0], 4)
    with pytest.raises(ConfigError):
        BlockRuns.from_columns([], [], [], [], 4)
