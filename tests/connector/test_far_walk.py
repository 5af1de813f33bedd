"""Random walks through lives of engines with a cluster store behind their pools: whatever the store does, no
byte is wrong, no step waits for it, nothing is left behind, and what is stored is found when it is well.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("umbp._native", reason="the native core isn't built")

from far_walk import FAR_ACTS, walk_far_lives

SEED = 1


@pytest.mark.parametrize("number", [0, 1, 4, 9, 14, 17])
def test_a_store_that_hangs_lies_and_dies_costs_computations_only(root: Path, number: int) -> None:
    walk_far_lives(SEED, 40, root, first=number)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_six_thousand_steps_over_a_cluster_store_leave_nothing_wrong(root: Path) -> None:
    told = walk_far_lives(SEED, 6000, root)
    print(told)
    for what in FAR_ACTS:
        assert told[what], f"{what} never happened"
    for counter in ("fetched_objects", "failed_fetch_objects", "sent_objects", "store_lookup_failures"):
        assert told[counter], f"nothing was counted as {counter}"
