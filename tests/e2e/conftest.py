"""Fixtures of the end-to-end tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.harness import EnginePool

# Before a test file imports it: its assertions are worth pytest's words.
pytest.register_assert_rewrite("e2e.rules")


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePool]:
    """Engines by specification, shared by all tests of the session, one at a time."""
    pool = EnginePool(tmp_path_factory.mktemp("engines"))
    yield pool
    pool.close()
