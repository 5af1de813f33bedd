"""Imports point down; vLLM, torch and Python.h stay where they belong."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"

LAYERS = (
    {"errors", "kinds", "options", "plugins", "data"},
    {"transfer", "pool", "store", "sim"},
    {"runtime"},
    {"connector", "testing"},
    {"cli", "__main__"},
)
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}
FREE = {"_native"}
"""The compiled core: it imports nothing, and is imported by whoever needs it."""

LIGHT = (
    "umbp",
    "umbp.data",
    "umbp.options",
    "umbp.runtime.base",
    "umbp.runtime.factory",
    "umbp.cli",
    "umbp.connector",
    "umbp.testing",
)
HEAVY = ("vllm", "torch", "transformers", "numpy.testing")
SCRIPTED_ENGINE = "umbp.testing.engine"
"""The one folder beside the connector that stands on vLLM: it runs vLLM's scheduler."""


@dataclass(frozen=True, slots=True)
class Import:
    """One import statement: who imports what, and whether loading the module runs it."""

    module: str
    target: str
    function: str
    is_at_load: bool

    @property
    def part(self) -> str:
        return part_of(self.module)


def part_of(module: str) -> str:
    """The first name under `umbp`: the layer's member."""
    return [*module.split("."), ""][1]


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def modules() -> list[Path]:
    return sorted((SOURCE / "umbp").rglob("*.py"))


def imports_of(path: Path) -> list[Import]:
    return list(walk(ast.parse(path.read_text()), module_name(path), "", True))


def walk(node: ast.AST, module: str, function: str, is_at_load: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(module, alias.name, function, is_at_load)
        elif isinstance(child, ast.ImportFrom):
            base = child.module or ""
            # `from umbp import options` names a layer in what is imported.
            names = [f"umbp.{alias.name}" for alias in child.names] if base == "umbp" else [base]
            for target in names:
                yield Import(module, target, function, is_at_load)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from walk(child, module, getattr(child, "name", function), False)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for branch in child.body:
                yield from walk(ast.Module([branch], []), module, function or "TYPE_CHECKING", False)
            for branch in child.orelse:
                yield from walk(ast.Module([branch], []), module, function, is_at_load)
        else:
            yield from walk(child, module, function, is_at_load)


ALL_IMPORTS = [each for path in modules() for each in imports_of(path)]
INTERNAL = [
    each for each in ALL_IMPORTS if each.target.startswith("umbp.") and part_of(each.target) not in FREE
]


def is_the_exception(each: Import) -> bool:
    """`umbp.data.__getattr__` hands on three classes that have a base of vLLM's."""
    return (
        each.module == "umbp.data"
        and each.function in ("__getattr__", "TYPE_CHECKING")
        and each.target in ("umbp.connector", "umbp.connector.wire")
    )


def is_of_the_scripted_engine(each: Import) -> bool:
    return f"{each.module}.".startswith(f"{SCRIPTED_ENGINE}.")


def test_only_the_scripted_engine_imports_the_connector_beside_the_cli() -> None:
    wrong = [
        f"{each.module} imports {each.target}"
        for each in INTERNAL
        if part_of(each.target) == "connector"
        and each.part == "testing"
        and not is_of_the_scripted_engine(each)
    ]
    assert wrong == []


def test_every_module_belongs_to_a_layer() -> None:
    parts = {part_of(module_name(path)) for path in modules()} - {""}
    assert parts <= set(RANK)


def test_imports_point_down() -> None:
    upward = [
        f"{each.module} imports {each.target}"
        for each in INTERNAL
        if part_of(each.target) in RANK
        and RANK.get(each.part, -1) < RANK[part_of(each.target)]
        and not is_the_exception(each)
    ]
    assert upward == []


def test_members_of_one_layer_do_not_import_each_other_in_a_circle() -> None:
    edges = {(each.part, part_of(each.target)) for each in INTERNAL if not is_the_exception(each)}
    edges = {(a, b) for a, b in edges if a != b}
    while edges:
        importing = {a for a, _ in edges}
        done = {(a, b) for a, b in edges if b not in importing}
        assert done, f"a circle among {sorted(importing)}"
        edges -= done


def test_imports_are_absolute() -> None:
    relative = [
        module_name(path)
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert relative == []


def test_only_the_connector_imports_vllm_and_the_cli_when_it_is_called() -> None:
    wrong = [
        f"{each.module} imports {each.target}"
        for each in ALL_IMPORTS
        if each.target.split(".")[0] == "vllm"
        and each.part != "connector"
        and not is_of_the_scripted_engine(each)
        and (each.part != "cli" or each.is_at_load)
    ]
    assert wrong == []


def test_only_the_connector_imports_torch_at_load() -> None:
    wrong = [
        f"{each.module} imports {each.target}"
        for each in ALL_IMPORTS
        if each.target.split(".")[0] == "torch"
        and each.is_at_load
        and each.part != "connector"
        and not is_of_the_scripted_engine(each)
    ]
    assert wrong == []


@pytest.mark.parametrize("module", LIGHT)
def test_a_light_module_loads_without_vllm_and_torch(module: str) -> None:
    code = f"import sys, {module}; print(*sorted(set(sys.modules) & {set(HEAVY)}))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""


def native_sources() -> list[Path]:
    return [
        path
        for path in sorted((ROOT / "native").rglob("*"))
        if path.suffix in (".cpp", ".hpp", ".h", ".cc") and "third_party" not in path.parts
    ]


def test_only_the_bindings_know_of_python() -> None:
    wrong = [
        str(path.relative_to(ROOT))
        for path in native_sources()
        if "bindings" not in path.parts
        and re.search(r'#\s*include\s*[<"](Python\.h|nanobind|pybind11)', path.read_text())
    ]
    assert wrong == []
