"""How a file that can't be trusted is refused: in one sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from umbp.errors import SegmentError
from umbp.pool import Pool


def assert_refused(path: Path, match: str = "can't be attached") -> None:
    with pytest.raises(SegmentError, match=match) as caught:
        Pool.attach(path)
    assert "\n" not in str(caught.value)
