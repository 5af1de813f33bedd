"""KV caches of many physical layouts, and a block's bytes as they must lie in its object, read by torch
alone: a reference that shares nothing with the code that it judges."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Caches = dict[str, "torch.Tensor"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Layers' views `[block, head, token, number]` of one buffer whose dimensions lie in `order` (layer,
    block, head, token; numbers last). `pad` numbers of every row of the innermost dimension are no content.
    """

    name: str
    order: str
    dtype: str
    layers: int
    heads: int
    tokens: int
    numbers: int
    pad: int = 0

    def __str__(self) -> str:
        return f"{self.name} {self.order} {self.dtype}"

    def make(self, blocks: int, device: torch.device, seed: int) -> Caches:
        """Random bytes."""
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        sizes = {"L": self.layers, "B": blocks, "H": self.heads, "N": self.tokens}
        shape = [sizes[axis] for axis in self.order]
        row_bytes = (self.numbers + self.pad) * dtype.itemsize
        generator = torch.Generator().manual_seed(seed)
        content = torch.randint(
            0, 256, (prod(shape) * row_bytes,), dtype=torch.uint8, generator=generator
        ).to(device)
        buffer = content.view(dtype).view(*shape, self.numbers + self.pad)[..., : self.numbers]
        views = buffer.permute(*(self.order.index(axis) for axis in "LBHN"), 4)
        return {f"layer{i}": views[i] for i in range(self.layers)}

    def block_bytes(self, caches: Caches, block: int) -> bytes:
        """A block's object: layer after layer, each in the order of its addresses."""
        import torch

        inside = [axis for axis in self.order if axis in "HN"]
        pieces = []
        for cache in caches.values():
            content = cache[block].permute(*("HN".index(axis) for axis in inside), 2).contiguous()
            pieces.append(content.view(torch.uint8).cpu().numpy().tobytes())
        return b"".join(pieces)


LAYOUTS = (
    Layout("tokens first", "LBNH", "bfloat16", 8, 8, 16, 256),
    Layout("heads first", "LBHN", "bfloat16", 8, 8, 16, 256),
    Layout("layers in a block", "BLNH", "bfloat16", 8, 8, 16, 256),
    Layout("heads outside", "LHBN", "bfloat16", 4, 8, 16, 256),
    Layout("heads around layers", "BHLN", "bfloat16", 4, 4, 16, 128),
    Layout("fp8", "LBNH", "float8_e4m3fn", 8, 8, 16, 256),
    Layout("latent", "LBHN", "bfloat16", 6, 1, 64, 576),
    Layout("small blocks", "LBNH", "bfloat16", 3, 1, 4, 64),
    Layout("padded rows", "LBHN", "bfloat16", 2, 4, 8, 96, 32),
)
"""Large and small blocks, one run a layer and many, a number of one byte and of two."""
