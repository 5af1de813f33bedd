"""The package as it is installed and shipped."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import umbp


def pyproject(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text())


def tracked_texts(root: Path) -> list[tuple[str, str]]:
    """Every tracked file that is text, with its name."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=False)
    if listing.returncode != 0:
        pytest.skip("this isn't a git checkout")
    found = []
    for name in filter(None, listing.stdout.split("\0")):
        try:
            found.append((name, (root / name).read_text()))
        except (UnicodeDecodeError, FileNotFoundError):
            continue
    return found


def test_the_version_is_written_once(project_root: Path) -> None:
    assert pyproject(project_root)["project"]["dynamic"] == ["version"]
    assert metadata.version("umbp") == umbp.__version__


def test_the_changelog_speaks_of_this_version_or_of_what_is_unreleased(project_root: Path) -> None:
    changelog = (project_root / "CHANGELOG.md").read_text()
    assert "## [Unreleased]" in changelog or f"## [{umbp.__version__}]" in changelog


def test_every_entry_point_resolves() -> None:
    found = [each for each in metadata.distribution("umbp").entry_points if each.group != "umbp.runtimes"]
    assert {(each.group, each.name) for each in found} >= {
        ("console_scripts", "umbp"),
        ("vllm.general_plugins", "umbp"),
    }
    for each in found:
        assert callable(each.load())


def test_every_import_package_carries_its_type_marker() -> None:
    assert (Path(umbp.__file__).parent / "py.typed").exists()


def test_the_readme_has_the_current_table_of_options(project_root: Path) -> None:
    check = [sys.executable, str(project_root / "scripts" / "update_readme.py"), "--check"]
    assert subprocess.run(check, capture_output=True, text=True, check=False).stderr == ""


def test_no_file_names_the_folder_it_was_written_in(project_root: Path) -> None:
    """What is shipped speaks of itself, not of the machine that it was made on."""
    parent = str(project_root.parent) + "/"
    is_common = project_root.parent == Path.home() or parent in ("//", "/tmp/", "/home/", "/src/", "/opt/")
    if len(project_root.parents) < 2 or is_common:
        pytest.skip(f"{parent} is too common a folder to look for")
    pattern = re.compile(r"(?<![\w.])" + re.escape(parent))
    assert [name for name, text in tracked_texts(project_root) if pattern.search(text)] == []


def test_no_file_has_blank_line_ends_or_lacks_its_last_line_end(project_root: Path) -> None:
    wrong = [
        name
        for name, text in tracked_texts(project_root)
        if name.endswith((".py", ".md", ".toml", ".yml", ".cpp", ".hpp", "Makefile"))
        and text
        and (re.search(r"[ \t]+$", text, re.MULTILINE) or not text.endswith("\n"))
    ]
    assert wrong == []


@pytest.mark.slow
def test_vllm_033_and_the_package_import_in_its_environment(vllm033_python: Path) -> None:
    code = (
        "import umbp, vllm\n"
        "from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1\n"
        "print(vllm.__version__)"
    )
    result = subprocess.run([str(vllm033_python), "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "0.33.0"
