"""Seeds of random tests: the first is quick, and all together take more than a few seconds."""

from __future__ import annotations

from typing import Any

import pytest


def seeds(count: int, quick: int = 1) -> list[Any]:
    """Values for a parametrization; all but the first few are marked slow."""
    return [pytest.param(seed, marks=pytest.mark.slow if seed >= quick else ()) for seed in range(count)]
