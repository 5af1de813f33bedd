"""The demo's model folder: whole or absent, made anew when anything about it is not as it was written."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from umbp.cli.demo import model
from umbp.cli.demo.errors import DemoFailedError


@pytest.fixture
def source(tmp_path: Path) -> model.Source:
    gguf = tmp_path / "tiny.gguf"
    gguf.write_bytes(b"GGUF")
    return model.Source(gguf=gguf, version="1.0")


@pytest.fixture
def folder(tmp_path: Path, source: model.Source) -> Path:
    """A folder as the demo writes one, with two numbers for weights."""
    folder = tmp_path / "model"
    folder.mkdir()
    header = json.dumps({"x": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    (folder / model.WEIGHTS).write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    for name in model.REQUIRED_FILES:
        if name != model.WEIGHTS:
            (folder / name).write_text("{}")
    sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
    manifest = {"format": model.FORMAT_VERSION, "source": source.identity(), "files": sizes}
    (folder / model.MANIFEST).write_text(json.dumps(manifest))
    return folder


def test_a_whole_folder_is_valid(folder: Path, source: model.Source) -> None:
    assert model.why_invalid(folder, source) is None


def _cut_weights(folder: Path) -> None:
    file = folder / model.WEIGHTS
    file.write_bytes(file.read_bytes()[:-1])


def _flip_header(folder: Path) -> None:
    file = folder / model.WEIGHTS
    data = bytearray(file.read_bytes())
    data[8] ^= 0xFF
    file.write_bytes(bytes(data))


def _lie_about_header(folder: Path) -> None:
    file = folder / model.WEIGHTS
    file.write_bytes(struct.pack("<Q", 1 << 60) + file.read_bytes()[8:])


def _other_format(folder: Path) -> None:
    manifest = json.loads((folder / model.MANIFEST).read_text())
    (folder / model.MANIFEST).write_text(json.dumps(manifest | {"format": model.FORMAT_VERSION + 1}))


@pytest.mark.parametrize(
    "damage",
    [
        _cut_weights,
        _flip_header,
        _lie_about_header,
        _other_format,
        lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / model.MANIFEST).unlink(),
        lambda folder: (folder / model.MANIFEST).write_text("not json"),
        lambda folder: (folder / model.MANIFEST).write_text("[]"),
    ],
)
def test_a_folder_with_any_damage_is_invalid(
    folder: Path, source: model.Source, damage: Callable[[Path], object]
) -> None:
    damage(folder)
    assert model.why_invalid(folder, source) is not None


def test_a_folder_from_another_version_of_the_package_is_invalid(folder: Path, source: model.Source) -> None:
    assert model.why_invalid(folder, model.Source(gguf=source.gguf, version="1.1")) is not None


def test_no_folder_is_invalid(tmp_path: Path, source: model.Source) -> None:
    assert model.why_invalid(tmp_path / "absent", source) is not None


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("blk.29.attn_q.weight", "model.layers.29.self_attn.q_proj.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
        ("output_norm.weight", "model.norm.weight"),
    ],
)
def test_tensors_get_the_architectures_names(theirs: str, ours: str) -> None:
    assert model.safetensors_name(theirs) == ours


@pytest.mark.parametrize("name", ["blk.0.attn_q.bias", "blk.x.attn_q.weight", "rope_freqs.weight", ""])
def test_an_unknown_tensor_is_refused_by_name(name: str) -> None:
    with pytest.raises(DemoFailedError, match="does not know"):
        model.safetensors_name(name)


def test_the_cache_is_below_xdg_cache_home_when_that_is_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model.cache_root() == tmp_path / "umbp"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert model.cache_root() == Path.home() / ".cache" / "umbp"
