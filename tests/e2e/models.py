"""Tiny models whose outputs depend on all of the KV: random weights of normal size, peaky attention, a fixed
seed.

Weights as small as vLLM's dummy ones make every output depend on the last token alone, which would hide wrong
KV.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from e2e import families
from e2e.families import Family


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's shape. `latent` and `local` are numbers that only some families have; see there."""

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
    local: int = 0
    family: Family = families.LLAMA

    @property
    def kv_bytes_per_token(self) -> int:
        """Of a model whose every layer keeps every token."""
        numbers = self.latent + families.ROPE if self.latent else 2 * self.kv_heads * self.head_dim
        return 2 * self.layers * numbers


# Grouped queries, two KV heads: runs with tensor parallel 1 and 2. 2 KiB of KV a token.
TINY = Shape("tiny", layers=4, hidden=256, heads=4, kv_heads=2, intermediate=512)
# 16 KiB of KV a token: the model for comparisons with other systems.
PEERS = Shape("peers", layers=8, hidden=512, heads=8, kv_heads=8, intermediate=1408)
# One KV head: each of two ranks has a copy of it.
ONE_HEAD = Shape("one-head", layers=4, hidden=256, heads=4, kv_heads=1, intermediate=512)
# Latent attention: every rank of a tensor-parallel engine has the same KV.
LATENT = Shape(
    "latent",
    layers=3,
    hidden=256,
    heads=4,
    kv_heads=4,
    intermediate=512,
    latent=512,
    family=families.LATENT,
)
# Two windowed layers and a full one, twice. The window ends within a block.
SLIDING = Shape(
    "sliding",
    layers=6,
    hidden=256,
    heads=4,
    kv_heads=2,
    intermediate=512,
    local=80,
    family=families.SLIDING,
)
# Layers that see a chunk of two blocks, and full ones.
CHUNKED = Shape(
    "chunked",
    layers=4,
    hidden=256,
    heads=4,
    kv_heads=2,
    intermediate=512,
    local=64,
    family=families.CHUNKED,
)
# Three recurrent layers and a full one, twice: each of two stages has both.
DELTA = Shape(
    "delta", layers=8, hidden=256, heads=4, kv_heads=2, intermediate=512, local=64, family=families.DELTA
)
# Recurrent layers alone.
MAMBA = Shape(
    "mamba", layers=3, hidden=256, heads=8, kv_heads=8, intermediate=512, local=32, family=families.MAMBA
)
# What drafts for TINY.
DRAFT = Shape("draft", layers=1, hidden=256, heads=4, kv_heads=2, intermediate=512, family=families.EAGLE)


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

    config = families.common_config(shape) | shape.family.config(shape)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = shape.family.weights(shape, families.Draw(seed))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
