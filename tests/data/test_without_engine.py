"""The vocabulary and the contract need neither vLLM nor torch, and load no device library."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("vllm", "torch", "transformers", "cuda"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
"""


def run_blocked(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BLOCKER + code], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    "module",
    [
        "umbp",
        "umbp.data",
        "umbp.runtime.base",
        "umbp.runtime.factory",
        "umbp.runtime.null",
        "umbp.runtime.wrap.faulty",
        "umbp.runtime.wrap.metered",
        "umbp.runtime.wrap.slow",
        "umbp.testing.contract",
        "umbp.testing.reference",
    ],
)
def test_a_module_imports_where_there_is_no_engine(module: str) -> None:
    result = run_blocked(f"import {module}")
    assert result.returncode == 0, result.stderr


def test_the_messages_are_asked_for_only_when_named() -> None:
    result = run_blocked(
        "import umbp.data\n"
        "assert 'UMBPConnectorMetadata' in umbp.data.__all__\n"
        "try:\n    umbp.data.UMBPConnectorMetadata\n"
        "except ModuleNotFoundError as error:\n    assert error.name.startswith('vllm'), error\n"
        "else:\n    raise SystemExit('vLLM was not asked for')\n"
    )
    assert result.returncode == 0, result.stderr


def test_a_name_that_is_not_in_the_vocabulary_is_an_attribute_error() -> None:
    import umbp.data

    with pytest.raises(AttributeError, match="UMBPNothing"):
        umbp.data.UMBPNothing  # noqa: B018
