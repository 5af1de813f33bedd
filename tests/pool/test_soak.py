"""A twentieth of `make soak-pool`, always the same."""

from __future__ import annotations

import pytest
import soak

KILLS = 500


@pytest.mark.slow
def test_processes_killed_and_stopped_at_any_moment_leave_nothing_wrong(
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = soak.run(KILLS, seed=20)
    assert report.total >= KILLS
    assert report.counts["takeovers"] > KILLS // 20  # many of them died holding the lock
    assert report.counts["read"] > KILLS
    assert "crash points that struck" in capsys.readouterr().out


def test_the_soak_knows_the_cores_crash_points() -> None:
    assert any(point.startswith("objects.cpp:") for point in soak.crash_points())
