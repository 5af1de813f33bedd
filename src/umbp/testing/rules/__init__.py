"""The rules of the runtime contract, by subject; `umbp.testing.contract` puts them together."""

from __future__ import annotations

import pytest

# Asserts of a module that isn't a test file are plain otherwise, and a failure would not show its values.
pytest.register_assert_rewrite(
    *(f"{__name__}.{subject}" for subject in ("support", "calls", "content", "extras", "model"))
)
