"""The recorded inputs and right answers, and stand-ins for the engine's objects that they describe."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "vectors" / "vocabulary.json").read_text())


def vectors(section: str) -> list[Any]:
    return list(VECTORS[section])


def numbered(cases: list[Any]) -> list[str]:
    return [str(number) for number in range(len(cases))]


class HFConfig:
    """A model's configuration that hands out its own dictionary, so that a change of it would show."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def to_dict(self) -> dict[str, Any]:
        return self.content


def make_spec(kind: str, values: dict[str, Any], order: list[str] | None = None) -> Any:
    """An instance of a dataclass of that name with those fields."""
    return dataclasses.make_dataclass(kind, order or list(values))(**values)


def make_group(layer_names: list[str], spec: Any, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(layer_names=layer_names, kv_cache_spec=spec, **more)


def engine_config(case: dict[str, Any]) -> tuple[SimpleNamespace, SimpleNamespace]:
    """The engine's and the KV cache's configuration of a namespace vector."""
    model = dict(case["model_config"])
    hf_config = model.pop("hf_config")
    if hf_config is not None:
        model["hf_config"] = HFConfig(hf_config)
    config = SimpleNamespace(
        model_config=SimpleNamespace(**model),
        cache_config=SimpleNamespace(**case["cache_config"]),
        parallel_config=SimpleNamespace(**case["parallel_config"]),
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=case["extra_config"]),
        speculative_config=None,
    )
    if case["speculative"] is not None:
        config.speculative_config = SimpleNamespace(
            method=case["speculative"]["method"],
            draft_model_config=SimpleNamespace(**case["speculative"]["draft"]),
        )
    groups = [
        make_group(g["layer_names"], make_spec(case["spec_class"], g["spec"], case["spec_field_order"]))
        for g in case["groups"]
    ]
    cache = SimpleNamespace(kv_cache_groups=groups)
    if case["kv_cache_layout"] is not None:
        cache.kv_cache_layout = case["kv_cache_layout"]
    return config, cache


@dataclasses.dataclass
class Cache:
    """A KV cache tensor reduced to what the planner reads."""

    address: int
    stride0: int
    item_bytes: int = 1
    ndim: int = 2
    shape: tuple[int, ...] = (1, 1)

    def data_ptr(self) -> int:
        return self.address

    def element_size(self) -> int:
        return self.item_bytes

    def stride(self, dim: int, /) -> int:
        assert dim == 0
        return self.stride0


def cache_config(case: dict[str, Any]) -> SimpleNamespace:
    """The KV cache's configuration of a layout vector."""
    return SimpleNamespace(
        kv_cache_tensors=[SimpleNamespace(**tensor) for tensor in case["tensors"]],
        kv_cache_groups=[
            make_group(
                group["layers"],
                SimpleNamespace(page_size_bytes=group["page_size_bytes"], block_size=group["block_size"]),
                enable_kv_transfer=group["enable_kv_transfer"],
            )
            for group in case["groups"]
        ],
    )


def caches_of(case: dict[str, Any]) -> dict[str, Cache]:
    return {
        name: Cache(cache["data_ptr"], cache["stride0"], cache["element_size"])
        for name, cache in case["caches"].items()
    }
