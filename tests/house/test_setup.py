"""Rules of the scripts that build the environments."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def script(root: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, root / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def setup_env(project_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, set on an empty folder."""
    module = script(project_root, "setup_env")
    venv = tmp_path / ".venv"
    (venv / "bin").mkdir(parents=True)
    for name, value in {
        "ROOT": tmp_path,
        "VENV": venv,
        "PYTHON": venv / "bin" / "python",
        "STAMP": venv / "stamp.json",
        "MARKER": venv / "unfinished",
    }.items():
        monkeypatch.setattr(module, name, value)
    return module


@pytest.mark.parametrize(
    ("requirement", "wanted"),
    [
        ('torch==2.13.0+cpu; platform_machine == "x86_64"', 'torch==2.13.0; platform_machine == "x86_64"'),
        ("torch==2.13.0", "torch==2.13.0"),
        ('torchvision; platform_machine != "riscv64"', ""),
        ("torchaudio==2.11.0", ""),
        ('torchcodec>=0.14; platform_machine != "riscv64"', ""),
        ('pandas; extra == "bench"', ""),
        ("fastapi[standard]<0.137.0,>=0.133.0", "fastapi[standard]<0.137.0,>=0.133.0"),
    ],
)
def test_vllms_requirements_become_ones_that_any_machine_can_meet(
    setup_env: Any, requirement: str, wanted: str
) -> None:
    assert setup_env.usable(requirement) == wanted


def test_a_stamp_counts_only_beside_a_python_and_without_the_mark_of_a_run_cut_short(setup_env: Any) -> None:
    setup_env.write_whole(setup_env.STAMP, json.dumps({"environment": "e", "core": "c"}))
    assert setup_env.read_stamp() == {}
    setup_env.PYTHON.touch()
    assert setup_env.read_stamp() == {"environment": "e", "core": "c"}
    setup_env.MARKER.touch()
    assert setup_env.read_stamp() == {}
    setup_env.MARKER.unlink()
    setup_env.STAMP.write_text("{")
    assert setup_env.read_stamp() == {}


def test_the_core_is_built_anew_when_any_of_its_sources_changes(setup_env: Any) -> None:
    project = {"project": {}, "tool": {"scikit-build": {}}}
    (setup_env.ROOT / "CMakeLists.txt").write_text("one")
    source = setup_env.ROOT / "native" / "pool" / "pool.cpp"
    source.parent.mkdir(parents=True)
    source.write_text("one")
    digests = [setup_env.core_digest(project)]
    source.write_text("two")
    digests.append(setup_env.core_digest(project))
    source.rename(source.with_name("moved.cpp"))
    digests.append(setup_env.core_digest(project))
    # Scenario: after an update with a new module the old installation didn't find it.
    module = setup_env.ROOT / "src" / "umbp" / "new.py"
    module.parent.mkdir(parents=True)
    module.write_text("one")
    digests.append(setup_env.core_digest(project))
    assert len(set(digests)) == 4
    module.write_text("two")
    assert setup_env.core_digest(project) == digests[-1], "modules are read where they are"


def test_no_suitable_python_is_one_sentence(project_root: Path) -> None:
    result = subprocess.run(
        [str(project_root / "scripts" / "find_python")],
        env={**os.environ, "PYTHON": "/nowhere/python"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "make PYTHON=" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_the_readme_without_markers_stays_as_it_is(project_root: Path) -> None:
    updated = script(project_root, "update_readme").updated
    for text in ("", "no marker", "<!-- options --> and no end"):
        assert updated(text) == text
    once = updated("before <!-- options -->old<!-- /options --> after")
    assert updated(once) == once
    assert "`capacity_bytes`" in once
