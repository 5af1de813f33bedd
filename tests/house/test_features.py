"""The table of vLLM's features tells by which test each is known; those tests are there."""

from __future__ import annotations

import re
from pathlib import Path


def table(project_root: Path) -> list[list[str]]:
    """The cells of each row, headings left out."""
    lines = (project_root / "docs" / "features.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    return [cells for cells in rows if cells[0] not in ("feature", "---")]


def test_every_row_says_whether_it_works_and_by_which_test_that_is_known(project_root: Path) -> None:
    rows = table(project_root)
    assert len(rows) > 30
    for feature, state, *tests in rows:
        assert state.startswith(("works", "refused", "doesn't work")), feature
        named = [name for cell in tests for name in re.findall(r"`([\w/]+\.py)`", cell)]
        assert named or state.startswith("doesn't work"), f"{feature}: by no test"
        for name in named:
            assert (project_root / "tests" / name).is_file(), f"{feature}: {name} isn't there"
