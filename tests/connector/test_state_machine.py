"""Stories of engines that hypothesis tells: what goes wrong is told in its fewest acts."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("umbp._native", reason="the native core isn't built")

from state_machine import tell_stories


@pytest.mark.slow
def test_no_story_leaves_a_wrong_byte_or_an_uneven_account(root: Path) -> None:
    told = tell_stories(root, 150)
    print(told)
    for counter in ("hit_tokens", "loaded_tokens", "failed_load_tokens", "stored_tokens"):
        assert told[counter], f"nothing was counted as {counter}"
