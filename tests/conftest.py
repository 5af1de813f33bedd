"""What tests share: a clean environment, markers that follow from others, sentences for what is skipped."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
VLLM033_PYTHON = ROOT / ".venv-vllm033" / "bin" / "python"

# The machine may be busy: an example has no deadline. A failure prints the line that reproduces it.
settings.register_profile("umbp", deadline=None, print_blob=True)
settings.load_profile("umbp")


def pytest_configure(config: pytest.Config) -> None:
    """Nothing that the caller's shell has set for an engine reaches a test."""
    for name in list(os.environ):
        if name.startswith("UMBP_") and name != "UMBP_TRACES":
            del os.environ[name]
    os.environ.pop("PYTHONHASHSEED", None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    has_vllm = importlib.util.find_spec("vllm") is not None
    for item in items:
        if item.get_closest_marker("engine") is not None:
            item.add_marker(pytest.mark.slow)
            if not has_vllm:
                item.add_marker(pytest.mark.skip(reason="vLLM isn't installed: run `make setup`"))
        if item.get_closest_marker("alone") is not None and item.get_closest_marker("vllm033") is not None:
            raise pytest.UsageError(f"{item.nodeid}: what is run alone is run on one vLLM only")


@pytest.fixture(scope="session")
def project_root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def vllm033_python() -> Path:
    """The Python of the environment with vLLM 0.33."""
    if not VLLM033_PYTHON.exists():
        pytest.skip("vLLM 0.33 isn't set up: run `make setup-vllm033`")
    return VLLM033_PYTHON
